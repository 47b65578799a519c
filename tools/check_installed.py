# SPDX-License-Identifier: Apache-2.0
"""Check one package as installed from its wheel: `python -I check_installed.py DISTRIBUTION IMPORT_NAME`.

Run by the interpreter of an environment that holds that wheel and what it requires, nothing of the checkout.
"""

import importlib
import importlib.metadata
import importlib.util
import sys
from pathlib import Path


def main(distribution: str, name: str) -> None:
    """Import the package; raises where it does not come from the wheel or lacks its marker of types."""
    module = importlib.import_module(name)
    assert module.__file__ is not None
    folder = Path(module.__file__).parent
    assert folder.is_relative_to(sys.prefix), f"{name} was imported from {folder}, outside of {sys.prefix}"
    assert (folder / "py.typed").is_file(), f"{name} was built without py.typed"
    metadata = importlib.metadata.metadata(distribution)
    assert module.__version__ == metadata["Version"], (
        f"{module.__version__} in {name}, {metadata['Version']} in its metadata"
    )
    wants_vllm = distribution == "vllm-neuron-plugin"
    has_vllm = importlib.util.find_spec("vllm") is not None
    assert wants_vllm == has_vllm, f"vllm is {'' if has_vllm else 'not '}installed beside {distribution}"
    print(f"{distribution} {module.__version__}: installed alone, imported")


if __name__ == "__main__":
    main(*sys.argv[1:])
