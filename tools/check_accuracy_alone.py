# SPDX-License-Identifier: Apache-2.0
"""Check neuron-accuracy as installed beside neuron-core alone: `python -I check_accuracy_alone.py KIT`.

It compares two models of transformers, and two servers that speak the OpenAI API. KIT is the file of the package's
tests that makes tiny models and serves them.
"""

import copy
import importlib.util
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

OTHERS = ("neuron_parallel", "neuron_models", "vllm_neuron", "vllm")
FAULTY = "model.layers.1.mlp.down_proj"


def main(kit_file: str) -> None:
    """Raise where something other than neuron-core is installed, or a comparison does not say what it should."""
    beside = [name for name in OTHERS if importlib.util.find_spec(name) is not None]
    assert not beside, f"{beside} are installed beside neuron-accuracy"
    kit = load(Path(kit_file))
    with tempfile.TemporaryDirectory() as folder:
        model = kit.tiny_llama()
        faulty = copy.deepcopy(model)
        faulty.get_submodule(FAULTY).register_forward_hook(lambda module, inputs, output: output * 1.05)
        compare_models(model, faulty, Path(folder))
        compare_servers(kit, model, faulty, Path(folder))
    print("neuron-accuracy compared two models of transformers and two servers, beside neuron-core alone")


def load(path: Path) -> ModuleType:
    """The module in a file."""
    spec = importlib.util.spec_from_file_location("kit", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def compare_models(model: Any, faulty: Any, folder: Path) -> None:
    """All levels, over a model and itself, and over one with a fault."""
    from neuron_accuracy.run.triage import Roles, Triage
    from neuron_accuracy.subjects.transformers import TransformersSubject

    reference = TransformersSubject.of(model)
    for name, test, expected in (("same", model, None), ("faulty", faulty, f"{FAULTY}:output.0")):
        roles = Roles(TransformersSubject.of(test), reference)
        triage = Triage(roles, [[5, 6, 7, 8], [9, 10, 11]], folder / name, num_tokens=4)
        outcomes = list(triage.run())
        summary = triage.summary(outcomes)
        triage.write(outcomes, {})
        assert summary.passed == (expected is None), summary.faults
        assert expected is None or summary.findings[0].where.startswith(expected), summary.findings[0]


def compare_servers(kit: ModuleType, model: Any, faulty: Any, folder: Path) -> None:
    """The command, on two servers that agree and on two that do not; its exit code is the verdict."""
    tokenizer = kit.byte_tokenizer()
    servers = [kit.TinyServer(one, tokenizer) for one in (model, faulty)]
    command = str(Path(sys.executable).with_name("neuron-accuracy"))
    for server, code in zip(servers, (0, 1), strict=True):
        urls = ["--test", f"server:{server.url}/v1", "--reference", f"server:{servers[0].url}/v1"]
        found = folder / f"{code}.json"
        call = [command, "logits", *urls, "--num-prompts", "3", "--tokens", "4", "--json", str(found)]
        ran = subprocess.run(call, capture_output=True, text=True, timeout=300, check=False)
        assert ran.returncode == code, ran.stdout + ran.stderr
        assert json.loads(found.read_text())["passed"] == (code == 0)
    for server in servers:
        server.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
