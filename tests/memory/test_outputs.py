"""`out=` and the optional outputs: any strides, overlap with inputs, the caller's arrays, and memory beside them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import cattn
from support import assert_same_bits

RNG = np.random.default_rng(0)
Q, K, V = RNG.standard_normal((3, 2, 3, 17, 8))
S = RNG.standard_normal((4, 17, 17))

FUNCTIONS: dict[str, tuple[Callable[..., np.ndarray], tuple[int, ...]]] = {
    "scaled_dot_product_attention": (lambda out: cattn.scaled_dot_product_attention(Q, K, V, out=out), Q.shape),
    "causal_attention": (lambda out: cattn.causal_attention(Q, K, V, out=out), Q.shape),
    "attention_weights": (lambda out: cattn.attention_weights(Q, K, out=out), (2, 3, 17, 17)),
}

LAYOUTS: dict[str, Callable[[tuple[int, ...]], np.ndarray]] = {
    "C": lambda shape: np.full(shape, 7.0),
    "Fortran": lambda shape: np.full(shape, 7.0, order="F"),
    "reversed": lambda shape: np.full(shape, 7.0)[..., ::-1, ::-1],
    "every second": lambda shape: np.full((*shape[:-1], 2 * shape[-1]), 7.0)[..., ::2],
    "inside": lambda shape: np.full((*shape[:-2], shape[-2] + 2, shape[-1] + 3), 7.0)[..., 1:-1, 1:-2],
}


@pytest.mark.promise("out")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_out_may_have_any_strides(name: str, layout: str) -> None:
    function, shape = FUNCTIONS[name]
    out = LAYOUTS[layout](shape)
    base = out.base if out.base is not None else out
    untouched = np.ones(base.shape, bool) if base is not out else None
    assert function(out) is out
    expected = function(None)
    assert np.array_equal(out.view(), expected), "out has the bits of a new array"
    if untouched is not None and layout in ("every second", "inside"):
        assert np.count_nonzero(base == 7.0) == base.size - out.size, "memory beside out was written"


@pytest.mark.promise("out")
@pytest.mark.parametrize("shift", [0, 1, 5, -3])
def test_out_may_overlap_an_input(shift: int) -> None:
    for step in (1, -1):
        memory = np.random.default_rng(1).standard_normal(400)
        x = memory[100:244].reshape(12, 12)
        out = memory[100 + shift : 244 + shift][::step].reshape(12, 12)
        expected = cattn.causal_attention(*[x.copy()] * 3)
        assert cattn.causal_attention(x, x, x, out=out) is out
        assert np.array_equal(out, expected)


@pytest.mark.promise("out")
def test_an_overlap_that_numpy_cannot_find_is_handled() -> None:
    """NumPy gives up its search for a common element of these two arrays. They have 81."""
    memory = np.random.default_rng(1).standard_normal(2837)
    strides = np.array([[2, 6, 14, 23, 51, 104, 252, 550, 1194], [3, 5, 11, 20, 46, 98, 229, 486, 1311]]) * 8
    x, out = (
        np.lib.stride_tricks.as_strided(memory[first:], (2,) * 9, tuple(row))
        for first, row in zip((0, 627), strides, strict=True)
    )
    with pytest.raises(np.exceptions.TooHardError):
        np.shares_memory(x, out, max_work=10_000)
    expected = cattn.softmax(x.copy())
    assert cattn.softmax(x, out=out) is out
    assert np.array_equal(out, expected)


@pytest.mark.promise("out")
def test_a_stride_of_zero_is_refused_only_on_an_axis_of_two_or_more() -> None:
    """An axis of one element and an empty array may have any stride. An axis of two may not be one place in memory."""
    x = S[:1]
    out = np.empty(x.shape[1:])[np.newaxis]
    assert out.strides[0] == 0
    assert cattn.softmax(x, out=out) is out
    assert np.array_equal(out, cattn.softmax(x))
    nothing = np.lib.stride_tricks.as_strided(np.empty((0, 3)), (2, 0, 3), (0, 24, 8))
    assert cattn.softmax(np.empty((2, 0, 3)), out=nothing) is nothing
    same = np.lib.stride_tricks.as_strided(np.empty((17, 17)), (2, 17, 17), (0, 136, 8))
    with pytest.raises(ValueError, match="out overlaps itself: axis 0 has stride 0"):
        cattn.softmax(S[:2], out=same)


@pytest.mark.promise("out")
@pytest.mark.parametrize(
    ("shape", "strides", "axis"),
    [
        ((4, 3), (8, 8), 1),
        ((4, 3), (8, 16), 1),
        ((4, 3), (16, 8), 0),
        ((4, 3), (-8, 8), 1),
        ((2, 2, 3), (24, 16, 8), 1),
    ],
)
def test_an_out_that_overlaps_itself_is_refused(shape: tuple[int, ...], strides: tuple[int, ...], axis: int) -> None:
    """Sliding windows over one array: a row would overwrite the previous one."""
    memory = np.zeros(64)
    out = np.lib.stride_tricks.as_strided(memory[32:], shape, strides)
    calls: list[Callable[[], Any]] = [
        lambda: cattn.softmax(np.ones(shape), out=out),
        lambda: cattn.dropout(np.ones(shape), 0.5, rng=1, out=out),
        lambda: cattn.scaled_dot_product_attention(np.ones(shape), np.ones(shape), np.ones(shape), out=out),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=f"out overlaps itself: axis {axis} has stride {strides[axis]}"):
            call()
    assert not memory.any()
    for good in (
        memory[:36:3].reshape(4, 3),
        memory[:48].reshape(3, 4, 4)[:, ::-1, 3].T[:, ::-1],
        memory[:24:-3][:12].reshape(4, 3),
    ):
        cattn.softmax(np.ones((4, 3)), out=good)
        np.testing.assert_allclose(good, 1 / 3)


def test_an_attention_output_of_arrays_is_filled_and_returned() -> None:
    arrays = cattn.AttentionOutput(
        out=np.empty_like(Q),
        weights=np.empty((2, 3, 17, 17)),
        lse=np.empty((2, 3, 17)),
        dropout_mask=np.empty((2, 3, 17, 17), bool),
    )
    options = {"return_weights": True, "return_lse": True, "return_dropout_mask": True, "dropout_p": 0.3, "rng": 5}
    result = cattn.scaled_dot_product_attention(Q, K, V, out=arrays, **options)
    expected = cattn.scaled_dot_product_attention(Q, K, V, **options)
    for name in ("out", "weights", "lse", "dropout_mask"):
        assert getattr(result, name) is getattr(arrays, name)
        assert np.array_equal(getattr(result, name), getattr(expected, name))
    assert result.dropout_seed == 5


ALL_OUTPUTS = {"return_weights": True, "return_lse": True, "return_dropout_mask": True}
SHAPES_OF_OUTPUTS = {"out": Q.shape, "weights": (2, 3, 17, 17), "lse": (2, 3, 17), "dropout_mask": (2, 3, 17, 17)}


def outputs_in_one_memory(first: str, second: str, *, overlap: bool) -> tuple[np.ndarray, cattn.AttentionOutput]:
    """Return memory and outputs. In it the second begins at the last element of the first, or else right after it."""
    memory = np.zeros(30_000, np.uint8)
    arrays = {name: np.empty(shape, float) for name, shape in SHAPES_OF_OUTPUTS.items()}
    arrays["dropout_mask"] = np.empty(SHAPES_OF_OUTPUTS["dropout_mask"], bool)
    one, other = arrays[first], arrays[second]
    end = 64 + one.nbytes
    start = (end - 1) // other.itemsize if overlap else -(-end // other.itemsize)  # aligned
    arrays[first] = memory[64:end].view(one.dtype).reshape(one.shape)
    arrays[second] = memory[start * other.itemsize :][: other.nbytes].view(other.dtype).reshape(other.shape)
    return memory, cattn.AttentionOutput(**arrays)


@pytest.mark.parametrize(("first", "second"), list(itertools.permutations(SHAPES_OF_OUTPUTS, 2)))
def test_outputs_that_share_memory_are_refused(first: str, second: str) -> None:
    """One element of overlap is enough. The error names both; nothing is written."""
    memory, arrays = outputs_in_one_memory(first, second, overlap=True)
    names = [name if name == "out" else f"out\\.{name}" for name in SHAPES_OF_OUTPUTS if name in (first, second)]
    with pytest.raises(ValueError, match=f"^{' and '.join(names)} share memory"):
        cattn.scaled_dot_product_attention(Q, K, V, out=arrays, **ALL_OUTPUTS)
    assert not memory.any()


@pytest.mark.parametrize(("first", "second"), list(itertools.permutations(SHAPES_OF_OUTPUTS, 2)))
def test_outputs_may_be_adjacent_in_memory(first: str, second: str) -> None:
    _, arrays = outputs_in_one_memory(first, second, overlap=False)
    cattn.scaled_dot_product_attention(Q, K, V, out=arrays, **ALL_OUTPUTS)
    expected = cattn.scaled_dot_product_attention(Q, K, V, **ALL_OUTPUTS)
    for name in SHAPES_OF_OUTPUTS:
        assert_same_bits(getattr(arrays, name), getattr(expected, name), name)


def test_outputs_may_be_interleaved_in_memory() -> None:
    """Columns of one array: the output, the weights and the log-sum-exp of a row side by side."""
    memory = np.zeros((2, 3, 17, 8 + 17 + 1))
    arrays = cattn.AttentionOutput(memory[..., :8], memory[..., 8:25], memory[..., 25])
    options = {"return_weights": True, "return_lse": True}
    cattn.scaled_dot_product_attention(Q, K, V, out=arrays, **options)
    expected = cattn.scaled_dot_product_attention(Q, K, V, **options)
    for name in ("out", "weights", "lse"):
        assert_same_bits(np.ascontiguousarray(getattr(arrays, name)), getattr(expected, name), name)


@pytest.mark.parametrize("shape", [(5, 4), (3, 5, 4), (2, 3, 5, 4), (2, 1, 3, 5, 4)])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_results_have_the_documented_shapes_and_dtypes(shape: tuple[int, ...], dtype: type) -> None:
    x = np.ones(shape, dtype)
    value = np.ones((*shape[:-1], 7), dtype)
    result = cattn.scaled_dot_product_attention(
        x, x, value, return_weights=True, return_lse=True, return_dropout_mask=True
    )
    assert result.out.shape == value.shape
    assert result.weights.shape == (*shape[:-1], shape[-2])
    assert result.lse.shape == shape[:-1]
    assert result.dropout_mask.shape == result.weights.shape
    assert {result.out.dtype, result.weights.dtype, result.lse.dtype} == {np.dtype(dtype)}
    assert result.dropout_mask.dtype == bool
    assert result.dropout_mask.all()
    assert result.dropout_seed is None


def test_results_hold_one_nan_and_no_negative_zero() -> None:
    odd = np.array([0xFFC00123], np.uint32).view(np.float32)[0]  # a negative NaN with a payload
    x = np.zeros((40, 3), np.float32)
    x[20] = odd
    out = cattn.causal_attention(x, x, -x)
    assert set(np.unique(out.view(np.uint32)[np.isnan(out)])) == {np.float32(np.nan).view(np.uint32)}
    assert not np.signbit(out[:20]).any()
    scores = cattn.attention_weights(x, x, stage="qk")
    for weights in (cattn.softmax(x), scores, cattn.attention_weights(x[20:21], x, stage="qk")):
        assert set(np.unique(weights.view(np.uint32)[np.isnan(weights)])) == {np.float32(np.nan).view(np.uint32)}


# ---- streaming stores ----------------------------------------------------------------------------------------------
@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("threads", [1, 2])
def test_large_results_are_right_and_nothing_beside_them_is_written(
    dtype: type, normal: Callable[..., np.ndarray], threads: int
) -> None:
    """Causal results larger than 32 MB are written with streaming stores, which must not write beside the rows."""
    heads, n, gap = 40 // np.dtype(dtype).itemsize, 1000, 10
    scores = normal(n, n + 3, dtype=dtype)
    right = cattn.masked_softmax(scores, is_causal=True, query_offset=3)
    for first, step in ((0, 1), (1, 1), (15, 1), (0, 2)):
        memory = np.full((heads * n + 1) * (n + gap) * step, 7, dtype)
        rows = memory[first : first + heads * n * (n + gap) * step].reshape(heads, n, -1)
        out = rows[..., : step * (n + 3) : step]
        with cattn.num_threads(threads):
            cattn.masked_softmax(np.broadcast_to(scores, out.shape), is_causal=True, query_offset=3, out=out)
        assert_same_bits(out, np.broadcast_to(right, out.shape), f"from element {first} on, step {step}")
        out[...] = 7
        assert (memory == 7).all(), "memory beside out was written"


@pytest.mark.usefixtures("isa")
def test_large_results_of_halves_are_right(normal: Callable[..., np.ndarray]) -> None:
    scores = normal(1000, 1003, dtype=np.float16)
    out = np.empty((10, *scores.shape), np.float16)
    cattn.masked_softmax(np.broadcast_to(scores, out.shape), is_causal=True, query_offset=3, out=out)
    assert_same_bits(out, np.broadcast_to(cattn.masked_softmax(scores, is_causal=True, query_offset=3), out.shape))


def test_an_attention_output_with_too_few_fields_is_refused() -> None:
    x = np.zeros((3, 2))
    short = tuple.__new__(cattn.AttentionOutput, (np.empty((3, 2)),))
    with pytest.raises(ValueError, match=r"out must have the 5 fields of a cattn\.AttentionOutput, got 1"):
        cattn.scaled_dot_product_attention(x, x, x, out=short)
