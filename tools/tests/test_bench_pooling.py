# SPDX-License-Identifier: Apache-2.0
"""When the embedding benchmark refuses to compare, and what it is made of. Nothing is timed here."""

from __future__ import annotations

import argparse
import json
import random
import sys
from pathlib import Path

import numpy as np
import pytest

import bench
import bench_pooling
import bench_report
from bench_sides import Side
from devtools.console import Failure

# Answers as bench_embed.py would, with vectors that say which text they are of.
PROCESS = """
import json, sys
import numpy as np
print(json.dumps({"version": "1"}), flush=True)
for line in sys.stdin:
    order = json.loads(line)
    if order["out"]:
        np.save(order["out"], np.array([[len(text), 1.0] for text in order["texts"]], np.float32))
    tokens = sum(len(text.split()) + 2 for text in order["texts"])
    print(json.dumps({"seconds": 0.5, "tokens": tokens - (order["texts"][0] == "short")}), flush=True)
"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "bert"
    folder.mkdir()
    words = ["[PAD]", "##ing", "an", "naïve", "3rd", *(f"word{chr(97 + index)}" for index in range(20))]
    (folder / "vocab.txt").write_text("\n".join(words))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 256, "x": 1}))
    return folder


def test_texts_are_made_of_words_that_are_one_token(model, tmp_path):
    words = bench_pooling.words_of(model)
    assert words == [f"word{chr(97 + index)}" for index in range(20)]
    assert len(bench_pooling.text_of(words, 128, random.Random(0)).split()) == 126
    with pytest.raises(Failure, match=r"no vocab\.txt"):
        bench_pooling.words_of(tmp_path)


def test_both_sides_read_a_copy_that_allows_long_texts(model, tmp_path):
    copy = bench_pooling.long_model(model, tmp_path / "copy")
    assert json.loads((copy / "sentence_bert_config.json").read_text()) == {"max_seq_length": 512, "x": 1}
    assert json.loads((model / "sentence_bert_config.json").read_text())["max_seq_length"] == 256


def test_vectors_that_differ_give_no_ratio():
    angle = np.arccos(0.9998)
    first, second = np.array([[3.0, 0.0], [0.0, 2.0]]), np.array([[1.0, 0.0], [np.sin(angle), np.cos(angle)]])
    least = bench_pooling.cosines(first, second).min()
    assert least == pytest.approx(0.9998)
    with pytest.raises(Failure, match=r"a cosine is 0\.999800"):
        bench_pooling.require_same(float(least))
    with pytest.raises(Failure, match="a cosine is nan"):
        bench_pooling.require_same(float("nan"))
    bench_pooling.require_same(1.0)


def test_a_side_is_asked_and_its_count_is_checked(model, tmp_path, monkeypatch):
    script = tmp_path / "bench_embed.py"
    script.write_text(PROCESS)
    monkeypatch.setattr(bench_pooling, "HERE", tmp_path)
    options = argparse.Namespace(dtype="float32", engine_args="{}")
    side = Side("ours", sys.executable)
    with bench_pooling.working(side, "vllm", options, model, tmp_path) as worker:
        found = bench_pooling.pairs([worker], bench_pooling.words_of(model), 3)
        assert found == {"ours": [0.5, 0.5, 0.5]}
        checked = bench_pooling.check([worker, worker], bench_pooling.words_of(model), tmp_path)
        assert checked == {"texts": 200, "least_cosine": pytest.approx(1.0)}
        with pytest.raises(Failure, match="2 tokens were counted of texts of 3"):
            bench_pooling.expect_tokens(worker, worker.ask(["short"]), 3)
    script.write_text("raise SystemExit('no model here')")
    with (
        pytest.raises(Failure, match="no model here"),
        bench_pooling.working(side, "vllm", options, model, tmp_path),
    ):
        pass


@pytest.mark.parametrize(("ratios", "verdict"), [([0.8, 1.2, 1.1], "met"), ([0.8, 0.9, 1.1], "missed")])
def test_the_table_gives_the_median_of_the_pairs(ratios, verdict):
    table = bench_report.pooling_table({"texts_s": {"ours": 10.0, "peer": 9.0}, "ratios": ratios})
    cells = [next(iter(column.cells)) for column in table.columns]
    assert cells[3:5] == [f"{sorted(ratios)[1]:.2f} ×", f"0.80 – {max(ratios):.2f}"]
    assert cells[-1] == verdict


def test_a_model_is_asked_for(capsys):
    with pytest.raises(SystemExit):
        bench.main(["--pooling", sys.executable])
    assert "--pooling: give --model" in capsys.readouterr().err
