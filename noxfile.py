# SPDX-License-Identifier: Apache-2.0
"""Sessions that check the workspace; run them with `python3 tools/dev.py nox`, which provides uv and wheels.

What a session installs comes from the wheelhouse, hard-linked out of uv's cache, which takes seconds.
"""

import sys
import tomllib
from pathlib import Path

import nox

ROOT = Path(__file__).parent
sys.path.insert(0, str(ROOT / "tools"))

from devtools import lowest, project  # noqa: E402


def read_toml(path: Path) -> dict:
    return tomllib.loads(path.read_text())


MEMBERS = {
    Path(member).name: member
    for member in read_toml(ROOT / "pyproject.toml")["tool"]["uv"]["workspace"]["members"]
}
WORKSPACE = "workspace"
QUIET = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
NO_TESTS_COLLECTED = 5

nox.needs_version = ">=2025.10"
nox.options.sessions = ["tests", "lint", "types", "imports", "wheels"]
nox.options.default_venv_backend = "uv"
nox.options.reuse_venv = "yes"
nox.options.error_on_external_run = True


def import_name(member: str) -> str:
    """The one import package of a member, from its build settings."""
    build = read_toml(ROOT / member / "pyproject.toml")["tool"]["hatch"]["build"]
    (package,) = build["targets"]["wheel"]["packages"]
    return Path(package).name


def sync(session: nox.Session, *arguments: str) -> None:
    """Make the session's environment what uv.lock says for `arguments`, and nothing else."""
    env = {"UV_PROJECT_ENVIRONMENT": session.virtualenv.location}
    session.run_install("uv", "sync", "--frozen", "--quiet", *arguments, env=env, external=True)


def use_project_environment(session: nox.Session) -> str:
    """Bring `.venv` up to date; returns its `bin` folder."""
    session.run_install("uv", *project.SYNC, external=True)
    return str(project.ENVIRONMENT / "bin")


@nox.session
@nox.parametrize("package", [*MEMBERS, WORKSPACE], ids=[*MEMBERS, WORKSPACE])
def tests(session: nox.Session, package: str) -> None:
    """Test one package in an environment that holds only what it requires; `workspace` spans them."""
    if package == WORKSPACE:
        python = f"{use_project_environment(session)}/python"
        paths = ["tests", "tools/tests"]
    else:
        sync(session, "--package", package, "--group", "test", "--no-default-groups")
        python = "python"
        paths = [f"{MEMBERS[package]}/tests"]
    if any((ROOT / word.partition("::")[0]).exists() for word in session.posargs):
        paths = []  # what to run is said by hand
    session.run(
        python,
        *("-m", "pytest", *(path for path in paths if (ROOT / path).exists()), *session.posargs),
        env=QUIET,
        external=package == WORKSPACE,
        success_codes=[0, NO_TESTS_COLLECTED],
    )


@nox.session
def lint(session: nox.Session) -> None:
    """Ruff: rules and format."""
    sync(session, "--only-group", "lint")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("uv", "lock", "--check", "--quiet", external=True)


@nox.session(venv_backend="none")
def types(session: nox.Session) -> None:
    """Mypy, strict, over the packages and the tools."""
    binaries = use_project_environment(session)
    sources = [f"{member}/src" for member in MEMBERS.values()]
    session.run(f"{binaries}/mypy", *sources, external=True)
    session.run(f"{binaries}/mypy", "tools", external=True)


@nox.session(venv_backend="none")
def imports(session: nox.Session) -> None:
    """Import-linter: who may import whom."""
    binaries = use_project_environment(session)
    session.run(f"{binaries}/lint-imports", external=True)


@nox.session(venv_backend="none")
def docs(session: nox.Session) -> None:
    """Build the documentation; a warning is an error."""
    binaries = use_project_environment(session)
    quiet = {"NO_MKDOCS_2_WARNING": "1"}
    session.run(f"{binaries}/mkdocs", "build", "--strict", *session.posargs, env=quiet, external=True)


@nox.session(venv_backend="none")
def wheels(session: nox.Session) -> None:
    """Build every package as it is published, install each alone in an empty environment, and import it."""
    scratch = Path(session.create_tmp())
    distributions = scratch / "dist"
    build = [
        "uv",
        "build",
        "--all-packages",
        "--no-sources",
        "--quiet",
        "--clear",
        "--out-dir",
        str(distributions),
    ]
    session.run(*build, external=True)
    # uv keeps what it found by `--find-links` by name and version, which say the same before and after a change.
    session.run("uv", "cache", "clean", "--quiet", *MEMBERS, external=True)
    for package, member in MEMBERS.items():
        (wheel,) = distributions.glob(f"{package.replace('-', '_')}-*.whl")
        environment = scratch / package
        session.run(
            "uv", "venv", "--quiet", "--clear", "--python", sys.executable, str(environment), external=True
        )
        install = [
            "uv",
            "pip",
            "install",
            "--quiet",
            "--python",
            str(environment),
            "--find-links",
            str(distributions),
        ]
        session.run(*install, str(wheel), external=True)
        python = str(environment / "bin" / "python")
        session.run(
            python,
            "-I",
            str(ROOT / "tools" / "check_installed.py"),
            package,
            import_name(member),
            external=True,
        )
        if package == "neuron-accuracy":
            kit = str(ROOT / member / "tests" / "accuracy_kit.py")
            session.run(python, "-I", str(ROOT / "tools" / "check_accuracy_alone.py"), kit, external=True)


@nox.session(name="lowest")
def lowest_versions(session: nox.Session) -> None:
    """Run the unit tests with the lowest version of every library that the packages say they accept."""
    members = [member for name, member in MEMBERS.items() if name != lowest.NOT_TESTED]
    floors = lowest.floors(read_toml(ROOT / member / "pyproject.toml") for member in members)
    pinned = [f"{name}=={version}" for name, version in floors.items()]
    editable = [word for member in members for word in ("--editable", member)]
    groups = [word for member in members for word in ("--group", f"{member}/pyproject.toml:test")]
    install = ["uv", "pip", "install", "--quiet", "--find-links", str(lowest.ensure_wheelhouse())]
    session.run_install(*install, *pinned, *editable, *groups, external=True)
    paths = [f"{member}/tests/unit" for member in members if (ROOT / member / "tests" / "unit").exists()]
    session.run("python", "-m", "pytest", *(session.posargs or paths), env=QUIET)


@nox.session(venv_backend="venv")
def lowering(session: nox.Session) -> None:
    """Run the lowering to HLO with a real torch_xla; pip fetches it and an older torch, some gigabytes."""
    tools = ["pytest", "pytest-timeout", "hypothesis", "scipy"]
    session.install("torch==2.9.*", "torch-xla==2.9.*", *tools, "--editable", MEMBERS["neuron-core"])
    session.run(
        "python", "-m", "pytest", f"{MEMBERS['neuron-core']}/tests/lowering", *session.posargs, env=QUIET
    )


@nox.session(venv_backend="none")
def bench(session: nox.Session) -> None:
    """Measure throughput and latency, against a peer with `-- --peer PYTHON`."""
    binaries = use_project_environment(session)
    session.run(f"{binaries}/python", "tools/bench.py", *session.posargs, env=QUIET, external=True)


@nox.session(venv_backend="none")
def upstream(session: nox.Session) -> None:
    """Run vLLM's own tests against the plugin; all, or `-- FOLDER... [--fast]`."""
    binaries = use_project_environment(session)
    env = QUIET | {"PYTHONPATH": str(ROOT / "tools")}
    session.run(f"{binaries}/python", "-m", "upstream", *session.posargs, env=env, external=True)


@nox.session(venv_backend="none")
def browser(session: nox.Session) -> None:
    """Look at the accuracy report in a real Chromium, which has to be installed; pip fetches what drives it."""
    python = f"{use_project_environment(session)}/python"
    driver = session.create_tmp()
    session.run(
        python, "-m", "pip", "install", "--quiet", "--target", driver, "playwright>=1.50", external=True
    )
    tests = f"{MEMBERS['neuron-accuracy']}/tests/browser"
    env = QUIET | {"PYTHONPATH": str(Path(driver).resolve())}
    session.run(python, "-m", "pytest", tests, *session.posargs, env=env, external=True)
