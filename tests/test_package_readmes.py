# SPDX-License-Identifier: Apache-2.0
"""The packages' own READMEs have examples; ``test_docs_blocks.py`` runs them as they stand."""

import doc_blocks


def test_the_three_libraries_have_an_example():
    shown = {
        block.page.parent.name
        for page in doc_blocks.pages()
        for block in doc_blocks.blocks(page)
        if block.language == "python" and block.mark is None
    }
    assert {"neuron-core", "neuron-parallel", "neuron-models"} <= shown
