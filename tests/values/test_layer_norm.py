"""Layer norm and its gradients: values, rows far from 0, bits, halves, special numbers, errors of the gradient."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

import cattn
from cattn import reference
from cattn.functional import layer_norm, layer_norm_backward
from support import HALVES, INF, NAN, assert_same_bits, sum_by_law, table

# Numbers of columns around vectors of 4 to 16 lanes, 8 chains of a sum, and runs of 512 columns.
COLUMNS = [1, 2, 7, 8, 9, 16, 17, 33, 100, 511, 513, 1100]


def check_gradients(actual: Any, right: Any, atol: float) -> None:
    for a, r in zip(actual, right, strict=True):
        if r is None:
            assert a is None
        else:
            np.testing.assert_allclose(a, r, rtol=0, atol=atol)


# ---- values ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("n", COLUMNS)
def test_layer_norm_and_its_gradients_agree_with_the_reference(
    isa: str, dtype: type, n: int, rng: np.random.Generator
) -> None:
    x, g = (3 * rng.standard_normal((2, 2, 70, n))).astype(dtype)
    weight, bias = rng.standard_normal((2, n)).astype(dtype)
    eps = np.finfo(dtype).eps
    for w, b in itertools.product((None, weight), (None, bias)):
        actual = layer_norm(x, w, b, 1e-3)
        assert actual.dtype == dtype
        far = np.abs(x).max() / np.sqrt(x.var(-1).min() + 1e-3)  # of two columns that are nearly the same
        np.testing.assert_allclose(actual, reference.layer_norm(x, w, b, 1e-3), rtol=0, atol=(40 + 4 * far) * eps)
    for w in (None, weight):
        gradients = layer_norm_backward(g, x, w, 1e-3)
        assert all(a is None or a.dtype == dtype for a in gradients)
        terms = 10 * np.abs(g).max() / np.sqrt(x.var(-1).min() + 1e-3)  # which may cancel, for two columns nearly whole
        check_gradients(gradients, reference.layer_norm_backward(g, x, w, 1e-3), 20 * eps * terms)


@pytest.mark.promise("rotary positions' bits")
@pytest.mark.parametrize("n", [*COLUMNS, 140_003])  # kernels look at a stop every 65,536 columns
def test_the_bits_follow_from_the_order_of_the_sums(isa: str, dtype: type, n: int, rng: np.random.Generator) -> None:
    x = (rng.standard_normal((3, n)) + np.array([[0], [100], [-0.01]])).astype(dtype)
    weight, bias = rng.standard_normal((2, n)).astype(dtype)
    expected = np.empty_like(x)
    for row in range(3):
        differences = x[row] - sum_by_law(x[row]) / dtype(n)
        rest = sum_by_law(differences) / dtype(n)
        variance = max(sum_by_law(differences * differences) / dtype(n) - rest * rest, dtype(0))
        factor = dtype(1) / np.sqrt(variance + dtype(1e-5))
        expected[row] = (differences - rest) * factor * weight + bias
    assert_same_bits(layer_norm(x, weight, bias), expected)


def test_a_row_far_from_zero_keeps_its_digits(isa: str, dtype: type, rng: np.random.Generator) -> None:
    """The mean of such a row is rounded: PyTorch's result is wrong by 2e-3 in float32."""
    far, eps = 1e4 if dtype is np.float32 else 1e12, np.finfo(dtype).eps
    x = (rng.standard_normal((20, 768)) + far).astype(dtype)
    shifted = x - dtype(far)  # exact: Sterbenz
    right = reference.layer_norm(shifted)
    np.testing.assert_allclose(layer_norm(x), right, rtol=0, atol=60 * eps)
    assert np.abs(layer_norm(np.full((1, 768), far, dtype) * dtype(1.1))).max() < 1e-4, "a constant row"


def test_torch_computes_the_same(rng: np.random.Generator) -> None:
    torch = pytest.importorskip("torch")
    x, g = rng.standard_normal((2, 3, 4, 33))
    weight, bias = rng.standard_normal((2, 33))
    tensors = [torch.tensor(a, requires_grad=True) for a in (x, weight, bias)]
    y = torch.nn.functional.layer_norm(tensors[0], (33,), tensors[1], tensors[2], 1e-6)
    y.backward(torch.tensor(g))
    np.testing.assert_allclose(layer_norm(x, weight, bias, 1e-6), y.detach().numpy(), rtol=1e-12, atol=1e-14)
    for actual, tensor in zip(layer_norm_backward(g, x, weight, 1e-6), tensors, strict=True):
        np.testing.assert_allclose(actual, tensor.grad.numpy(), rtol=1e-12, atol=1e-13)


@pytest.mark.promise("gradients")
def test_gradients_agree_with_finite_differences(rng: np.random.Generator) -> None:
    x, g, direction = rng.standard_normal((3, 4, 9))
    weight, turn, bias, shift = rng.standard_normal((4, 9))
    h = 1e-5
    ends = [
        (layer_norm(x + s * h * direction, weight + s * h * turn, bias + s * h * shift, 0.1) * g).sum() for s in (-1, 1)
    ]
    grad_x, grad_weight, grad_bias = layer_norm_backward(g, x, weight, 0.1)
    assert grad_weight is not None
    slope = (grad_x * direction).sum() + (grad_weight * turn).sum() + (grad_bias * shift).sum()
    np.testing.assert_allclose(slope, (ends[1] - ends[0]) / (2 * h), rtol=1e-8)


@pytest.mark.promise("rotary positions' bits")
def test_the_gradient_of_the_bias_is_summed_in_blocks(dtype: type, rng: np.random.Generator) -> None:
    """Rows are added in blocks of 64, the blocks in float64."""
    g, x = rng.standard_normal((2, 300, 5)).astype(dtype)
    total = np.zeros(5)
    for start in range(0, 300, 64):
        block = np.zeros(5, dtype)
        for row in g[start : start + 64]:
            block += row
        total += block
    assert_same_bits(layer_norm_backward(g, x)[2], total.astype(dtype))


# ---- bits ------------------------------------------------------------------------------------------------------------
@pytest.mark.promise("rotary positions' bits")
def test_tables_threads_strides_and_the_batch_change_no_bit(isa: str, dtype: type, rng: np.random.Generator) -> None:
    x, g = rng.standard_normal((2, 3, 170, 77)).astype(dtype)
    weight, bias = rng.standard_normal((2, 77)).astype(dtype)
    with cattn.num_threads(1), table("scalar"):
        expected, gradients = layer_norm(x, weight, bias), layer_norm_backward(g, x, weight)
    for threads in (1, 2, 5):
        with cattn.num_threads(threads):
            assert_same_bits(layer_norm(x, weight, bias), expected)
            for actual, right in zip(layer_norm_backward(g, x, weight), gradients, strict=True):
                assert actual is not None
                assert right is not None
                assert_same_bits(actual, right)
    assert_same_bits(layer_norm(x[1, 100], weight, bias), expected[1, 100], "one row alone")
    for view in (
        np.asfortranarray(x),
        np.ascontiguousarray(x[..., ::-1])[..., ::-1],
        np.repeat(x, 2, axis=-1)[..., ::2],
        np.ascontiguousarray(x.swapaxes(0, 1)).swapaxes(0, 1),
    ):
        strided = [np.repeat(a, 3)[::3] for a in (weight, bias)]
        assert_same_bits(layer_norm(view, *strided), expected)
        out = np.empty_like(view)
        assert layer_norm(view, *strided, out=out) is out
        assert_same_bits(np.ascontiguousarray(out), expected)
        for actual, right in zip(layer_norm_backward(g, view, strided[0]), gradients, strict=True):
            assert actual is not None
            assert right is not None
            assert_same_bits(actual, right)


@pytest.mark.promise("halves")
@pytest.mark.parametrize("half", HALVES, ids=str)
def test_halves_are_computed_in_float32_and_rounded_once(isa: str, half: np.dtype, rng: np.random.Generator) -> None:
    x, g = rng.standard_normal((2, 3, 40, 50)).astype(half)
    weight, bias = rng.standard_normal((2, 50)).astype(half)
    wide = [a.astype(np.float32) for a in (x, weight, bias)]
    for view in (x, np.asfortranarray(x)):
        assert_same_bits(layer_norm(view, weight, bias), layer_norm(*wide).astype(half))
        gradients = layer_norm_backward(g.astype(np.float32), *wide[:2])
        for actual, right in zip(layer_norm_backward(g, view, weight), gradients, strict=True):
            assert actual is not None
            assert right is not None
            assert_same_bits(actual, right.astype(half))
    assert layer_norm(x, None, wide[2]).dtype == np.float32, "as NumPy promotes"


@pytest.mark.promise("out")
def test_out_may_overlap_an_input(rng: np.random.Generator) -> None:
    for step, shift in itertools.product((1, -1), (0, 1, 5, -3)):
        memory = rng.standard_normal(400)
        x, weight, bias = memory[100:244].reshape(12, 12), memory[94:106], memory[240:252]
        out = memory[100 + shift : 244 + shift][::step].reshape(12, 12)
        expected = layer_norm(x.copy(), weight.copy(), bias.copy())
        assert layer_norm(x, weight, bias, out=out) is out
        np.testing.assert_array_equal(out, expected)


# ---- special numbers, shapes, errors ---------------------------------------------------------------------------------
def test_special_numbers_go_as_in_arithmetic(isa: str, dtype: type) -> None:
    huge = np.finfo(dtype).max
    x = np.array([[NAN, 1, 2], [INF, 1, 2], [huge, huge, 2], [0, 0, 0], [3, 4, 5]], dtype)
    y = layer_norm(x)
    assert np.isnan(y[:3]).all()
    np.testing.assert_array_equal(y[3], 0)
    np.testing.assert_allclose(y[4], [-np.sqrt(1.5), 0, np.sqrt(1.5)], rtol=1e-5)
    assert np.isnan(layer_norm(x[3], eps=0.0)).all(), "0 / 0"
    assert all(a is not None and np.isnan(a).all() for a in layer_norm_backward(x, x, np.ones(3, dtype))[1:2])


@pytest.mark.parametrize("shape", [(0,), (0, 4), (3, 0), (0, 0), (2, 0, 4)], ids=str)
def test_empty_arrays_keep_their_shape(shape: tuple[int, ...]) -> None:
    x, weight = np.ones(shape), np.ones(shape[-1])
    assert layer_norm(x, weight, weight).shape == shape
    grad_x, grad_weight, grad_bias = layer_norm_backward(x, x, weight)
    assert grad_x.shape == shape
    for gradient in (grad_weight, grad_bias):
        np.testing.assert_array_equal(gradient, np.zeros(shape[-1]))
    assert layer_norm_backward(x, x)[1] is None


@pytest.mark.promise("errors")
def test_layer_norm_backward_refuses_wrong_arguments() -> None:
    x = np.ones((2, 3))
    wrong: list[tuple[type[Exception], str, tuple[Any, ...]]] = [
        (ValueError, r"grad_out has shape \(3, 2\), x has \(2, 3\)", (x.T, x)),
        (ValueError, r"weight must have one number for each column of x, shape \(3,\), got shape", (x, x, [1, 1])),
        (ValueError, r"x must have at least 1 dimension \(\.\.\., D\), got 0", (1.0, 1.0)),
        (ValueError, "eps must not be negative, got -1", (x, x, None, -1)),
        (TypeError, "x must be an array of real numbers, got NoneType", (x, None)),
        (
            TypeError,
            "grad_out, x and weight mix float16 and bfloat16",
            (x.astype(np.float16), x.astype(HALVES[1]), np.ones(3, np.float16)),
        ),
    ]
    for error, says, arguments in wrong:
        with pytest.raises(error, match=f"^{says}"):
            layer_norm_backward(*arguments)
    half = x.astype(np.float16)
    with pytest.raises(ValueError, match=r"^bias must have one number for each column of x, .*, got shape \(2,"):
        layer_norm(x, None, [1, 1])
    with pytest.raises(TypeError, match=r"^bias has dtype complex128"):
        layer_norm(x, None, [1j] * 3)
    with pytest.raises(TypeError, match=r"^x, weight and bias mix float16 and bfloat16, which have no common dtype"):
        layer_norm(half, None, np.ones(3, HALVES[1]))
    with pytest.raises(TypeError, match=r"^x must be float32 or float64: cattn\.layer_norm_backward widens halves"):
        cattn._cattn.layer_norm_backward(half, half, None, 1e-5)
