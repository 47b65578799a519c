# SPDX-License-Identifier: Apache-2.0
"""Re-record what tests compare with: ``python packages/vllm-neuron-plugin/tests/record.py``.

Writes ``unit/vllm_signatures.json`` (every vLLM symbol the plugin overrides or calls) and the generated
tables of the documentation pages. Read the difference before committing it: a changed signature is a change
to adapt to.
"""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

HERE = Path(__file__).parent
DOCS = HERE.parents[2] / "docs"


def record_signatures() -> None:
    """Write the signatures the drift test compares with."""
    spec = importlib.util.spec_from_file_location("drift", HERE / "unit" / "test_vllm_drift.py")
    assert spec is not None and spec.loader is not None
    drift = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(drift)
    drift.RECORD.write_text(json.dumps(drift.signatures(), indent=1, sort_keys=True) + "\n")


def write_tables() -> None:
    """Replace the generated tables in the documentation pages."""
    from vllm_neuron.admission import admission_markdown
    from vllm_neuron.checks import refusals_markdown
    from vllm_neuron.config import reference_markdown

    _replace(DOCS / "configuration.md", "settings", reference_markdown())
    _replace(DOCS / "refusals.md", "flags", refusals_markdown())
    _replace(DOCS / "refusals.md", "parameters", admission_markdown())


def _replace(page: Path, name: str, table: str) -> None:
    pattern = rf"(<!-- {name} -->\n).*?(<!-- end -->)"
    page.write_text(
        re.sub(pattern, lambda found: f"{found[1]}\n{table}\n{found[2]}", page.read_text(), flags=re.DOTALL)
    )


if __name__ == "__main__":
    record_signatures()
    write_tables()
