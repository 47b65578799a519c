# SPDX-License-Identifier: Apache-2.0
"""Requests to a server that speaks the OpenAI API: completions and tokenisation, and what its errors mean."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote, urlsplit

import openai

from neuron_accuracy.errors import SubjectError
from neuron_accuracy.subjects.secrets import public_address

__all__ = ["ServerClient", "ServerRefusal"]


class ServerClient:
    """One server. ``url`` is its root or the folder of its API (``…/v1``); a root gets ``/v1``.

    A user and a password in it are sent as basic authentication in the place of the key, and told nowhere.
    """

    def __init__(self, url: str, api_key: str, timeout_s: float, retries: int) -> None:
        shown = public_address(url)
        try:
            parts = urlsplit(url)
        except ValueError as error:
            raise SubjectError(f"server:{shown}: {error}; http://localhost:8000/v1 works") from None
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise SubjectError(f"server:{shown}: no address of a server; http://localhost:8000/v1 works")
        base = shown.rstrip("/")
        self.url = base if parts.path.strip("/") else f"{base}/v1"
        self.authorization = _authorization(parts.netloc.rpartition("@")[0], api_key)
        """The header of that name, for another client of the same server."""
        self._api = openai.OpenAI(
            api_key=api_key,
            base_url=self.url,
            timeout=timeout_s,
            max_retries=max(retries, 0),
            default_headers={"Authorization": self.authorization},
        )
        self._root = self._api.with_options(base_url=self.url.removesuffix("/v1"))

    def models(self) -> list[str]:
        """Names of what it serves."""
        data = self._answer(self._api, "get", "/models", None, "its list of models")
        try:
            return [str(item["id"]) for item in data["data"]]
        except (KeyError, TypeError) as error:
            raise SubjectError(f"{self.url}/models: no list of models") from error

    def complete(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """The one choice of a completion, after a prompt of token ids.

        Raises ``SubjectError`` also when the server says that it read another number of tokens than were sent.
        """
        prompt = body["prompt"]
        what = f"a prompt of {len(prompt)} token ids"
        data = self._answer(self._api, "post", "/completions", body, what)
        try:
            choice: dict[str, Any] = data["choices"][0]
            read = (data.get("usage") or {}).get("prompt_tokens", len(prompt))
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise SubjectError(
                f"{self.url}/completions: its answer to {what} holds no completion: {data!r:.200}"
            ) from error
        if read != len(prompt):
            raise SubjectError(
                f"{self.url}: read {read} tokens where {what} was sent; a server that takes token ids works"
            )
        return choice

    def tokenize(self, model: str, text: str) -> list[int]:
        """Token ids of a text; ``SubjectError`` if the server has no ``/tokenize``."""
        data = self._tokenizer("/tokenize", {"model": model, "prompt": text}, "tokens")
        return [int(token) for token in data]

    def detokenize(self, model: str, tokens: list[int]) -> str:
        """The text of token ids; ``SubjectError`` if the server has no ``/detokenize``."""
        return str(self._tokenizer("/detokenize", {"model": model, "tokens": tokens}, "prompt"))

    def close(self) -> None:
        """Close its connections."""
        self._api.close()

    def _tokenizer(self, path: str, body: Mapping[str, Any], key: str) -> Any:
        try:
            return self._answer(self._root, "post", path, body, "a text")[key]
        except (KeyError, TypeError) as error:
            raise SubjectError(f"{self.url}: {path} answers without {key!r}; give tokenizer=DIR") from error
        except SubjectError as error:
            raise SubjectError(f"{error}; without {path}, give tokenizer=DIR or token ids") from error

    def _answer(self, client: openai.OpenAI, method: str, path: str, body: Any, what: str) -> Any:
        try:
            if method == "get":
                return client.get(path, cast_to=object)
            return client.post(path, cast_to=object, body=body)
        except openai.APITimeoutError as error:
            raise SubjectError(
                f"{self.url}: no answer in time to {what}; timeout=SECONDS is an option"
            ) from error
        except openai.APIConnectionError as error:
            cause = error.__cause__ or error
            raise SubjectError(f"{self.url}: no server answers there ({cause})") from error
        except openai.APIStatusError as error:
            raise ServerRefusal(
                f"{self.url}{path}: HTTP {error.status_code} to {what}: {_said(error)}"
            ) from error
        except openai.OpenAIError as error:
            raise SubjectError(f"{self.url}: no answer that can be read to {what}: {error}") from error


class ServerRefusal(SubjectError):
    """The server answered with a status of 400 or above."""


def _authorization(userinfo: str, api_key: str) -> str:
    if not userinfo:
        return f"Bearer {api_key}"
    return f"Basic {base64.b64encode(unquote(userinfo).encode()).decode()}"


def _said(error: openai.APIStatusError) -> str:
    body = error.body
    if isinstance(body, Mapping):
        body = body.get("message") or body
    return str(body or error.message)[:400]
