# SPDX-License-Identifier: Apache-2.0
"""``neuron cache``: what was compiled, how much room it takes, whether it is whole, and what may go."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from neuron_core.cli.explain import explain
from neuron_core.cli.local import cache_dir_option, chosen, keys_argument, open_cache, short
from neuron_core.cli.output import (
    AGE,
    SIZE,
    cell,
    console,
    format_age,
    format_bytes,
    json_option,
    new_table,
    print_json,
    progress_bar,
)
from neuron_core.cli.transfer import digests, keygen, pull, push
from neuron_core.environ import Environment
from neuron_core.errors import CacheError

if TYPE_CHECKING:
    from neuron_core.graphs.cache import CacheEntry, CompileCache

__all__ = ["cache"]


@click.group(short_help="List, verify, explain, prune and share compiled graphs.")
def cache() -> None:
    """Look after compiled graphs: list, measure, verify, explain, prune, share.

    \b
    Examples:
      neuron cache ls
      neuron cache verify
      neuron cache explain 9f2c 41ab
      neuron cache prune --max-size 20GiB --older-than 30d
      neuron cache push --remote s3://team/graphs --sign-key signing.pem
    """


@cache.command()
@keys_argument
@cache_dir_option
@json_option
def ls(keys: tuple[str, ...], cache_dir: Path | None, as_json: bool) -> None:
    """List entries, the most recently used first.

    \b
    Examples:
      neuron cache ls
      neuron cache ls --json
    """
    opened = open_cache(cache_dir)
    in_use = _in_use(opened)
    now = time.time()
    rows = [_row(entry, in_use, now) for entry in chosen(opened, keys)]
    rows.sort(key=lambda row: row["last_used_s"])
    if as_json:
        print_json({"cache_dir": str(opened.root), "entries": rows})
        return
    table = new_table(
        *("key", "part", "bucket", "compiler", "size", "age", "last use", "in use"),
        right=("size", "age", "last use"),
        fold=("part", "bucket"),
    )
    for row in rows:
        ages = [format_age(row[name]) if row[name] is not None else "" for name in ("age_s", "last_used_s")]
        used = "yes" if row["in_use"] else ""
        cells = (
            short(row["key"]),
            row["part"],
            row["bucket"],
            row["compiler"],
            format_bytes(row["size_bytes"]),
        )
        table.add_row(*(cell(text) for text in (*cells, *ages, used)))
    console().print(table)
    total = format_bytes(sum(row["size_bytes"] for row in rows))
    click.echo(f"{len(rows)} entries, {total}, in {opened.root}")


@cache.command()
@cache_dir_option
@json_option
def du(cache_dir: Path | None, as_json: bool) -> None:
    """Show what takes the room.

    Entries are counted by compiler, everything else by folder.

    \b
    Example:
      neuron cache du
    """
    opened = open_cache(cache_dir)
    use: dict[str, dict[str, int]] = {}
    for entry in opened.entries():
        kind = f"graphs ({entry.manifest.get('compiler', 'unknown')})"
        counted = use.setdefault(kind, {"count": 0, "size_bytes": 0})
        counted["count"] += 1
        counted["size_bytes"] += entry.size_bytes
    for folder in sorted(path for path in opened.root.iterdir() if path.is_dir() and path.name != "graphs"):
        sizes = list(_file_sizes(folder))
        use[folder.name] = {"count": len(sizes), "size_bytes": sum(sizes)}
    total = sum(counted["size_bytes"] for counted in use.values())
    if as_json:
        print_json({"cache_dir": str(opened.root), "use": use, "size_bytes": total})
        return
    table = new_table("what", "entries or files", "size", right=("entries or files", "size"))
    present = [(what, counted) for what, counted in use.items() if counted["count"]]
    for what, counted in sorted(present, key=lambda item: -item[1]["size_bytes"]):
        table.add_row(cell(what), cell(str(counted["count"])), cell(format_bytes(counted["size_bytes"])))
    console().print(table)
    click.echo(f"{format_bytes(total)} in {opened.root}")


@cache.command()
@keys_argument
@cache_dir_option
@json_option
@click.pass_context
def verify(ctx: click.Context, keys: tuple[str, ...], cache_dir: Path | None, as_json: bool) -> None:
    """Compare every file with its SHA-256.

    Of all entries, or of those named. Exit code 1 when one is bad. Nothing is changed: a server that
    meets a bad entry removes and rebuilds it.

    \b
    Examples:
      neuron cache verify
      neuron cache verify 9f2c
    """
    opened = open_cache(cache_dir)
    entries = chosen(opened, keys)
    bad: dict[str, str] = {}
    with progress_bar(hidden=as_json) as bar:
        for entry in bar.track(entries, description="verify"):
            try:
                opened.verify(entry.digest)
            except CacheError as error:
                bad[entry.digest] = str(error)
    if as_json:
        print_json({"verified": len(entries) - len(bad), "bad": bad})
    else:
        for key, reason in bad.items():
            click.echo(f"{click.style('bad', fg='red', bold=True)} {key}: {reason}")
        click.echo(f"{len(entries) - len(bad)} of {len(entries)} entries are whole")
    ctx.exit(1 if bad else 0)


@cache.command()
@click.option(
    "--max-size", type=SIZE, help="Keep at most this much, such as 5GiB; the least recently used go."
)
@click.option("--older-than", type=AGE, help="Remove what nobody used for this long, such as 30d.")
@click.option("--dry-run", is_flag=True, help="Only say what would go.")
@cache_dir_option
@json_option
def prune(
    max_size: int | None, older_than: float | None, dry_run: bool, cache_dir: Path | None, as_json: bool
) -> None:
    """Remove entries by size and age.

    What ended processes left behind goes too. An entry that a running process has loaded stays.
    Without a limit, VLLM_NEURON_CACHE_MAX_SIZE is used.

    \b
    Examples:
      neuron cache prune --max-size 5GiB
      neuron cache prune --older-than 30d --dry-run
    """
    limit = Environment.read().cache_max_bytes if max_size is None and older_than is None else max_size
    if limit is None and older_than is None:
        raise click.UsageError("give --max-size, --older-than or both, or set VLLM_NEURON_CACHE_MAX_SIZE")
    opened = open_cache(cache_dir)
    report = opened.prune(max_bytes=limit, older_than_s=older_than, dry_run=dry_run)
    if as_json:
        print_json(vars(report))
        return
    done = "would be removed" if dry_run else "removed"
    for key in report.evicted:
        click.echo(f"{short(key)} {done}")
    other = {name: getattr(report, name) for name in ("requests", "failures", "locks", "staging", "users")}
    rest = ", ".join(f"{count} {name}" for name, count in other.items() if count)
    click.echo(f"{len(report.evicted)} entries, {format_bytes(report.evicted_bytes)}, {done}")
    if rest:
        click.echo(f"leftovers {done}: {rest}")
    kept = f"{report.kept} entries, {format_bytes(report.kept_bytes)}, stay"
    click.echo(f"{kept}; {len(report.in_use)} of them only because they are in use")


for _command in (explain, push, pull, keygen, digests):
    cache.add_command(_command)


def _row(entry: CacheEntry, in_use: set[str], now: float) -> dict[str, Any]:
    created = _created(entry)
    return {
        "key": entry.digest,
        "part": str(entry.manifest.get("part", "")),
        "bucket": str(entry.manifest.get("bucket", "")),
        "compiler": str(entry.manifest.get("compiler", "")),
        "size_bytes": entry.size_bytes,
        "age_s": None if created is None else round(now - created, 3),
        "last_used_s": round(now - entry.last_used, 3),
        "in_use": entry.digest in in_use,
    }


def _created(entry: CacheEntry) -> float | None:
    """When an entry was compiled, in seconds since 1970; None when its manifest does not say."""
    import datetime

    try:
        return datetime.datetime.fromisoformat(str(entry.manifest["created"])).timestamp()
    except (KeyError, ValueError):
        return None


def _in_use(opened: CompileCache) -> set[str]:
    from neuron_core.graphs.cache.usage import UsageMarks

    return UsageMarks(opened.root / "users").in_use()


def _file_sizes(folder: Path) -> Iterator[int]:
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                yield (Path(parent) / name).lstat().st_size
            except FileNotFoundError:
                continue  # removed while we look
