# SPDX-License-Identifier: Apache-2.0
"""Run vLLM's own tests against the plugin: `python -m upstream [FOLDER...] [--fast]`, with `tools` on the path."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import click
from rich.console import Console

from devtools import places
from devtools.console import Failure

from . import expectations, folders, hub, report, source, verdict
from .process import Run
from .record import Result

TOOLS = Path(__file__).resolve().parents[1]
REPORT = "upstream-report.json"
FAST_MODELS = {"tiny"}
"""The stand-ins that the fast slice needs."""


def environ(checkout: Path, home: Path, root: Path) -> dict[str, str]:
    """The environment of vLLM's tests: the local hub, caches of their own, and this interpreter's commands.

    The checkout is importable because servers are told of classes in it.
    """
    env = dict(os.environ)
    folders = [env.get("PYTHONPATH", ""), str(TOOLS), str(checkout)]
    env["PYTHONPATH"] = os.pathsep.join(filter(None, folders))
    env["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), env.get("PATH", "")])
    env.update(HF_HOME=str(home), HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", DO_NOT_TRACK="1")
    env.setdefault("VLLM_CACHE_ROOT", str(root / "vllm"))
    return env


@click.command()
@click.argument("names", nargs=-1, metavar="[FOLDER]...")
@click.option("--fast", is_flag=True, help="Only the slice that belongs to the default run.")
@click.option("--list", "listing", is_flag=True, help="Print the folders and end.")
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    help="Where logs, records and the report go; default: a folder in the cache directory, which is emptied.",
)
def main(names: tuple[str, ...], fast: bool, listing: bool, out: Path | None) -> None:
    """Run FOLDERs of vLLM's own tests, or all, and hold the results against the expectations."""
    try:
        chosen = folders.choose(folders.read(), names)
        if listing:
            click.echo("\n".join(f"{each.name:20} {' '.join(each.paths)}" for each in chosen))
            return
        if not run([each for each in chosen if each.fast or not fast], fast, out):
            sys.exit(1)
    except Failure as failure:
        raise click.ClickException(str(failure)) from failure


def run(chosen: list[folders.Folder], fast: bool, out: Path | None) -> bool:
    """Run the folders one after another, print and write the report; returns whether all is well."""
    listed = expectations.read()
    root = places.cache_dir() / "upstream"
    checkout = source.ensure(root)
    home = hub.ensure(root, FAST_MODELS if fast else None)
    scratch = out or root / "run"
    if out is None:
        shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True, exist_ok=True)
    pytest = Run(checkout, environ(checkout, home, root), scratch)
    verdicts = []
    for folder in chosen:
        click.echo(f"{folder.name}: {' '.join(folder.fast if fast else folder.paths)}")
        selection = folder.fast if fast else folder.paths
        try:
            results = pytest.folder(folder.name, selection, timeout_s=folder.timeout_s, ignore=folder.ignore)
        except Failure as failure:  # the other folders are still worth running
            results = {folder.paths[0]: Result("failed", str(failure))}
        verdicts.append(verdict.judge(folder.name, results, listed, paths=folder.paths, whole=not fast))
        report.write(verdicts, scratch / REPORT)
    report.show(verdicts, Console(width=None if sys.stdout.isatty() else 160))
    click.echo(f"logs and {REPORT}: {scratch}")
    everything = not fast and len(chosen) == len(folders.read())
    enough = not everything or verdict.share(verdicts) >= verdict.LEAST_SHARE
    return enough and all(each.is_good for each in verdicts)


if __name__ == "__main__":
    main(prog_name="python -m upstream")
