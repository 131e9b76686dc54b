"""Gradients of softmax and dropout: values against the reference and finite differences, bits, halves, errors."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest

import cattn
from support import HALVES, NAN, assert_same_bits, in_contract, table


@pytest.mark.parametrize("method", ["neg_inf", "renormalize"])
def test_softmax_backward_agrees_with_the_reference(
    method: Any, dtype: Any, isa: str, rng: np.random.Generator
) -> None:
    scores, grad_out = (rng.standard_normal((3, 7, 1300)).astype(dtype) for _ in range(2))
    mask = rng.random((7, 1300)) < 0.5
    mask[2] = False
    weights = cattn.masked_softmax(scores, mask, scale=0.7, method=method)
    expected = cattn.reference.softmax_backward(grad_out, weights, scale=0.7)
    grad = cattn.softmax_backward(grad_out, weights, scale=0.7)
    np.testing.assert_allclose(grad, expected, rtol=0, atol=4 * np.finfo(dtype).eps)
    poisoned = np.where(mask, grad_out, np.asarray(NAN, dtype))
    assert_same_bits(cattn.softmax_backward(poisoned, weights, scale=0.7), grad)
    assert (grad[:, ~mask] == 0).all()
    with table("scalar" if in_contract(isa) else isa), cattn.num_threads(2):
        assert_same_bits(cattn.softmax_backward(grad_out, weights, scale=0.7), grad)
    for first in (grad_out, weights):  # out is one of the inputs
        pair = [grad_out.copy(), weights.copy()]
        out = pair[0] if first is grad_out else pair[1]
        assert cattn.softmax_backward(*pair, scale=0.7, out=out) is out
        assert_same_bits(out, grad)
    moved = [np.ascontiguousarray(np.moveaxis(a, -1, 1)) for a in (grad_out, weights)]
    assert_same_bits(np.ascontiguousarray(np.moveaxis(cattn.softmax_backward(*moved, 1, scale=0.7), 1, -1)), grad)
    out = np.empty_like(moved[0])
    assert cattn.softmax_backward(*moved, 1, scale=0.7, out=out) is out
    assert_same_bits(np.ascontiguousarray(np.moveaxis(out, 1, -1)), grad)


@pytest.mark.promise("gradients")
def test_softmax_backward_agrees_with_finite_differences(rng: np.random.Generator) -> None:
    x, grad_out, direction = (rng.standard_normal((4, 9)) for _ in range(3))
    h = 1e-5
    ends = [(cattn.softmax(x + s * h * direction, scale=1.3) * grad_out).sum() for s in (-1, 1)]
    grad = cattn.softmax_backward(grad_out, cattn.softmax(x, scale=1.3), scale=1.3)
    np.testing.assert_allclose((grad * direction).sum(), (ends[1] - ends[0]) / (2 * h), rtol=1e-7)


def test_softmax_backward_refuses_wrong_shapes() -> None:
    with pytest.raises(ValueError, match=r"grad_out has shape \(2, 3\), weights has \(3, 2\)"):
        cattn.softmax_backward(np.ones((2, 3)), np.ones((3, 2)))
    with pytest.raises(ValueError, match="at least 1 dimension"):
        cattn.softmax_backward(1.0, 1.0)
    assert cattn.softmax_backward(np.ones((0, 3)), np.ones((0, 3))).shape == (0, 3)


def test_dropout_backward_agrees_with_the_reference(dtype: Any, rng: np.random.Generator) -> None:
    x = rng.standard_normal((5, 70)).astype(dtype)
    x[0] = NAN
    y, mask = cattn.dropout(x, 0.3, rng=9, return_mask=True)
    for grad in (cattn.dropout_backward(x, 0.3, mask=mask), cattn.dropout_backward(x, 0.3, rng=9)):
        np.testing.assert_allclose(
            grad, cattn.reference.dropout_backward(x, 0.3, mask=mask), rtol=2 * np.finfo(dtype).eps
        )
        np.testing.assert_allclose(grad, y, rtol=2 * np.finfo(dtype).eps)
    again = cattn.reference.dropout_backward(x, 0.3, rng=9)
    np.testing.assert_array_equal(again, cattn.reference.dropout_backward(x, 0.3, mask=mask))
    generator = cattn.TorchGenerator(4)
    before = copy.copy(generator)
    y = cattn.dropout(x, 0.3, rng=generator)
    assert_same_bits(cattn.dropout_backward(x, 0.3, rng=before, out=x), y)
    assert (cattn.dropout_backward(x, 1.0, mask=mask[1]) == 0)[1:].all()


@pytest.mark.parametrize("dtype", [np.float64, np.float16])
def test_dropout_backward_takes_one_number(dtype: type) -> None:
    for mask, expected in ((True, 6.0), (False, 0.0)):
        out = np.empty((), dtype)
        assert cattn.dropout_backward(np.array(3, dtype), 0.5, mask=mask, out=out) is out
        assert out == expected == cattn.dropout_backward(np.array(3, dtype), 0.5, mask=np.array(mask))


@pytest.mark.promise("errors")
def test_dropout_backward_refuses_wrong_arguments(rng: np.random.Generator) -> None:
    x = np.ones(4)
    with pytest.raises(ValueError, match="pass the mask of the forward pass"):
        cattn.dropout_backward(x, 0.5)
    with pytest.raises(ValueError, match="pass the mask of the forward pass"):
        cattn.dropout_backward(x, 0.5, rng=rng)
    with pytest.raises(ValueError, match="either mask or rng"):
        cattn.dropout_backward(x, 0.5, rng=1, mask=[True] * 4)
    for shape in ((2, 4), (3,), (0, 0), (1, 8, 0)):
        with pytest.raises(ValueError, match=r"^mask has shape \(.*, which does not broadcast to grad_out's \(4,\)"):
            cattn.dropout_backward(x, 0.5, mask=np.ones(shape, bool))
    with pytest.raises(ValueError, match=r"p must be in \[0, 1\], got 2"):
        cattn.dropout_backward(x, 2.0, mask=[True] * 4)


@pytest.mark.parametrize("half", ["float16", "bfloat16"])
def test_gradients_of_halves_are_rounded_once(half: str, rng: np.random.Generator) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    kind = np.dtype(np.float16 if half == "float16" else ml_dtypes.bfloat16)
    grad_out, weights = (
        rng.standard_normal((4, 70)).astype(kind),
        cattn.softmax(rng.standard_normal((4, 70))).astype(kind),
    )
    wide = [a.astype(np.float32) for a in (grad_out, weights)]
    expected = cattn.softmax_backward(*wide, 0, scale=0.7).astype(kind)
    out = np.empty_like(grad_out)
    assert cattn.softmax_backward(grad_out, weights, 0, scale=0.7, out=out) is out
    assert_same_bits(out, expected)
    _, mask = cattn.dropout(grad_out, 0.3, rng=1, return_mask=True)
    for grad in (cattn.dropout_backward(grad_out, 0.3, rng=1), cattn.dropout_backward(grad_out, 0.3, mask=mask)):
        assert_same_bits(grad, cattn.dropout_backward(wide[0], 0.3, rng=1).astype(kind))


@pytest.mark.parametrize("shape", [(5, 9), (4, 5, 6), (2, 3, 4, 5), (2, 1, 3, 2, 4)], ids=str)
@pytest.mark.parametrize("half", HALVES, ids=str)
def test_softmax_backward_of_halves_goes_along_any_axis(
    half: np.dtype, shape: tuple[int, ...], rng: np.random.Generator
) -> None:
    """In any number of dimensions: the bits of the float32 call with the axis moved to the end, rounded once."""
    for axis in range(-len(shape), len(shape)):
        grad_out = rng.standard_normal(shape).astype(half)
        weights = cattn.softmax(rng.standard_normal(shape), axis).astype(half)
        last = [np.ascontiguousarray(np.moveaxis(a.astype(np.float32), axis, -1)) for a in (grad_out, weights)]
        expected = np.ascontiguousarray(np.moveaxis(cattn.softmax_backward(*last, scale=0.7), -1, axis)).astype(half)
        assert_same_bits(cattn.softmax_backward(grad_out, weights, axis, scale=0.7), expected, f"axis {axis}")
        out = np.empty_like(grad_out)
        assert cattn.softmax_backward(grad_out, weights, axis, scale=0.7, out=out) is out
        assert_same_bits(out, expected, f"axis {axis}, out")
        reference = cattn.reference.softmax_backward(*last, scale=0.7)
        np.testing.assert_allclose(
            np.moveaxis(expected, axis, -1).astype(np.float64), reference, rtol=2**-7, atol=2**-7
        )


def test_the_gradient_of_one_number_is_an_array() -> None:
    for gradient in (cattn.dropout_backward(2.0, 0.5, mask=True), cattn.dropout_backward(2.0, 0.5, rng=1)):
        assert type(gradient) is np.ndarray
        assert gradient.shape == ()
