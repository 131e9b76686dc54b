"""Display forms: what an interpreter and a notebook show for results, masks, explanations and caches."""

from __future__ import annotations

import pickle
from html.parser import HTMLParser
from typing import Any

import numpy as np
import pytest

import cattn
from cattn._input.display import summary

X = np.ones((2, 3, 4), np.float32)


class Cells(HTMLParser):
    """Collects the texts of cells, and checks that every tag is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.texts: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def texts(value: Any) -> list[str]:
    """Return the texts of the HTML that a notebook shows."""
    cells = Cells()
    cells.feed(value._repr_html_())
    assert cells.open == []
    return cells.texts


def test_a_result_shows_dtypes_and_shapes() -> None:
    result = cattn.causal_attention(X, X, X, return_weights=True, dropout_p=0.5, rng=7)
    assert repr(result) == "AttentionOutput(out=<float32 (2, 3, 4)>, weights=<float32 (2, 3, 3)>, dropout_seed=7)"
    assert str(result) == repr(result)
    assert texts(result) == [
        "AttentionOutput", "out", "float32", "(2, 3, 4)", "weights", "float32", "(2, 3, 3)", "dropout_seed", "7",
    ]  # fmt: skip
    assert result == tuple(result)
    assert repr(cattn.AttentionOutput()) == "AttentionOutput()"
    assert repr(cattn.AttentionOutput([1.0] * 100)) == "AttentionOutput(out=[1.0, 1.0, 1.0, 1.0, 1.0, 1.0, ...])"


def test_gradients_show_dtypes_and_shapes() -> None:
    result = cattn.causal_attention(X, X, X, return_lse=True)
    grads = cattn.attention_backward(X, X, X, X, result.out, result.lse, is_causal=True, bias=np.zeros((3, 3)))
    shown = "<float32 (2, 3, 4)>"
    assert repr(grads) == f"AttentionGradients(query={shown}, key={shown}, value={shown}, bias=<float32 (3, 3)>)"
    assert texts(grads)[:4] == ["AttentionGradients", "query", "float32", "(2, 3, 4)"]
    assert len(repr(grads)) < 150


def test_tensors_and_large_values_are_short() -> None:
    torch = pytest.importorskip("torch")
    assert summary(torch.zeros(2, 3)) == "torch.float32 (2, 3)"
    assert summary(np.float32(1.5)) == "float32 ()"
    assert len(summary("x" * 1000)) < 50


def test_a_mask_shows_itself() -> None:
    mask = cattn.show_mask(3, 5, is_causal="lower_right", window_size=(2, 0))
    assert isinstance(mask, str)
    assert repr(mask) == str(mask) == f"{mask}" == "key      01234\nquery 0  xxx..\nquery 1  .xxx.\nquery 2  ..xxx"
    assert texts(mask) == [str(mask)]
    assert type(str(mask)) is str
    assert mask == str(mask)
    assert hash(mask) == hash(str(mask))
    assert type(pickle.loads(pickle.dumps(mask))) is str
    assert pickle.loads(pickle.dumps(mask)) == mask
    batch = cattn.show_mask(2, 2, key_value_seq_lengths=[1, 2])
    assert repr(batch).startswith("[0]:\nkey      01\n")


def test_an_explanation_shows_its_lines() -> None:
    plan = cattn.explain(X, X, X)
    assert repr(plan) == str(plan)
    assert repr(plan).splitlines()[1] == f"path      {plan.path}: {plan.reason}"
    shown = texts(plan)
    assert shown[:3] == ["Explanation", "returns", f"out {X.dtype} {X.shape}"]
    assert shown[1::2] == [line.split()[0] for line in repr(plan).splitlines()]
    assert shown[2::2] == [line[10:] for line in repr(plan).splitlines()]
    assert plan == tuple(plan)


def test_a_cache_shows_lengths_capacity_and_dtype() -> None:
    cache = cattn.KVCache(2, 3, 10, 8, 5, "float64")
    cache.append(np.ones((2, 3, 4, 8)), np.ones((2, 3, 4, 5)))
    for text in ("lengths=4", "max_len=10", "dtype=float64"):
        assert text in repr(cache)
    shown = texts(cache)
    rows = dict(zip(shown[1::2], shown[2::2], strict=True))
    assert shown[0] == "KVCache"
    assert rows["lengths"] == "4 of max_len=10"
    assert (rows["dtype"], rows["head_dim"], rows["batch_shape"]) == ("float64", "(8, 5)", "(2,)")
    assert rows["nbytes"] == f"{cache.nbytes:,}"
    cache.truncate([1, 4])
    assert "[1, 4] of max_len=10" in texts(cache)
    assert "8" in texts(cattn.KVCache(2, 3, 10, 8))


def test_html_is_escaped() -> None:
    result = cattn.AttentionOutput("<b>&")
    assert "<b>" not in result._repr_html_()
    assert texts(result)[2] == "'<b>&'"


def test_ipython_shows_the_same() -> None:
    """IPython has a printer of its own for str and tuple, which a repr of the class must override."""
    pretty = pytest.importorskip("IPython.lib.pretty").pretty
    mask, plan = cattn.show_mask(3), cattn.explain(X, X, X)
    result = cattn.causal_attention(X, X, X, return_weights=True)
    for value in (mask, plan, result):
        assert pretty(value) == repr(value)
