# SPDX-License-Identifier: Apache-2.0
"""``vllm-neuron config``: what a server would do with its flags, without loading weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click
from pydantic import ValidationError

from neuron_core.cli.output import json_option, print_json
from neuron_core.environ import export, snapshot
from neuron_core.errors import NeuronError
from vllm_neuron.cli.arguments import ServeArguments, reasons
from vllm_neuron.cli.main import Refused

if TYPE_CHECKING:
    from vllm_neuron.cli.resolve import Resolved

__all__ = ["config"]

EPILOG = """\b
Examples:
  vllm-neuron config Qwen/Qwen3-0.6B --max-model-len 4096 --max-num-seqs 16
  vllm-neuron config ./model --tensor-parallel-size 2 --json
  vllm-neuron config ./model --config server.yaml
"""


@click.command(
    short_help="Show what a server's flags become, without loading weights.",
    epilog=EPILOG,
    context_settings={
        "ignore_unknown_options": True,
        "allow_extra_args": True,
        "help_option_names": ["-h", "--help"],
    },
)
@click.argument("model")
@json_option
@click.pass_context
def config(ctx: click.Context, model: str, as_json: bool) -> None:
    """Resolve the flags of `vllm serve MODEL` and show what the server would do.

    Shows what each flag became and who changed it, the buckets, the memory estimate, and which buckets the compile
    cache has. All other options are those of `vllm serve`. Weights are not read: a folder with the model's
    config.json is enough.

    Exit code 0: a server with these flags can start. 2: it would refuse, and the error is the server's.
    """
    quiet_environment()
    from vllm_neuron.cli.config_report import report, show  # imports vLLM, which reads the environment

    try:
        data = report(_resolved(model, ctx.args))
    except NeuronError as error:
        raise Refused(str(error)) from error
    if as_json:
        print_json(data)
    else:
        show(data)
    if data["memory"]["error"]:
        raise Refused(data["memory"]["error"])


def quiet_environment(default_level: str = "WARNING") -> None:
    """Leave standard output to the command, and the log from a level on to standard error. Before vLLM is imported."""
    level = {} if "VLLM_LOGGING_LEVEL" in snapshot() else {"VLLM_LOGGING_LEVEL": default_level}
    # A server that only compiles would compile here.
    export({"VLLM_LOGGING_STREAM": "ext://sys.stderr", "VLLM_NEURON_CPU_COMPILE": "0", **level})


def _resolved(model: str, arguments: list[str]) -> Resolved:
    from vllm_neuron.cli.resolve import resolve

    try:
        return resolve(ServeArguments.parse(model, arguments))
    except click.UsageError as error:
        raise Refused(error.message) from error
    except ValidationError as error:
        raise Refused(reasons(error)) from error
    except NeuronError:
        raise
    except (ValueError, TypeError, OSError, RuntimeError, AssertionError) as error:
        # What vLLM and transformers raise for a model or a flag that cannot work; the server ends with the same.
        raise Refused(str(error) or type(error).__name__) from error
