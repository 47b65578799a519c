# SPDX-License-Identifier: Apache-2.0
"""The options of ``vllm serve``, read by vLLM's own parser, and the configuration they make."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import click
from pydantic import ValidationError

from neuron_core.errors import nearest_name

if TYPE_CHECKING:
    from vllm.config import VllmConfig

__all__ = ["ServeArguments", "engine_config", "flag_name", "reasons"]

_NOT_GIVEN = object()


@dataclass(frozen=True)
class ServeArguments:
    """What was asked of ``vllm serve``: every option with its value, and which of them were really given."""

    options: argparse.Namespace
    given: Mapping[str, Any]

    @classmethod
    def parse(cls, model: str, arguments: Iterable[str]) -> ServeArguments:
        """Read a command line as the server does; raises ``click.UsageError`` for one the server refuses."""
        from vllm.entrypoints.launchers.cli_args import validate_parsed_serve_args

        words = ["serve", model, *arguments]
        parser, serve = _parsers()
        options: argparse.Namespace = parser.parse_args(words)
        options.model = model
        # The same words once more, with defaults that no option can have: what differs from them was given.
        serve.set_defaults(**dict.fromkeys(vars(options), _NOT_GIVEN))
        again = vars(parser.parse_args(words))
        given = {
            name: value
            for name, value in again.items()
            if value is not _NOT_GIVEN and name not in ("model_tag", "subparser")
        }
        try:
            validate_parsed_serve_args(options)
        except (TypeError, ValueError) as error:
            raise click.UsageError(str(error).removeprefix("Error: ")) from error
        return cls(options, given)

    def engine_config(self) -> VllmConfig:
        """vLLM's configuration of the server; raises what vLLM raises."""
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.usage.usage_lib import UsageContext

        # Default batch sizes depend on who asks: these are a server's.
        context = UsageContext.OPENAI_API_SERVER
        return AsyncEngineArgs.from_cli_args(self.options).create_engine_config(context)


def engine_config(model: str, arguments: Iterable[str]) -> VllmConfig:
    """vLLM's configuration of a server with these options, of which no tokenizer is read.

    Raises ``click.UsageError`` for an option that does not exist, ``click.ClickException`` for what vLLM refuses.
    """
    parsed = ServeArguments.parse(model, [*arguments, "--skip-tokenizer-init"])
    try:
        return parsed.engine_config()
    except ValidationError as error:
        raise click.ClickException(reasons(error)) from error


def flag_name(option: str) -> str:
    """``max_model_len`` as it is written on a command line."""
    return "--" + option.replace("_", "-")


def reasons(error: ValidationError) -> str:
    """What pydantic wraps, without the wrapping: the errors raised inside vLLM's configuration, with flag and value."""
    return "; ".join(dict.fromkeys(_reason(item) for item in error.errors()))


def _reason(item: Mapping[str, Any]) -> str:
    message = str(item["msg"]).removeprefix("Value error, ")
    if message != item["msg"] or not item["loc"]:  # said by vLLM or by this plugin, with names of its own
        return message
    return f"{flag_name(str(item['loc'][-1]))}={item['input']!r}: {message}"


def _parsers() -> tuple[Any, Any]:
    """vLLM's parser, made as its command does, and the part of it that reads the options of ``serve``."""
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    class Parser(FlexibleArgumentParser):
        """Its errors are click's."""

        def error(self, message: str) -> NoReturn:
            """Raise instead of printing pages of usage and ending the process."""
            raise click.UsageError(_explained(message, serve._option_string_actions))

    parser = Parser(prog="vllm", add_help=False)
    serve = make_arg_parser(parser.add_subparsers(dest="subparser").add_parser("serve", add_help=False))
    return parser, serve


def _explained(message: str, known: Iterable[str]) -> str:
    unknown = message.removeprefix("unrecognized arguments: ")
    if unknown == message:
        return message
    nearest = nearest_name(unknown.split()[0].partition("=")[0], known)
    hint = f"; did you mean {nearest}?" if nearest else ""
    return f"{message}: not ones that vllm serve takes{hint}"
