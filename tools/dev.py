#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The one entry for working on this repository: set it up, see it run, test it.

Needs only the standard library. Everything heavy is made once, in the user's cache directory.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from devtools import commands, console

COMMANDS = """\
commands:
  demo          set up, serve SmolLM2-135M-Instruct through vLLM on the CPU device, and ask it a question
  test          set up and run every check: nox -s tests lint types imports wheels
  sync          only set up: tools, wheelhouse, vLLM, the environment .venv
  nox ARGS...   set up the tools and the wheelhouse, then run nox (`nox -l` lists the sessions)
  lock          for maintainers: resolve again and write tools/requirements/*.txt and uv.lock

Files are fetched by pip, from whatever indexes pip is configured for, and checked against the hashes in
tools/requirements/. They are kept in the user's cache directory (XDG_CACHE_HOME) and shared by checkouts.
"""


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = argparse.ArgumentParser(
        prog="tools/dev.py",
        description="Set up, run and test this repository.",
        epilog=COMMANDS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    sub = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    demo = sub.add_parser("demo", help="serve a real model on the CPU device and ask it a question")
    demo.add_argument("--question", default=None, help="ask this instead (the answer is then not checked)")
    sub.add_parser("test", help="set up and run every check")
    sync = sub.add_parser("sync", help="set up the tools, the wheelhouse and .venv")
    sync.add_argument("--verify", action="store_true", help="hash every file of the wheelhouse again")
    sub.add_parser("nox", help="run nox with the arguments that follow", add_help=False)
    lock = sub.add_parser("lock", help="resolve again and write the pinned requirements and uv.lock")
    lock.add_argument(
        "--upgrade", action="store_true", help="take the newest versions instead of the pinned ones"
    )
    return top


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    words = sys.argv[1:] if argv is None else argv
    if words[:1] == ["nox"]:  # every word after it is nox's, which argparse cannot say
        arguments = argparse.Namespace(command="nox", arguments=words[1:])
    else:
        arguments = parser().parse_args(words)
    try:
        return commands.run(arguments)
    except console.Failure as failure:
        print(f"\nerror: {failure}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ninterrupted: run the same command again to go on from here", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
