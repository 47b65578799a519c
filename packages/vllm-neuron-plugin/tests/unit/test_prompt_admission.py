# SPDX-License-Identifier: Apache-2.0
"""Prompt embeddings that are refused by name before an engine sees them, and the form of those that are not."""

from __future__ import annotations

import base64
import io
import pickle
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.platforms import current_platform
from vllm.renderers.embed_utils import safe_load_prompt_embeds

from vllm_neuron.patches import apply_patches
from vllm_neuron.prompt_admission import admit_embeds

VOCAB, WIDTH = 100, 8


def model(*, enabled: bool = True, dtype: torch.dtype = torch.float32) -> Any:
    """What is asked of vLLM's ``ModelConfig``."""
    return SimpleNamespace(
        enable_prompt_embeds=enabled, dtype=dtype, get_hidden_size=lambda: WIDTH, get_vocab_size=lambda: VOCAB
    )


def prompt(embeds: torch.Tensor, **more: Any) -> dict[str, Any]:
    return {"type": "embeds", "prompt_embeds": embeds, **more}


def with_value(value: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    embeds = torch.zeros(3, WIDTH, dtype=dtype)
    embeds[2, 5] = value
    return embeds


IDS, MASK = [1, 2, 3], [True, False, True]
REFUSED = {
    "width": (prompt(torch.zeros(3, WIDTH + 1)), "prompt_embeds", r"shape \[3, 9\].*\[tokens, 8\]"),
    "dimensions": (prompt(torch.zeros(WIDTH)), "prompt_embeds", r"shape \[8\]"),
    "empty": (prompt(torch.zeros(0, WIDTH)), "prompt_embeds", "empty"),
    "integers": (prompt(torch.zeros(3, WIDTH, dtype=torch.int32)), "prompt_embeds", "torch.int32"),
    "complex": (prompt(torch.zeros(3, WIDTH, dtype=torch.complex64)), "prompt_embeds", "complex64"),
    "nan": (prompt(with_value(float("nan"))), "prompt_embeds", "row 2.*not finite"),
    "infinite": (prompt(with_value(float("-inf"))), "prompt_embeds", "row 2"),
    "infinite in the model's type": (prompt(with_value(1e300, torch.float64)), "prompt_embeds", "float32"),
    "no memory": (prompt(torch.zeros(3, WIDTH, device="meta")), "prompt_embeds", "on meta"),
    "sparse": (prompt(torch.zeros(3, WIDTH).to_sparse()), "prompt_embeds", "sparse"),
    "ids alone": (prompt(torch.zeros(3, WIDTH), prompt_token_ids=IDS), "prompt_is_token_ids", "3 and None"),
    "mask alone": (prompt(torch.zeros(3, WIDTH), is_token_ids=MASK), "prompt_is_token_ids", "None and 3"),
    "lengths": (
        prompt(torch.zeros(3, WIDTH), prompt_token_ids=IDS, is_token_ids=MASK[:2]),
        "prompt_is_token_ids",
        "3 and 2",
    ),
    "unknown token": (
        prompt(torch.zeros(3, WIDTH), prompt_token_ids=[1, 2, VOCAB], is_token_ids=MASK),
        "prompt_token_ids",
        r"\[2\] is 100; .* 0 to 99",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_is_named(case):
    asked, field, said = REFUSED[case]
    with pytest.raises(VLLMValidationError, match=said) as caught:
        admit_embeds(asked, model())
    assert caught.value.parameter == field


def test_an_engine_without_the_flag_refuses():
    with pytest.raises(VLLMValidationError, match="--enable-prompt-embeds"):
        admit_embeds(prompt(torch.zeros(3, WIDTH)), model(enabled=False))


@pytest.mark.parametrize("given", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16], ids=str)
def test_the_rest_comes_in_the_models_type_and_owns_its_memory(given, wanted):
    large = torch.randn(50, WIDTH, dtype=torch.float64).to(given)
    admitted = admit_embeds(prompt(large[7:10].requires_grad_()), model(dtype=wanted))
    assert torch.equal(admitted, large[7:10].to(wanted)) and admitted.dtype == wanted
    assert admitted.untyped_storage().nbytes() == admitted.nbytes and not admitted.requires_grad
    stretched = admit_embeds(prompt(large[:1].expand(4, WIDTH)), model(dtype=wanted))
    assert stretched.is_contiguous() and torch.equal(stretched, large[:1].to(wanted).repeat(4, 1))


def test_a_token_and_an_embedding_of_zeros_are_not_the_same_rows():
    # vLLM keys cached blocks by token ids and these rows; an embedding's id is 0.
    zeros, ids = torch.zeros(2, WIDTH), [0, 0]
    keys = set()
    for mask in ([True, False], [False, True], [False, False]):
        rows = admit_embeds(prompt(zeros, prompt_token_ids=ids, is_token_ids=mask), model())
        assert [bool(row.isfinite().all()) for row in rows] == [not is_token for is_token in mask]
        keys.add(rows.numpy().tobytes())
    assert len(keys) == 3
    garbage = with_value(float("inf"))  # at a token
    mixed = {"prompt_token_ids": IDS, "is_token_ids": MASK}
    rows = [admit_embeds(prompt(embeds, **mixed), model()) for embeds in (garbage, torch.zeros(3, WIDTH))]
    assert rows[0].numpy().tobytes() == rows[1].numpy().tobytes()
    again = admit_embeds(prompt(rows[0], **mixed), model())
    assert again.numpy().tobytes() == rows[0].numpy().tobytes()


def test_probabilities_of_a_prompt_of_embeddings_are_refused():
    asked = prompt(torch.zeros(3, WIDTH))
    current_platform.validate_request(asked, SamplingParams())
    with pytest.raises(VLLMValidationError) as caught:
        current_platform.validate_request(asked, SamplingParams(prompt_logprobs=0))
    assert caught.value.parameter == "prompt_logprobs"


def payload_of(tensor: torch.Tensor) -> bytes:
    saved = io.BytesIO()
    torch.save(tensor, saved)
    return base64.b64encode(saved.getvalue())


class Planted:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.path,))


def planted_payloads(mark: Path) -> dict[str, bytes]:
    """Payloads that would run code: a bare pickle, and one inside what ``torch.save`` writes."""
    saved, archive = io.BytesIO(), io.BytesIO()
    torch.save(torch.zeros(2, WIDTH), saved)
    with zipfile.ZipFile(saved) as old, zipfile.ZipFile(archive, "w") as new:
        for name in old.namelist():
            content = pickle.dumps(Planted(mark), 2) if name.endswith("data.pkl") else old.read(name)
            new.writestr(name, content)
    return {"pickle": pickle.dumps(Planted(mark)), "archive": archive.getvalue()}


@pytest.mark.parametrize("kind", ["pickle", "archive"])
def test_a_payload_runs_no_code(kind, tmp_path):
    mark = tmp_path / "was here"
    payload = planted_payloads(mark)[kind]
    with pytest.raises(VLLMValidationError, match="could not be deserialized"):
        safe_load_prompt_embeds(model(), base64.b64encode(payload))
    assert not mark.exists()
    if kind == "pickle":  # and it would have
        pickle.loads(payload)
        assert mark.exists()


def test_a_payload_declares_no_more_than_the_longest_prompt(monkeypatch):
    from vllm_neuron.defaults import PAYLOAD_LIMIT, limit_payloads

    monkeypatch.delenv(PAYLOAD_LIMIT, raising=False)
    monkeypatch.setenv(PAYLOAD_LIMIT, "1")  # so that it is put back
    monkeypatch.delenv(PAYLOAD_LIMIT)
    asked = model()
    asked.max_model_len = 16
    limit_payloads(SimpleNamespace(model_config=asked))

    longest = torch.randn(16, WIDTH, dtype=torch.float64)
    assert torch.equal(safe_load_prompt_embeds(asked, payload_of(longest)), longest.float())
    stretched = torch.zeros(1, WIDTH).expand(1 << 20, WIDTH)
    assert len(payload_of(stretched)) < 4000
    for tensor in (stretched, torch.zeros(1 << 20, WIDTH).to_sparse(), torch.zeros(33, WIDTH)):
        with pytest.raises(VLLMValidationError, match="exceeding the 1024 byte limit"):
            safe_load_prompt_embeds(asked, payload_of(tensor))


@pytest.mark.parametrize("layout", [torch.jagged, torch.strided], ids=str)
def test_a_nested_tensor_is_a_client_error(layout):
    apply_patches()
    nested = torch.nested.nested_tensor([torch.zeros(3, WIDTH)] * 2, layout=layout)
    with pytest.raises(VLLMValidationError, match="nested"):
        safe_load_prompt_embeds(model(), payload_of(nested))


def test_a_limit_the_user_set_stays(monkeypatch):
    from vllm import envs

    from vllm_neuron.defaults import PAYLOAD_LIMIT, limit_payloads

    monkeypatch.setenv(PAYLOAD_LIMIT, "5000")  # more than the longest prompt
    asked = model()
    asked.max_model_len = 16
    limit_payloads(SimpleNamespace(model_config=asked))
    assert envs.VLLM_MAX_EMBED_DECODE_BYTES == 5000
