"""The axis of masked_softmax: any axis, or several, with every option, has the bits of keys moved to the last axis."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cattn
from cattn import reference
from support import NAN, assert_same_bits, looped

Normal = Callable[..., np.ndarray]
METHODS = ["neg_inf", "renormalize"]
SHAPE = (2, 3, 37, 5)
AXES: list[tuple[tuple[int, ...], Any]] = [
    ((7,), -1),
    ((7,), 0),
    ((7,), None),
    ((7,), (0,)),
    ((30, 40), 0),
    ((30, 40), -2),
    ((30, 40), None),
    ((30, 40), (0, 1)),
    (SHAPE, 0),
    (SHAPE, 1),
    (SHAPE, 2),
    (SHAPE, np.int64(-2)),
    (SHAPE, np.array(3)),
    (SHAPE, (1,)),
    (SHAPE, (-1, 1)),
    (SHAPE, (0, 2)),
    (SHAPE, (3, 0, 1)),
    (SHAPE, None),
    ((2, 3, 1100), 1),
    ((3, 0), 0),
    ((0, 3), 0),
    ((2, 0, 3), (0, 1)),
    ((3, 1, 4), 1),
]


def tuple_of(axis: Any, ndim: int) -> tuple[int, ...]:
    axes = range(ndim) if axis is None else axis if isinstance(axis, tuple) else (int(axis),)
    return tuple(sorted(i % ndim for i in axes))


def keys_last(a: np.ndarray, axis: Any) -> np.ndarray:
    """Return a contiguous array whose last axis has the keys of all axes."""
    axes = tuple_of(axis, a.ndim)
    others = [i for i in range(a.ndim) if i not in axes]
    sizes = [a.shape[i] for i in others]
    return np.ascontiguousarray(a.transpose(*others, *axes)).reshape(*sizes, a.size // max(int(np.prod(sizes)), 1))


def options_for(ndim: int, axis: Any) -> list[dict[str, Any]]:
    """Return combinations of options; those with positions need an axis for the queries."""
    options: list[dict[str, Any]] = [{}, {"scale": -2.5}]
    queries = ndim - len(tuple_of(axis, ndim))
    if queries:
        options += [{"is_causal": "upper_left"}, {"is_causal": "lower_right", "scale": 0.5}]
        options += [{"is_causal": True, "query_offset": 3}, {"is_causal": True, "query_offset": -2}]
    return options


@pytest.mark.parametrize("method", METHODS)
@looped("shape, axis", AXES, ids=str)
def test_any_axes_agree_with_the_reference_and_have_the_bits_of_the_last_axis(
    isa: str, dtype: type, normal: Normal, rng: np.random.Generator, shape: tuple[int, ...], axis: Any, method: str
) -> None:
    scores, mask = 3 * normal(*shape, dtype=dtype), rng.random(shape) < 0.7
    for keywords in options_for(len(shape), axis):
        for given in (None, mask):
            call: dict[str, Any] = {**keywords, "method": method}
            weights = cattn.masked_softmax(scores, given, axis=axis, **call)
            assert weights.dtype == dtype
            right = reference.masked_softmax(scores, given, axis=axis, **call)
            np.testing.assert_allclose(weights, right, rtol=100 * np.finfo(dtype).eps, atol=1e-37)
            moved_mask = None if given is None else keys_last(given, axis)
            last = cattn.masked_softmax(keys_last(scores, axis), moved_mask, **call)
            assert_same_bits(keys_last(weights, axis), last)
            out = np.full(shape, NAN, dtype)
            assert cattn.masked_softmax(scores, given, axis=axis, out=out, **call) is out
            assert_same_bits(out, weights)


@pytest.mark.parametrize("half", [np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("axis", [0, 1, (0, 2), None])
def test_halves_are_rounded_once(normal: Normal, rng: np.random.Generator, half: Any, axis: Any) -> None:
    scores, mask = normal(4, 30, 6).astype(half), rng.random((4, 30, 6)) < 0.7
    keywords: dict[str, Any] = {} if axis is None else {"is_causal": "lower_right"}
    for method in METHODS:
        weights = cattn.masked_softmax(scores, mask, axis=axis, method=method, **keywords)
        wide = cattn.masked_softmax(scores.astype(np.float32), mask, axis=axis, method=method, **keywords)
        assert_same_bits(weights, wide.astype(half))


def test_queries_are_on_the_last_of_the_other_axes(dtype: type, normal: Normal) -> None:
    """Their offsets, one for each batch entry, belong to the axes before them."""
    scores, offsets = normal(3, 20, 5, dtype=dtype), np.array([0, 4, 11])
    for axis, order in ((1, (0, 2, 1)), (2, (0, 1, 2))):
        weights = cattn.masked_softmax(scores, axis=axis, is_causal=True, query_offset=offsets)
        visible = np.arange(scores.shape[axis]) <= np.arange(scores.shape[3 - axis])[:, None] + offsets[:, None, None]
        assert ((weights.transpose(order) > 0) == visible).all()
    first = cattn.masked_softmax(scores, axis=0, is_causal=True, query_offset=np.arange(20))
    assert_same_bits(
        first,
        cattn.masked_softmax(np.moveaxis(scores, 0, -1), is_causal=True, query_offset=np.arange(20)).transpose(2, 0, 1),
    )
    with pytest.raises(ValueError, match=r"query_offset has shape \(3,\), which does not broadcast .*\(20,\)"):
        cattn.masked_softmax(scores, axis=0, is_causal=True, query_offset=offsets)


def test_masks_broadcast_in_the_layout_of_the_scores(dtype: type, normal: Normal, rng: np.random.Generator) -> None:
    scores = normal(2, 3, 20, dtype=dtype)
    for shape in ((20,), (3, 1), (2, 1, 20), (1, 1, 1), ()):
        mask = np.asarray(rng.random(shape) < 0.5)  # a single number is taken for a flag
        for axis in (-1, 1, 0, (0, 2), None):
            assert_same_bits(
                cattn.masked_softmax(scores, mask, axis=axis),
                cattn.masked_softmax(scores, np.broadcast_to(mask, scores.shape).copy(), axis=axis),
            )


@pytest.mark.parametrize("threads", [1, 3])
def test_any_strides_and_threads_give_the_same_bits(dtype: type, normal: Normal, threads: int) -> None:
    scores = normal(40, 200, 30, dtype=dtype)
    want = cattn.masked_softmax(np.ascontiguousarray(np.moveaxis(scores, 1, -1)), is_causal="lower_right")
    with cattn.num_threads(threads):
        for view in (scores, np.asfortranarray(scores), np.ascontiguousarray(scores[:, ::-1])[:, ::-1]):
            weights = cattn.masked_softmax(view, axis=1, is_causal="lower_right")
            assert_same_bits(np.moveaxis(weights, 1, -1), want)
        in_place = scores.copy()
        assert cattn.masked_softmax(in_place, axis=1, is_causal="lower_right", out=in_place) is in_place
        assert_same_bits(np.moveaxis(in_place, 1, -1), want)


def test_the_gradient_has_the_same_axis(dtype: type, normal: Normal) -> None:
    scores, grad = normal(6, 9, dtype=dtype), normal(6, 9, dtype=dtype)
    weights = cattn.masked_softmax(scores, axis=0, is_causal="lower_right")
    gradient = cattn.softmax_backward(grad, weights, axis=0)
    turned = cattn.softmax_backward(grad.T.copy(), cattn.masked_softmax(scores.T.copy(), is_causal="lower_right"))
    assert_same_bits(gradient, turned.T)


@pytest.mark.promise("errors")
@pytest.mark.parametrize(
    ("axis", "error", "says"),
    [
        (3, ValueError, "axis 3 is out of bounds for scores with 3 dimensions"),
        (-4, ValueError, "axis -4 is out of bounds for scores with 3 dimensions"),
        (10**30, ValueError, "is out of bounds for scores with 3 dimensions"),
        ((0, 3), ValueError, "axis 3 is out of bounds for scores with 3 dimensions"),
        ((0, 0), ValueError, "axis must name at least one axis, and each once"),
        ((), ValueError, "axis must name at least one axis, and each once"),
        (True, TypeError, "axis must be an int, a tuple of ints or None, got True"),
        (1.0, TypeError, "axis must be an int, a tuple of ints or None, got 1.0"),
        ("x", TypeError, "axis must be an int, a tuple of ints or None, got 'x'"),
    ],
)
def test_a_wrong_axis_is_refused(axis: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        cattn.masked_softmax(np.ones((2, 3, 4)), axis=axis)


def test_an_axis_that_leaves_no_queries_cannot_be_causal() -> None:
    for scores, axis in ((np.ones(3), 0), (np.ones((2, 3)), None), (np.ones((2, 3)), (0, 1))):
        with pytest.raises(ValueError, match=r"scores must have at least 2 dimensions .* with is_causal, got 1"):
            cattn.masked_softmax(scores, axis=axis, is_causal="upper_left")
    with pytest.raises(ValueError, match="scores must have at least 1 dimension"):
        cattn.masked_softmax(3.0, axis=None)
    with pytest.raises(ValueError, match=r"mask has shape \(5,\), which does not broadcast to the scores' shape"):
        cattn.masked_softmax(np.ones((2, 3)), np.ones(5, bool), axis=(0, 1))


def test_an_ambiguous_alignment_warns_along_any_axis() -> None:
    square, wide = np.ones((3, 4, 4)), np.ones((3, 4, 5))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cattn.masked_softmax(square, axis=1, is_causal=True)
    for axis in (1, 0):
        with pytest.warns(cattn.CausalAlignmentWarning) as warned:
            cattn.masked_softmax(wide, axis=axis, is_causal=True)
        assert warned[0].filename == __file__
