"""The examples of equal bits in NumPy: speculative decoding, and a text compressed by a model."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support import ROOT

EXAMPLES = ROOT / "examples"


def load(name: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return runpy.run_path(str(EXAMPLES / f"{name}.py"))


def test_the_gradients_of_the_small_gpt_are_its_derivatives(monkeypatch: pytest.MonkeyPatch) -> None:
    model = load("small_gpt", monkeypatch)["GPT"](16, 2, 2, 12)
    ids = np.random.default_rng(1).integers(0, 256, (3, 13))
    _, grads = model.gradients(ids)
    assert grads.keys() == model.weights.keys()
    rng = np.random.default_rng(2)
    for name, weight in model.weights.items():
        direction = rng.integers(-1, 2, weight.shape).astype(np.float32)
        losses = []
        for sign in (1, -1):
            model.weights[name] = weight + np.float32(sign * 2**-8) * direction
            losses.append(model.gradients(ids)[0])
        model.weights[name] = weight
        slope = (losses[0] - losses[1]) / 2**-7
        expected = float((grads[name] * direction).sum(dtype=np.float64))
        # float32 losses differ from the true ones by some 1e-6, and the third derivative is of order 1
        assert abs(slope - expected) <= 2e-3 + 0.02 * abs(expected), name


@pytest.mark.promise("decoding", "projections' bits")
def test_speculative_decoding_has_the_bits_of_greedy_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    names = load("speculative_decoding", monkeypatch)
    model, data = names["GPT"](), names["text"]()
    losses = model.train(data, 30, rows=4)
    assert losses[-1] < losses[0] - 1
    for prompt in (b"    def __init__(self, ", b"import "):
        runs = names["compare"](model, names["Drafts"](data), prompt, 60)
        right = runs["greedy"]
        assert right.logits.shape == (60, 256)
        for run in runs.values():
            assert run.tokens == right.tokens
            assert run.logits.tobytes() == right.logits.tobytes()
        assert runs["chain"].calls < right.calls  # some drafts were right
        assert runs["tree"].calls < right.calls
    # an untrained model refuses most drafts
    names["compare"](names["GPT"](seed=3), names["Drafts"](data), b"the ", 20)


@pytest.mark.promise("decoding", "projections' bits")
def test_a_text_is_decompressed_by_another_process_on_another_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = load("compress_text", monkeypatch)
    data = names["text"]()[:500] + bytes(range(256))[::7]  # several pieces, bytes that are no text
    size = names["demonstrate"](tmp_path, 30, data)
    assert size < 500
    model = names["load"](str(tmp_path / "model.npz"))
    for short in (b"", b"x", data[:128]):
        assert names["decompress"](model, names["compress"](model, short)) == short
    model.weights["0 qkv"] += np.float32(0.01)
    with pytest.raises(SystemExit, match="other bits"):
        names["decompress"](model, (tmp_path / "text.code").read_bytes())


def test_ranges_are_integers_of_every_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    names = load("compress_text", monkeypatch)
    for logits in (np.zeros(256), np.eye(256)[7] * 1e4, np.linspace(-90, 90, 256)):
        edges = names["ranges"](logits.astype(np.float32))
        assert edges[0] == 0
        assert (np.diff(edges) >= 1).all()
        assert edges[-1] <= names["TOTAL"]
