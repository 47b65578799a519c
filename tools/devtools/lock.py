# SPDX-License-Identifier: Apache-2.0
"""Making the pins: what `tools/dev.py lock` does for maintainers.

pip resolves, from the requirements the pyproject files declare; what it downloads is pinned by hash; uv then
locks against that folder alone. Needs Python 3.11.
"""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from . import lowest, pins, places, project, toolenv, vllm_build
from .console import Step


def run(*, upgrade: bool) -> int:
    """Write tools/requirements/*.txt and uv.lock; the versions pinned so far are kept unless `upgrade`."""
    with places.exclusive(places.cache_dir()):
        with tempfile.TemporaryDirectory(dir=places.cache_dir(), prefix="lock-") as name:
            _Resolution(Path(name), upgrade).run()
        binaries = toolenv.ensure()
        project.ensure_wheelhouse(binaries)
        with Step("locking") as step:
            env = toolenv.environ(binaries)
            command: list[str | Path] = [
                binaries / "uv",
                "lock",
                "--python",
                places.python_for_lock(),
                "--no-cache",
            ]
            step.run(command, env=env, cwd=places.ROOT)
    print("written: tools/requirements/*.txt and uv.lock")
    return 0


def read_toml(path: Path) -> dict[str, Any]:
    """A parsed pyproject file."""
    import tomllib  # only maintainers need Python 3.11 for this script itself

    return tomllib.loads(path.read_text())


def members(root: Mapping[str, Any]) -> list[Path]:
    """The folders of the workspace's members."""
    return [places.ROOT / member for member in root["tool"]["uv"]["workspace"]["members"]]


def declared(root: Mapping[str, Any], projects: Sequence[Mapping[str, Any]]) -> set[str]:
    """Every requirement that the workspace declares, without those on its own packages."""
    own = {entry["project"]["name"] for entry in projects}
    found: list[str] = []
    for entry in [root, *projects]:
        project_table = entry.get("project", {})
        found += project_table.get("dependencies", [])
        for extra in project_table.get("optional-dependencies", {}).values():
            found += extra
        for group in entry.get("dependency-groups", {}).values():
            found += [item for item in group if isinstance(item, str)]
        found += entry.get("build-system", {}).get("requires", [])
    return {requirement for requirement in found if requirement_name(requirement) not in own}


def requirement_name(requirement: str) -> str:
    """The normalised name of a requirement."""
    match = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert match is not None, requirement
    return re.sub(r"[-_.]+", "-", match[0]).lower()


def _lines(path: Path) -> list[str]:
    return [line for line in path.read_text().splitlines() if line and not line.startswith("#")]


def _write(name: str, files: Iterable[Path]) -> None:
    text = pins.render(pins.pin_file(path) for path in files)
    (places.REQUIREMENTS / f"{name}.txt").write_text(text)


class _Resolution:
    """One resolution by pip in a scratch folder."""

    def __init__(self, scratch: Path, upgrade: bool) -> None:
        self._scratch = scratch
        self._upgrade = upgrade
        self._env = places.clean_environ({"TMPDIR": str(scratch)})
        self._pip: list[str | Path] = [scratch / "environment" / "bin" / "python", "-m", "pip"]

    def run(self) -> None:
        root = read_toml(places.ROOT / "pyproject.toml")
        projects = [read_toml(member / "pyproject.toml") for member in members(root)]
        requirements = declared(root, projects)
        requirements |= set(_lines(places.REQUIREMENTS / "wheelhouse.in"))
        # What uv is told about by hand is taken without what it says it requires.
        told = root["tool"]["uv"].get("dependency-metadata", [])
        alone = {item["name"] for item in told}
        bare = {item for item in requirements if requirement_name(item) in alone}
        requirements |= {need for item in told for need in item.get("requires-dist", [])}

        self._make_environment()
        tools = self._download("tools", _lines(places.REQUIREMENTS / "tools.in"), kept=self._kept("tools"))
        _write("tools", tools.iterdir())
        vllm = self._build_vllm()
        kept = self._kept("wheelhouse")
        inputs = (requirements - bare) | set(_lines(vllm_build.BUILD_INPUT))
        folder = self._download("wheelhouse", sorted(inputs), ["--find-links", str(vllm.parent)], kept=kept)
        self._download("wheelhouse", sorted(bare), ["--no-deps"], kept=kept)
        (folder / vllm.name).unlink()
        _write("wheelhouse", folder.iterdir())
        self._pin_lowest(projects, {path.name for path in folder.iterdir()})
        # What was fetched to be pinned need not be fetched again to fill the wheelhouse.
        project.wheelhouse_dir().mkdir(parents=True, exist_ok=True)
        for path in folder.iterdir():
            shutil.move(path, project.wheelhouse_dir() / path.name)

    def _pin_lowest(self, projects: Sequence[Mapping[str, Any]], have: set[str]) -> None:
        floors = [f"{name}=={version}" for name, version in lowest.floors(projects).items()]
        torch = _lines(vllm_build.BUILD_INPUT)[0]
        folder = self._download("lowest", [*floors, torch])
        _write("lowest", (path for path in folder.iterdir() if path.name not in have))

    def _make_environment(self) -> None:
        with Step("making a scratch environment") as step:
            step.run([places.python_for_lock(), "-m", "venv", self._scratch / "environment"], env=self._env)
            step.run([*self._pip, "install", "--upgrade", "pip"], env=self._env)

    def _kept(self, name: str) -> list[str]:
        """The versions pinned so far, unless they are to be upgraded."""
        path = places.REQUIREMENTS / f"{name}.txt"
        return [] if self._upgrade or not path.exists() else [pin.requirement for pin in pins.read(path)]

    def _download(
        self, name: str, requirements: Sequence[str], options: Sequence[str] = (), *, kept: Sequence[str] = ()
    ) -> Path:
        """Let pip resolve `requirements` and fetch them into a folder, which is returned."""
        folder = self._scratch / name
        listing, constraints = self._scratch / f"{name}.in", self._scratch / f"{name}-constraints.txt"
        listing.write_text("".join(f"{line}\n" for line in requirements))
        constraints.write_text("".join(f"{line}\n" for line in kept))
        command = [*self._pip, "download", "--no-input", "--only-binary", ":all:", "--progress-bar", "off"]
        command += ["--dest", folder, "--requirement", listing, "--constraint", constraints, *options]
        with Step(f"resolving {name}") as step:
            step.run(command, env=self._env)
        return folder

    def _build_vllm(self) -> Path:
        """Pin the source distribution, and build the wheel whose requirements the resolution needs."""
        with Step("installing what builds vLLM") as step:
            step.run([*self._pip, "install", "--requirement", vllm_build.BUILD_INPUT], env=self._env)
        folder = self._scratch / "sdist"
        env = {**self._env, **vllm_build.ENVIRON}
        command = [*self._pip, "download", "--no-deps", "--no-binary", "vllm", "--no-build-isolation"]
        with Step("fetching the source of vLLM") as step:
            step.run([*command, "--dest", folder, f"vllm=={vllm_build.VERSION}"], env=env)
        _write("vllm-sdist", folder.iterdir())
        wheel = vllm_build.directory() / vllm_build.WHEEL
        if not wheel.exists():
            vllm_build.build(self._scratch / "environment", self._pip, self._scratch)
            vllm_build.check(self._scratch / vllm_build.WHEEL)
            wheel.parent.mkdir(parents=True, exist_ok=True)
            (self._scratch / vllm_build.WHEEL).replace(wheel)
        return wheel
