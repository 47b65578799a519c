# SPDX-License-Identifier: Apache-2.0
"""Tiny models with a byte tokenizer, and a small server that speaks the OpenAI API on top of one."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch

# Tiny models; threads that wait for each other on a busy machine cost more than they bring.
torch.set_num_threads(1)

VOCAB = 256


def tiny_llama(seed: int = 0, **overrides: Any) -> Any:
    """A random float32 Llama: vocabulary 256, hidden 64, 2 layers, 4 heads, 2 KV heads."""
    from transformers import LlamaConfig, LlamaForCausalLM

    settings = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "initializer_range": 0.2,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
    }
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**(settings | overrides))).float().eval()


def byte_tokenizer(shift: int = 0) -> Any:
    """A token for each of most bytes; ``shift`` turns round which id stands for which."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<s>", "</s>", "<pad>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())[: VOCAB - len(special)]
    alphabet = alphabet[shift:] + alphabet[:shift]
    vocab = {token: index for index, token in enumerate(special + alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    names = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)


def saved(folder: Path, model: Any, tokenizer: Any = None) -> Path:
    """Both in a folder, as from_pretrained reads them."""
    model.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    return folder


class TinyServer:
    """Models, completions and tokenisation, over a model of transformers.

    ``offers`` names what it does: ``logprobs``, ``prompt_logprobs``, ``echo``, ``token_ids`` (names tokens by id),
    ``ids`` (takes prompts of token ids), ``tokenize``, ``limits`` (honours top_p, top_k and min_p). ``most`` is how
    many log-probabilities it gives. ``edit`` may change a row of logits. ``status`` is answered to every completion.
    It ``ends_after`` so many tokens, and says it ``reads`` so many more than it was sent.
    """

    ALL = frozenset({"logprobs", "prompt_logprobs", "echo", "token_ids", "ids", "tokenize", "limits"})

    def __init__(self, model: Any, tokenizer: Any) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.offers = set(self.ALL)
        self.most = 64
        self.edit: Callable[[torch.Tensor], torch.Tensor] = lambda row: row
        self.status = 200
        self.ends_after = 10**6
        self.reads = 0
        self.completions = 0
        self._lock = threading.Lock()
        server = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *args: Any) -> None:
                pass

            def do_GET(self) -> None:
                self._send(200, {"object": "list", "data": [{"id": "tiny"}]})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with server._lock:
                    self._send(*server.answer(self.path, body))

            def _send(self, status: int, data: Any) -> None:
                payload = json.dumps(data).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(payload)))
                self.end_headers()
                self.wfile.write(payload)

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._http.server_port}"
        how = {"poll_interval": 0.02}
        threading.Thread(target=self._http.serve_forever, kwargs=how, daemon=True).start()

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        if path == "/tokenize" and "tokenize" in self.offers:
            return 200, {"tokens": self.tokenizer.encode(body["prompt"])}
        if path == "/detokenize" and "tokenize" in self.offers:
            return 200, {"prompt": self.tokenizer.decode(body["tokens"])}
        if path != "/v1/completions":
            return 404, {"error": {"message": f"no such page: {path}"}}
        self.completions += 1
        if self.status != 200:
            return self.status, {"error": {"message": "the server is told to refuse"}}
        if "ids" not in self.offers:
            return 400, {"error": {"message": "prompt must be a string"}}
        prompts = body["prompt"] if isinstance(body["prompt"][0], list) else [body["prompt"]]
        choices = [{"index": at, **self.complete(ids, body)} for at, ids in enumerate(prompts)]
        usage = {"prompt_tokens": sum(map(len, prompts)) + self.reads}
        return 200, {"object": "text_completion", "choices": choices, "usage": usage}

    def complete(self, prompt: list[int], body: dict[str, Any]) -> dict[str, Any]:
        tokens, rows = list(prompt), []
        generator = torch.Generator().manual_seed(body.get("seed") or 0)
        for _ in range(min(body["max_tokens"], self.ends_after)):
            row = self.rows(tokens)[-1]
            rows.append(row)
            tokens.append(self.drawn(row, body, generator))
        begin = 0 if body.get("echo") and "echo" in self.offers else len(prompt)
        choice: dict[str, Any] = {"text": self.tokenizer.decode(tokens[begin:]), "finish_reason": "length"}
        count = body.get("logprobs")
        if count is not None and "logprobs" in self.offers:
            echoed = [None, *self.rows(prompt)[:-1]] if begin == 0 else []
            choice["logprobs"] = self.described(tokens[begin:], [*echoed, *rows], min(count, self.most))
        if body.get("prompt_logprobs") and "prompt_logprobs" in self.offers:
            count = min(body["prompt_logprobs"], self.most)
            given = [
                self.listed(row, token, count)
                for token, row in zip(prompt[1:], self.rows(prompt), strict=False)
            ]
            choice["prompt_logprobs"] = [None] + [
                {str(token): {"logprob": value} for token, value in row.items()} for row in given
            ]
        return choice

    def rows(self, tokens: list[int]) -> torch.Tensor:
        with torch.inference_mode():
            return self.edit(self.model(torch.tensor([tokens])).logits[0].float())

    def drawn(self, row: torch.Tensor, body: dict[str, Any], generator: torch.Generator) -> int:
        from neuron_accuracy.subjects.drawing import draw
        from neuron_accuracy.subjects.protocol import Sampling

        honoured = {name: body[name] for name in ("top_p", "top_k", "min_p") if body.get(name)}
        limits = honoured if "limits" in self.offers else {}
        return draw(row, Sampling(body["temperature"], **limits), generator)

    def listed(self, row: torch.Tensor, token: int, count: int) -> dict[int, float]:
        logprobs = row.log_softmax(-1)
        values, ids = logprobs.topk(count)
        return dict(zip(ids.tolist(), values.tolist(), strict=True)) | {token: float(logprobs[token])}

    def described(self, tokens: list[int], rows: list[Any], count: int) -> dict[str, Any]:
        def name(token: int) -> str:
            return f"token_id:{token}" if "token_ids" in self.offers else self.tokenizer.decode([token])

        own: list[float | None] = []
        tops: list[dict[str, float] | None] = []
        for token, row in zip(tokens, rows, strict=True):
            listed = None if row is None else self.listed(row, token, count)
            own.append(None if listed is None else listed[token])
            tops.append(None if listed is None else {name(item): value for item, value in listed.items()})
        return {"tokens": [name(token) for token in tokens], "token_logprobs": own, "top_logprobs": tops}
