# SPDX-License-Identifier: Apache-2.0
"""Scores of a reference, kept: in a directory or at a URL that fsspec knows.

An entry is two files, named by the digest of its key: ``<digest>.safetensors`` with tokens and scores, and
``<digest>.json`` with the key in words and the digest of the first, written last.
"""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any

import fsspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from neuron_accuracy.errors import AccuracyError
from neuron_accuracy.subjects.info import SubjectInfo
from neuron_accuracy.subjects.protocol import Generation, Scores

__all__ = ["FORMAT", "GoldenCache", "GoldenKey"]

FORMAT = "neuron-accuracy-golden/1"
_UNKNOWN = "unknown"


@dataclass(frozen=True)
class GoldenKey:
    """What scores depend on. How the model is spread over ranks is not among it."""

    info: SubjectInfo
    prompts: Sequence[Sequence[int]]
    num_tokens: int
    top: int
    continuations: Sequence[Sequence[int]] | None = None
    """Tokens the model was forced along; None if it generated them itself."""

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready form; raises ``AccuracyError`` for a subject that does not say which weights it has."""
        if self.info.revision == _UNKNOWN:
            raise AccuracyError(
                f"{self.info.kind}:{self.info.model} does not say which weights it has, so that its scores cannot "
                "be kept; leave out the golden cache, or take a reference of another kind"
            )
        return {
            "format": FORMAT,
            "kind": self.info.kind,
            "model": PurePath(self.info.model).name,
            "revision": self.info.revision,
            "tokenizer": self.info.tokenizer,
            "dtype": self.info.dtype,
            "cache_dtype": self.info.cache_dtype,
            "prompts": [list(prompt) for prompt in self.prompts],
            "num_tokens": self.num_tokens,
            "top": self.top,
            "continuations": None
            if self.continuations is None
            else [list(item) for item in self.continuations],
        }


@dataclass
class GoldenCache:
    """Entries below ``url``; what was found damaged is told in ``damaged``."""

    url: str
    damaged: list[str] = field(default_factory=list)
    hits: int = 0
    misses: int = 0

    def __post_init__(self) -> None:
        if not self.url:
            raise AccuracyError("golden cache: no URL is given; a directory such as ./goldens works")
        with self._store():
            self._files, self._root = fsspec.core.url_to_fs(self.url)

    def get(self, key: GoldenKey, make: Callable[[], list[Generation]]) -> list[Generation]:
        """The entry of a key, made and stored if there is none or it is damaged; raises ``AccuracyError``."""
        described = key.to_json()
        name = hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()
        with self._store():
            found = self._read(name, described)
        if found is not None:
            self.hits += 1
            return found
        self.misses += 1
        with self._store():
            self._try_to_write()
        made = make()
        with self._store():
            self._write(name, described, made)
        return made

    @contextmanager
    def _store(self) -> Iterator[None]:
        """What the file system's library raises, of whatever class (botocore's, aiohttp's, requests'), as our error."""
        try:
            yield
        except Exception as error:
            said = str(error) or type(error).__name__
            raise AccuracyError(
                f"golden cache {self.url}: {said}; a directory works if it can be written"
            ) from error

    def _try_to_write(self) -> None:
        """Before anything is made, which may take hours."""
        self._files.makedirs(self._root, exist_ok=True)
        staged = f"{self._root}/.{uuid.uuid4().hex}"
        self._files.pipe_file(staged, b"")
        self._files.rm_file(staged)

    def _read(self, name: str, described: dict[str, Any]) -> list[Generation] | None:
        about, tensors = f"{self._root}/{name}.json", f"{self._root}/{name}.safetensors"
        if not self._files.exists(about):
            return None
        try:
            said = json.loads(self._files.cat_file(about))
            data = self._files.cat_file(tensors)
            if hashlib.sha256(data).hexdigest() != said["sha256"] or said["key"] != described:
                raise ValueError("its digest is another than when it was written")
            return _unpacked(load(data), described["prompts"])
        except FileNotFoundError:
            self.damaged.append(f"{name}: {name}.safetensors is missing")
        except (ValueError, KeyError, TypeError, SafetensorError) as error:
            self.damaged.append(f"{name}: {error}")
        return None

    def _write(self, name: str, described: dict[str, Any], made: Sequence[Generation]) -> None:
        data = save(_packed(made))
        about = {"key": described, "sha256": hashlib.sha256(data).hexdigest(), "size_bytes": len(data)}
        self._put(f"{name}.safetensors", data)
        self._put(f"{name}.json", json.dumps(about).encode())

    def _put(self, name: str, data: bytes) -> None:
        """Written beside, then renamed: a reader sees all of a file or none."""
        staged = f"{self._root}/.{name}.{uuid.uuid4().hex}"
        self._files.pipe_file(staged, data)
        self._files.mv(staged, f"{self._root}/{name}")


def _packed(made: Sequence[Generation]) -> dict[str, torch.Tensor]:
    packed: dict[str, torch.Tensor] = {}
    for index, item in enumerate(made):
        scores = item.scores
        held = {
            "tokens": torch.tensor(item.tokens, dtype=torch.int64),
            "chosen": scores.chosen_logprobs,
            "top_ids": scores.top_ids,
            "top_logprobs": scores.top_logprobs,
        }
        if scores.logits is not None:
            held["logits"] = scores.logits
        packed |= {f"{index}.{name}": tensor.contiguous().clone() for name, tensor in held.items()}
    return packed


def _unpacked(held: dict[str, torch.Tensor], prompts: Sequence[Sequence[int]]) -> list[Generation]:
    made: list[Generation] = []
    for index, prompt in enumerate(prompts):
        chosen, ids, values = (held[f"{index}.{name}"] for name in ("chosen", "top_ids", "top_logprobs"))
        scores = Scores(len(prompt), chosen, ids, values, held.get(f"{index}.logits"))
        made.append(Generation(tuple(prompt), tuple(held[f"{index}.tokens"].tolist()), scores))
    return made
