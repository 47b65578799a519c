# SPDX-License-Identifier: Apache-2.0
"""Compare this plugin on the CPU device with vLLM's own CPU backend, or measure it alone.

    nox -s bench -- --peer PYTHON     ratios to the vLLM of another interpreter, both run alternately
    nox -s bench -- --self            our own figures, the sampler's cost, and what a busy neighbour costs
    nox -s bench -- --serve --peer …  a server under load instead (or with --self), and what a prefix hit saves
    nox -s bench -- --gaps            how long the device waits between steps, with and without async scheduling
    nox -s bench -- --pooling PYTHON  embeddings against the sentence-transformers of another interpreter
    nox -s bench -- --capture         memory and seconds of capturing Llama 3.1 70B for eight ranks

No ratio is printed unless both sides were found to compute the same model (see docs/benchmarks.md).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console

import bench_answers
import bench_capture
import bench_gaps
import bench_pooling
import bench_report
import bench_serve
import bench_sides
from bench_report import Figures
from bench_sides import Side
from devtools import places
from devtools.console import Failure

HERE = Path(__file__).resolve().parent


def positive(text: str) -> int:
    """A whole number of at least 1, for argparse."""
    value = int(text)
    if value < 1:
        raise ValueError(text)
    return value


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = argparse.ArgumentParser(
        prog="tools/bench.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    what = top.add_mutually_exclusive_group(required=True)
    what.add_argument("--peer", metavar="PYTHON", help="interpreter that has vLLM's CPU backend")
    what.add_argument("--self", dest="alone", action="store_true", help="measure this side alone")
    what.add_argument("--capture", action="store_true", help="capture a large model's graphs")
    what.add_argument("--pooling", metavar="PYTHON", help="interpreter that has sentence-transformers")
    what.add_argument("--gaps", action="store_true", help="compare asynchronous with plain scheduling")
    top.add_argument(
        "--serve", action="store_true", help="measure servers under load (with --peer or --self)"
    )
    top.add_argument("--serve-prompts", type=positive, default=96, help="requests to a server in a round")
    top.add_argument(
        "--peer-env", action="append", default=[], metavar="NAME=VALUE", help="for the peer alone"
    )
    top.add_argument("--model", type=Path, help="model folder (default: SmolLM2-135M-Instruct, made once)")
    top.add_argument("--pairs", type=positive, default=15, help="batches of embeddings each side computes")
    top.add_argument("--rounds", type=positive, default=2, help="times each side is run, in turn")
    top.add_argument("--busy", action="store_true", help="also beside a process that spins on one core")
    top.add_argument("--json", type=Path, metavar="FILE", help="write every figure of every run")
    top.add_argument("--script", type=Path, default=HERE / "bench_run.py", help="another measuring script")
    top.add_argument("--dtype", help="of both sides (default: bfloat16, and float32 with --pooling)")
    top.add_argument("--batches", default="1,4,16")
    top.add_argument("--output-tokens", type=int, default=128)
    top.add_argument("--long-prompt-tokens", type=int, default=512)
    top.add_argument("--max-model-len", type=int, default=1024)
    top.add_argument("--repeats", type=positive, default=3, help="rounds inside a run; the median counts")
    top.add_argument("--engine-args", default="{}", help="JSON of further LLM(...) arguments, for both sides")
    return top


class Bench:
    """Runs of one model under one set of options."""

    def __init__(self, options: argparse.Namespace, model: Path, scratch: Path) -> None:
        self.options = options
        self.model = model
        self.scratch = scratch

    def command(self, *, short: bool = False, sampled_batch: int = 0) -> list[str]:
        """The measuring script with its arguments; `short` only starts the engine and touches each shape."""
        options = self.options
        arguments: dict[str, object] = {
            "model": self.model,
            "dtype": options.dtype,
            "batches": options.batches,
            "output-tokens": 2 if short else options.output_tokens,
            "long-prompt-tokens": options.long_prompt_tokens,
            "max-model-len": options.max_model_len,
            "rounds": 1 if short else options.repeats,
            "engine-args": options.engine_args,
        } | ({"sampled-batch": sampled_batch} if sampled_batch else {})
        words = [word for name, value in arguments.items() for word in (f"--{name}", str(value))]
        return [str(options.script.resolve()), *words]

    def caches(self, side: Side, round_index: int) -> Path:
        """The cache folder of one side in one round; new ones are empty, which is what a cold start needs."""
        folder = self.scratch / f"{side.name}-{round_index}"
        folder.mkdir(exist_ok=True)
        return folder

    def cold(self, side: Side, round_index: int) -> Figures:
        """Start with empty caches."""
        found = side.figures("cold start", self.command(short=True), self.caches(side, round_index))
        return {"cold_start_s": found["init_s"]}

    def warm(self, side: Side, round_index: int, sampled_batch: int = 0) -> Figures:
        """Start with the caches that `cold` left, and measure everything."""
        command = self.command(sampled_batch=sampled_batch)
        found = side.figures("warm start, rounds", command, self.caches(side, round_index))
        return {"warm_start_s": found.pop("init_s"), **found}

    def busy(self, side: Side, round_index: int) -> Figures:
        """Measure beside a process that spins on one processor; the start is not reported."""
        with bench_sides.busy_neighbour():
            found = side.figures("busy neighbour", self.command(), self.caches(side, round_index))
        found.pop("init_s")
        return found

    def answers(self, side: Side, out: Path, judge: Path | None = None) -> dict[str, Any]:
        """Texts and scores of one side, with the engine that is measured."""
        options = self.options
        command = [str(HERE / "bench_answers.py"), "--model", str(self.model), "--out", str(out)]
        command += ["--dtype", options.dtype, "--max-model-len", str(options.max_model_len)]
        command += ["--max-num-seqs", str(largest_batch(options)), "--engine-args", options.engine_args]
        command += ["--judge", str(judge)] if judge else []
        side.run("continuing and judging texts", command, self.caches(side, 0))
        found: dict[str, Any] = json.loads(out.read_text())
        return found

    def check(self, mine: Side, other: Side) -> dict[str, Any]:
        """Raise `Failure` unless both sides compute the same model; returns what was compared."""
        first = self.scratch / "answers-ours.json"
        second = self.scratch / "answers-peer.json"
        self.answers(mine, first)
        theirs = self.answers(other, second, judge=first)
        ours = self.answers(mine, first, judge=second)
        return judged(ours, theirs)


def judged(ours: dict[str, Any], theirs: dict[str, Any]) -> dict[str, Any]:
    """Both directions of the comparison of two answer files; raises `Failure` if one is out of its limits."""
    prompts = [[text["prompt"] for text in side["texts"]] for side in (ours, theirs)]
    if prompts[0] != prompts[1]:
        raise Failure("no ratios: the two sides' tokenizers turn the same prompts into different tokens")
    found = {
        "our texts, judged by the peer": bench_answers.compare(ours["own"], theirs["other"]),
        "the peer's texts, judged by us": bench_answers.compare(theirs["own"], ours["other"]),
    }
    for name, agreement in found.items():
        if not agreement.is_same_model:
            raise Failure(
                f"no ratios, because the outputs differ: of {name}, {agreement.top1:.1%} of the tokens are "
                f"likeliest (needed {bench_answers.MIN_AGREEMENT:.0%}), and log-probabilities are "
                f"{agreement.logprob_gap:.3f} nats apart (allowed {bench_answers.MAX_LOGPROB_GAP:g})"
            )
    same = sum(a["output"] == b["output"] for a, b in zip(ours["texts"], theirs["texts"], strict=True))
    return {
        "identical_texts": same,
        "texts": len(prompts[0]),
        "agreement": {name: vars(agreement) for name, agreement in found.items()},
    }


def largest_batch(options: argparse.Namespace) -> int:
    """The number of requests of the largest batch."""
    return max(int(word) for word in options.batches.split(","))


def against_peer(bench: Bench, mine: Side, other: Side) -> dict[str, Any]:
    """Check the outputs, then run both sides in turn; returns every run and the ratios."""
    sides = {"ours": mine, "peer": other}
    runs: dict[str, list[Figures]] = {"ours": [], "peer": []}
    for index in range(bench.options.rounds):
        cold = {name: bench.cold(side, index) for name, side in sides.items()}
        if index == 0:
            check = bench.check(mine, other)
        warm = {name: bench.warm(side, index) for name, side in sides.items()}
        if bench.options.busy:
            for name, side in sides.items():
                warm[name] |= {f"{key} busy": value for key, value in bench.busy(side, index).items()}
        for name in sides:
            runs[name].append({**cold[name], **warm[name]})
    pairs = list(zip(runs["ours"], runs["peer"], strict=True))
    ratios = {key: [a[key] / b[key] for a, b in pairs] for key in runs["ours"][0] if key in runs["peer"][0]}
    return {"check": check, "runs": runs, "ratios": ratios}


def alone(bench: Bench, mine: Side) -> dict[str, Any]:
    """Our own figures, quiet and beside a busy neighbour in turn, and the sampler's cost."""
    is_ours = bench.options.script == HERE / "bench_run.py"  # another one may not know the argument
    sampled_batch = largest_batch(bench.options) if is_ours else 0
    quiet: list[Figures] = []
    busy: list[Figures] = []
    for index in range(bench.options.rounds):
        cold = bench.cold(mine, index)
        quiet.append(cold | bench.warm(mine, index, sampled_batch))
        busy.append(bench.busy(mine, index))
    kept = {key: [b[key] / q[key] for q, b in zip(quiet, busy, strict=True)] for key in busy[0]}
    return {"runs": {"ours": quiet, "ours busy": busy}, "busy_over_quiet": kept}


def machine() -> dict[str, Any]:
    """What the figures were taken on."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "processor": names[0] if names else platform.machine(),
        "processors": len(os.sched_getaffinity(0)),
        "load_before": os.getloadavg()[0],
        "python": platform.python_version(),
    }


def model_folder(options: argparse.Namespace) -> Path:
    """The folder given, or SmolLM2 converted once into the user's cache."""
    if options.model is not None:
        folder: Path = options.model.resolve()
        if not (folder / "config.json").is_file():
            raise Failure(f"--model {folder}: no config.json there; give the folder of a Hugging Face model")
        return folder
    from demo import prepare_model

    return prepare_model(places.cache_dir() / "demo")


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Everything the options ask for."""
    about: dict[str, Any] = {"machine": machine(), "options": {k: str(v) for k, v in vars(options).items()}}
    if options.capture:
        return about | {"runs": {"ours": [bench_capture.capture()]}}
    mine = bench_sides.ours()
    with tempfile.TemporaryDirectory(prefix="neuron-bench-") as scratch:
        if options.pooling:
            other = bench_sides.interpreter("peer", "--pooling", options.pooling)
            return about | bench_pooling.compare(options, mine, other, Path(scratch))
        bench = Bench(options, model_folder(options), Path(scratch))
        if options.gaps:
            return about | bench_gaps.compare(bench, mine)
        serve = bench_serve.ServeBench(options, bench.model, mine)
        if options.alone and options.serve:
            return about | serve.alone(mine, bench.caches(mine, 0))
        if options.alone:
            return about | alone(bench, mine)
        other = bench_sides.peer(options.peer, options.peer_env)
        own_vllm = mine.probe(bench.caches(mine, 0))
        bench_sides.check_peer(own_vllm, other.probe(bench.caches(other, 0)))
        about["vllm"] = own_vllm[0]
        if options.serve:
            about["check"] = bench.check(mine, other)
            places_of = {"ours": (mine, bench.caches(mine, 0)), "peer": (other, bench.caches(other, 0))}
            return about | serve.against_peer(places_of)
        return about | against_peer(bench, mine, other)


def read_options(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line with what follows from other options filled in; ends the program if two contradict."""
    top = parser()
    options = top.parse_args(argv)
    if options.pooling and options.model is None:
        top.error("argument --pooling: give --model, the folder of a BERT encoder such as all-MiniLM-L6-v2")
    if options.serve and (options.capture or options.gaps or options.pooling):
        top.error("argument --serve: give it with --peer or --self")
    options.dtype = options.dtype or ("float32" if options.pooling else "bfloat16")
    return options


def main(argv: list[str] | None = None) -> int:
    """Measure and report; returns 0 whatever the figures are."""
    options = read_options(argv)
    # A terminated run stops its server too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    found = measure(options)
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    bench_report.show(found, Console(width=None if sys.stdout.isatty() else 120))
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Failure as failure:
        sys.exit(f"\nerror: {failure}")
