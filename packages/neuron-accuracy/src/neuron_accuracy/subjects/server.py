# SPDX-License-Identifier: Apache-2.0
"""A server that speaks the OpenAI API: log-probabilities of the likeliest tokens, and nothing of its inside."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from neuron_accuracy.capture.spec import CaptureSpec
from neuron_accuracy.errors import SubjectError
from neuron_accuracy.subjects.digest import vocabulary_digest
from neuron_accuracy.subjects.info import SubjectInfo
from neuron_accuracy.subjects.options import read_options
from neuron_accuracy.subjects.parallel import in_parallel
from neuron_accuracy.subjects.protocol import Generation, Sampling, Scores
from neuron_accuracy.subjects.server_client import ServerClient, ServerRefusal
from neuron_accuracy.subjects.server_scores import completion_rows, prompt_rows, scores_of_rows
from neuron_core.errors import ConfigError, unknown_name_hint

__all__ = ["FORCING", "UNKNOWN", "ServerSubject", "open_server"]

UNKNOWN = "unknown"
FORCING = ("auto", "prompt_logprobs", "echo", "steps")
"""How given tokens are scored: by vLLM's extension, by the API's ``echo``, or by one request a token."""

_DEFAULTS = {
    "model": "",
    "tokenizer": "",
    "api_key": "",
    "force": "auto",
    "extensions": True,
    "concurrency": 8,
    "timeout": 600.0,
    "retries": 1,
}
_Result = TypeVar("_Result")


def open_server(url: str, options: Mapping[str, Any]) -> ServerSubject:
    """A running server; its only model, unless ``model`` names one of several.

    ``api_key`` is that of the environment (``OPENAI_API_KEY``) if none is given: a command line is seen by all users of
    a machine. ``tokenizer`` is a folder with the model's tokenizer, for a server without ``/tokenize``.
    ``extensions=false`` sends nothing that is not in the OpenAI API (then no ``top_k``, no ``min_p``). Raises
    ``SubjectError`` if nothing answers.
    """
    given = read_options("server", options, _DEFAULTS)
    if given["force"] not in FORCING:
        raise ConfigError(
            "server.force", given["force"], f"no such way; {unknown_name_hint(given['force'], FORCING)}"
        )
    api_key = given["api_key"] or os.environ.get("OPENAI_API_KEY") or "none"
    client = ServerClient(url, api_key, given["timeout"], given["retries"])
    served = client.models()
    model = given["model"] or (served[0] if len(served) == 1 else "")
    if model not in served:
        raise SubjectError(
            f"{client.url}: serves {served}; model={served[0] if served else 'NAME'} names one"
        )
    return ServerSubject(
        client, model, given["tokenizer"], given["force"], given["extensions"], given["concurrency"]
    )


class ServerSubject:
    """One model of one server; requests run ``concurrency`` at a time."""

    def __init__(
        self, client: ServerClient, model: str, tokenizer: str, force: str, extensions: bool, concurrency: int
    ) -> None:
        self._client = client
        self._model = model
        self.tokenizer: Any = _local_tokenizer(tokenizer) if tokenizer else None
        self._way = force
        self._extensions = extensions
        self._concurrency = max(concurrency, 1)

    @property
    def url(self) -> str:
        """Of its API (``…/v1``), without user and password."""
        return self._client.url

    @property
    def authorization(self) -> str:
        """The header of that name."""
        return self._client.authorization

    def info(self) -> SubjectInfo:
        """Who it is; a vocabulary of 0 tokens is one that the server does not tell."""
        known = self.tokenizer is not None
        return SubjectInfo(
            kind="server",
            model=self._model,
            revision=UNKNOWN,
            dtype=UNKNOWN,
            vocab_size=0,
            tokenizer=vocabulary_digest(self.tokenizer) if known else UNKNOWN,
            abilities=frozenset({"logprobs", "generate"}),
        )

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, by the local tokenizer or the server's ``/tokenize``."""
        if self.tokenizer is not None:
            return [int(token) for token in self.tokenizer.encode(text)]
        return self._client.tokenize(self._model, text)

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of token ids, by the local tokenizer or the server's ``/detokenize``."""
        if self.tokenizer is not None:
            return str(self.tokenizer.decode(list(tokens)))
        return self._client.detokenize(self._model, list(tokens))

    def generate(
        self, prompts: Sequence[Sequence[int]], num_tokens: int, sampling: Sequence[Sampling], top: int
    ) -> list[Generation]:
        """Exactly ``num_tokens`` tokens after each prompt; raises ``SubjectError`` if the server ends earlier."""
        if len(sampling) != len(prompts):
            raise SubjectError(f"{len(prompts)} prompts and {len(sampling)} samplings; one each works")
        self._check_top(top)
        pairs = list(zip(prompts, sampling, strict=True))
        return self._each(lambda pair: self._generate(pair[0], num_tokens, pair[1], top), pairs)

    def force(
        self, prompts: Sequence[Sequence[int]], continuations: Sequence[Sequence[int]], top: int
    ) -> list[Scores]:
        """Scores of given continuations, the way this server offers (``force`` of :func:`open_server`)."""
        if len(prompts) != len(continuations):
            raise SubjectError(
                f"{len(prompts)} prompts and {len(continuations)} continuations; one each works"
            )
        self._check_top(top)
        pairs = list(zip(prompts, continuations, strict=True))
        if pairs and self._way == "auto":
            self._way = self._offered(pairs[0], top)
        return self._each(lambda pair: self._forced(pair[0], pair[1], top, self._way), pairs)

    def capture(
        self,
        prompts: Sequence[Sequence[int]],
        continuations: Sequence[Sequence[int]],
        spec: CaptureSpec,
        folder: Path,
    ) -> NoReturn:
        """Not over this API: raises ``SubjectError``."""
        raise SubjectError(f"{self._client.url}: a server shows no tensors; open the model itself to capture")

    def close(self) -> None:
        """Close its connections."""
        self._client.close()

    def _each(self, work: Callable[[Any], _Result], items: Sequence[Any]) -> list[_Result]:
        return in_parallel(work, items, self._concurrency)

    def _check_top(self, top: int) -> None:
        if top < 1:
            raise SubjectError(
                f"{self._client.url}: a server gives the likeliest tokens only; ask for some, such as top=20"
            )

    def _body(self, prompt: Sequence[int], max_tokens: int, **more: Any) -> dict[str, Any]:
        body = {"model": self._model, "prompt": list(prompt), "max_tokens": max_tokens, "temperature": 0.0}
        if self._extensions:
            body |= {"ignore_eos": True, "return_tokens_as_token_ids": True}
        return body | more

    def _generate(self, prompt: Sequence[int], num_tokens: int, how: Sampling, top: int) -> Generation:
        choice = self._client.complete(self._body(prompt, num_tokens, logprobs=top, **self._limits(how)))
        tokens, rows = completion_rows(choice, self._token_id, self._client.url)
        if len(tokens) != num_tokens:
            raise SubjectError(
                f"{self._client.url}: drew {len(tokens)} tokens where {num_tokens} were asked for "
                f"(finish_reason={choice.get('finish_reason')!r}); a server that honours ignore_eos works"
            )
        scores = scores_of_rows(len(prompt), tokens, rows, top, self._client.url)
        return Generation(tuple(prompt), tuple(tokens), scores)

    def _limits(self, how: Sampling) -> dict[str, Any]:
        extended = {name: value for name, value in (("top_k", how.top_k), ("min_p", how.min_p)) if value > 0}
        if extended and not self._extensions:
            raise SubjectError(f"{self._client.url}: extensions=false leaves out {', '.join(extended)}")
        seed = {} if how.seed is None else {"seed": how.seed}
        return {"temperature": how.temperature, "top_p": how.top_p, **extended, **seed}

    def _offered(self, pair: tuple[Sequence[int], Sequence[int]], top: int) -> str:
        """The first way of scoring given tokens that this server answers."""
        ways = FORCING[1:] if self._extensions else FORCING[2:]
        for way in ways[:-1]:
            try:
                self._forced(pair[0], pair[1][:1], top, way)
            except (ServerRefusal, _NotOffered):
                continue
            return way
        return ways[-1]

    def _forced(self, prompt: Sequence[int], tokens: Sequence[int], top: int, way: str) -> Scores:
        begin, whole = len(prompt), [*prompt, *tokens]
        if way == "steps":
            rows = [self._step(whole[: begin + i], top) for i in range(len(tokens))]
        elif way == "echo":
            choice = self._client.complete(self._body(whole, 1, logprobs=top, echo=True))
            echoed, all_rows = completion_rows(choice, self._token_id, self._client.url)
            if echoed[: len(whole)] != whole:
                raise _NotOffered(f"{self._client.url}: does not echo the prompt; force=steps works")
            rows = all_rows[begin : len(whole)]
        else:
            given = prompt_rows(
                self._client.complete(self._body(whole, 1, prompt_logprobs=top)), self._client.url
            )
            if given is None or len(given) != len(whole):
                raise _NotOffered(f"{self._client.url}: gives no prompt_logprobs; force=steps works")
            rows = given[begin:]
        return scores_of_rows(begin, tokens, rows, top, self._client.url)

    def _step(self, tokens: Sequence[int], top: int) -> Mapping[int, float]:
        choice = self._client.complete(self._body(tokens, 1, logprobs=top))
        _, rows = completion_rows(choice, self._token_id, self._client.url)
        return rows[0]

    def _token_id(self, name: str) -> int:
        if name.startswith("token_id:"):
            return int(name.removeprefix("token_id:"))
        found = self._texts.get(name, [])
        if len(found) != 1:
            raise SubjectError(
                f"{self._client.url}: names a token {name!r}, which stands for {len(found)} token ids here; "
                "a server that honours return_tokens_as_token_ids works, or tokenizer=DIR if texts are unique"
            )
        return found[0]

    @cached_property
    def _texts(self) -> dict[str, list[int]]:
        """Ids by the text that each decodes to."""
        texts: dict[str, list[int]] = {}
        tokenizer = self.tokenizer
        for index in range(0 if tokenizer is None else len(tokenizer)):
            texts.setdefault(tokenizer.decode([index]), []).append(index)
        return texts


class _NotOffered(SubjectError):
    pass


def _local_tokenizer(folder: str) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        raise SubjectError(f"server.tokenizer={folder}: no tokenizer can be read there: {error}") from error
