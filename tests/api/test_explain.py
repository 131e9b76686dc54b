"""explain() agrees with the call's masks, plan and settings; what interpreters and notebooks show for objects."""

from __future__ import annotations

import pickle
from html.parser import HTMLParser
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cattn
from cattn._input.types import summary
from support import forced, table


def arrays(*batch: int, T_q: int, T_k: int, kv: tuple[int, ...] | None = None) -> list[np.ndarray]:
    kv = batch if kv is None else kv
    return [np.zeros(shape, np.float32) for shape in ((*batch, T_q, 64), (*kv, T_k, 64), (*kv, T_k, 32))]


@pytest.mark.parametrize(
    ("call", "threads", "path"),
    [
        (arrays(T_q=6, T_k=6), 1, "tiny"),
        (arrays(1, 12, T_q=512, T_k=512), 1, "tile"),
        (arrays(1, 12, T_q=1, T_k=4096), 1, "rows"),
        (arrays(1, 1, T_q=1, T_k=40000), 4, "split"),
        (arrays(1, 32, T_q=1, T_k=4096, kv=(1, 8)), 1, "rows"),
    ],
)
def test_explain_names_the_path_and_the_threads(call: list[np.ndarray], threads: int, path: str) -> None:
    with cattn.num_threads(threads):
        plan = cattn.explain(*call)
    assert plan.path == path
    assert plan.threads == threads
    assert path in str(plan)
    assert plan.reason in str(plan)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"is_causal": "lower_right"},
        {"is_causal": "lower_right", "window_size": (100, 0)},
        {"window_size": (5, 7), "query_offset": 90},
        {"key_value_seq_starts": [0, 401]},
        {"key_value_seq_starts": [193, 30], "key_value_seq_lengths": [450, 20], "is_causal": "lower_right"},
        {"query_seq_lengths": [300, 17], "key_value_seq_lengths": [500, 0], "is_causal": "upper_left"},
    ],
)
def test_visible_pairs_and_key_blocks_are_those_of_the_mask(options: dict[str, Any]) -> None:
    query, key, value = arrays(2, 1, T_q=300, T_k=500)
    plan = cattn.explain(query, key, value, **options)
    scores = cattn.attention_weights(query, key, stage="mask", **options)
    visible = ~np.isneginf(scores)
    assert plan.visible_pairs == visible.sum()
    assert plan.flops == 2 * visible.sum() * (64 + 32)
    # A block of 96 queries visits the key blocks from the block of its first visible key to the block of its last one.
    visited = 0
    for head in visible[:, 0]:
        for first in range(0, 300, 96):
            keys = np.flatnonzero(head[first : first + 96].any(axis=0))
            if keys.size:
                visited += keys[-1] // 192 - keys[0] // 192 + 1
    assert plan.key_blocks_visited == visited
    assert plan.key_blocks_visited + plan.key_blocks_skipped == 2 * 4 * 3


def test_explain_names_the_instruction_set_and_the_forced_path() -> None:
    call = arrays(T_q=6, T_k=6)
    with table("scalar"), forced("tile"):
        plan = cattn.explain(*call)
    assert (plan.instruction_set, plan.path) == ("scalar", "tile")


@pytest.mark.promise("memory")
def test_scratch_is_at_most_one_mebibyte_a_thread() -> None:
    for depth in (16, 64, 256):
        for dtype in (np.float32, np.float64):
            x = np.zeros((1, 2, 1000, depth), dtype)
            plan = cattn.explain(x, x, x, is_causal=True, dropout_p=0.1)
            assert plan.scratch_bytes_per_thread <= 2**20


def test_errors_are_those_of_the_call() -> None:
    x = np.zeros((3, 4))
    with pytest.raises(ValueError, match="key has head_dim 5, query has 4"):
        cattn.explain(x, np.zeros((3, 5)), x)
    with pytest.raises(ValueError, match="is_causal must be"):
        cattn.explain(x, x, x, is_causal="left")
    empty = cattn.explain(np.zeros((0, 4)), x, x)
    assert (empty.visible_pairs, empty.key_blocks_visited) == (0, 0)


EXTRAS = {"return_weights": True, "return_lse": True, "return_dropout_mask": True}


@pytest.mark.parametrize("stored", [np.float64, np.float32, np.float16, ml_dtypes.bfloat16, np.int64])
@pytest.mark.parametrize("extras", [{}, EXTRAS, {"return_lse": np.float64}])
@pytest.mark.parametrize("layout", ["bhtd", "bthd"])
def test_explain_says_what_the_call_returns(stored: Any, extras: dict[str, Any], layout: Any) -> None:
    """Of arrays without memory of their own, whose contents are not read."""
    shapes = (2, 4, 1, 8), (1, 2, 7, 8), (2, 1, 7, 5)
    arrays = [np.broadcast_to(np.ones((), stored), shape) for shape in shapes]
    query, key, value = arrays if layout == "bhtd" else (x.swapaxes(1, 2) for x in arrays)
    call: dict[str, Any] = {"dropout_p": 0.5, "rng": 3, "sinks": np.zeros(4), "scale": 0.3, "layout": layout, **extras}
    plan = cattn.explain(query, key, value, **call)
    result = cattn.scaled_dot_product_attention(query, key, value, **call)
    returned = result._asdict() if isinstance(result, cattn.AttentionOutput) else {"out": result}
    found = {name: (a.shape, a.dtype) for name, a in returned.items() if isinstance(a, np.ndarray)}
    assert plan.outputs == found


def test_explain_draws_nothing_and_checks_as_the_call_does() -> None:
    x, rng = np.ones((3, 4)), np.random.default_rng(0)
    cattn.explain(x, x, x, dropout_p=0.5, rng=rng)
    assert rng.bit_generator.state == np.random.default_rng(0).bit_generator.state
    for wrong in ({"scale": np.nan}, {"softcap": -1}, {"sinks": np.ones(2)}, {"rng": 1.5}, {"return_lse": np.int32}):
        errors = []
        for function in (cattn.explain, cattn.scaled_dot_product_attention):
            with pytest.raises((TypeError, ValueError)) as error:
                function(x, x, x, **wrong)  # type: ignore[call-overload]
            errors.append(str(error.value))
        assert errors[0] == errors[1]


# ---- display ---------------------------------------------------------------------------------------------------------
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
