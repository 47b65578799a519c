# SPDX-License-Identifier: Apache-2.0
"""What capturing a large model costs: Llama 3.1 70B for eight ranks, its published configuration and no weights."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from devtools.console import Failure

# The published configuration of Llama 3.1 70B.
LLAMA_70B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "attention_bias": False,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "hidden_act": "silu",
    "hidden_size": 8192,
    "initializer_range": 0.02,
    "intermediate_size": 28672,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "num_attention_heads": 64,
    "num_hidden_layers": 80,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}
RANKS = 8


def capture(target: str = "trn2") -> dict[str, Any]:
    """Run ``neuron compile`` over the default plan; returns seconds, graphs, and the largest process's bytes."""
    with tempfile.TemporaryDirectory(prefix="neuron-capture-") as name:
        scratch = Path(name)
        (scratch / "config.json").write_text(json.dumps(LLAMA_70B))
        command = [Path(sys.executable).with_name("neuron"), "compile", scratch, "--target", target, "--json"]
        command += ["--tensor-parallel-size", str(RANKS), "--output", scratch / "graphs"]
        begun = time.perf_counter()
        done = subprocess.run(
            [str(word) for word in command],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
        )
        seconds = time.perf_counter() - begun
        try:
            report = json.loads(done.stdout)
        except ValueError as error:
            raise Failure(f"neuron compile printed no report:\n{done.stderr[-2000:]}") from error
    failed = [bucket for bucket in report["buckets"] if bucket["error"]]
    if failed:
        raise Failure(f"{failed[0]['bucket']} could not be captured: {failed[0]['error']}")
    return {
        "capture_70b_total_s": seconds,
        "capture_70b_workers_s": report["seconds"],
        "capture_70b_graphs": sum(bucket["captured"] for bucket in report["buckets"]),
        "capture_70b_buckets": len(report["buckets"]),
        "capture_70b_peak_mib": max(bucket["peak_bytes"] for bucket in report["buckets"]) / (1 << 20),
    }
