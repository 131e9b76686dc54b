"""RMS norm and its gradients: values, bits, halves, strides, finite differences, special numbers, errors."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import cattn
from cattn import reference
from support import HALVES, INF, NAN, assert_same_bits, floating_point_mode, sum_by_law, table

# Numbers of columns around vectors of 4 to 16 lanes, 8 chains of a sum, and runs of 512 columns.
COLUMNS = [1, 2, 3, 5, 7, 8, 9, 15, 16, 17, 31, 33, 64, 100, 511, 512, 513, 1024, 1100]


# ---- values ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("n", COLUMNS)
def test_rms_norm_agrees_with_the_reference(isa: str, dtype: type, n: int, rng: np.random.Generator) -> None:
    x, weight = (3 * rng.standard_normal((2, 5, n))).astype(dtype), rng.standard_normal(n).astype(dtype)
    for w, eps in itertools.product((None, weight), (1e-6, 0.0, 0.5)):
        actual = cattn.rms_norm(x, w, eps)
        assert actual.dtype == dtype
        np.testing.assert_allclose(actual, reference.rms_norm(x, w, eps), rtol=16 * np.finfo(dtype).eps, atol=0)


@pytest.mark.promise("rotary positions' bits")
@pytest.mark.parametrize("n", [*COLUMNS, 140_003])  # kernels look at a stop every 65,536 columns
def test_the_bits_follow_from_the_order_of_the_sums(isa: str, dtype: type, n: int, rng: np.random.Generator) -> None:
    x, weight = rng.standard_normal((3, n)).astype(dtype), rng.standard_normal(n).astype(dtype)
    one, eps = dtype(1), dtype(1e-6)
    expected = np.empty_like(x)
    for row in range(3):
        factor = one / np.sqrt(sum_by_law(x[row] * x[row]) / dtype(n) + eps)
        expected[row] = x[row] * factor * weight
    assert_same_bits(cattn.rms_norm(x, weight), expected)


def test_torch_computes_the_same(rng: np.random.Generator) -> None:
    torch = pytest.importorskip("torch")
    x, weight, g = rng.standard_normal((3, 4, 33)), rng.standard_normal(33), rng.standard_normal((3, 4, 33))
    tensors = [torch.tensor(a, requires_grad=True) for a in (x, weight)]
    y = torch.nn.functional.rms_norm(tensors[0], (33,), tensors[1], 1e-6)
    y.backward(torch.tensor(g))
    np.testing.assert_allclose(cattn.rms_norm(x, weight), y.detach().numpy(), rtol=1e-13)
    for actual, tensor in zip(cattn.rms_norm_backward(g, x, weight), tensors, strict=True):
        np.testing.assert_allclose(actual, tensor.grad.numpy(), rtol=1e-12, atol=1e-14)


# ---- gradients -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("shape", [(5,), (1, 1), (3, 40), (2, 70, 17), (3, 3, 50, 16), (200, 513)], ids=str)
def test_gradients_agree_with_the_reference(
    isa: str, dtype: type, shape: tuple[int, ...], rng: np.random.Generator
) -> None:
    g, x = rng.standard_normal((2, *shape)).astype(dtype)
    weight = rng.standard_normal(shape[-1]).astype(dtype)
    for w in (None, weight):
        grad_x, grad_weight = cattn.rms_norm_backward(g, x, w, 1e-3)
        right_x, right_weight = reference.rms_norm_backward(g, x, w, 1e-3)
        eps = np.finfo(dtype).eps
        # the two terms of the gradient may cancel, in a row of one column nearly whole
        term = np.abs(g if w is None else g * w) / np.sqrt((x * x).mean(-1, keepdims=True))
        np.testing.assert_allclose(grad_x, right_x, rtol=0, atol=32 * eps * term.max())
        assert grad_x.dtype == dtype
        if right_weight is None:
            assert grad_weight is None
            continue
        assert grad_weight is not None
        assert grad_weight.dtype == dtype
        np.testing.assert_allclose(grad_weight, right_weight, rtol=0, atol=64 * eps * np.abs(right_weight).max())


@pytest.mark.promise("gradients")
def test_gradients_agree_with_finite_differences(rng: np.random.Generator) -> None:
    x, g, direction = rng.standard_normal((3, 4, 9))
    weight, turn = rng.standard_normal((2, 9))
    h = 1e-5
    ends = [(cattn.rms_norm(x + s * h * direction, weight + s * h * turn, 0.1) * g).sum() for s in (-1, 1)]
    grad_x, grad_weight = cattn.rms_norm_backward(g, x, weight, 0.1)
    assert grad_weight is not None
    slope = (grad_x * direction).sum() + (grad_weight * turn).sum()
    np.testing.assert_allclose(slope, (ends[1] - ends[0]) / (2 * h), rtol=1e-8)


@pytest.mark.promise("rotary positions' bits")
def test_the_bits_of_the_gradient_of_the_weight_follow_from_its_blocks(dtype: type, rng: np.random.Generator) -> None:
    """Rows are added in blocks of 64, the blocks in float64."""
    g, x = rng.standard_normal((2, 300, 5)).astype(dtype)
    factor = np.stack([dtype(1) / np.sqrt(sum_by_law(row * row) / dtype(5) + dtype(1e-6)) for row in x])[:, None]
    terms = g * (x * factor)
    total = np.zeros(5)
    for start in range(0, 300, 64):
        block = np.zeros(5, dtype)
        for row in terms[start : start + 64]:
            block += row
        total += block
    _, grad_weight = cattn.rms_norm_backward(g, x, np.ones(5, dtype))
    assert grad_weight is not None
    assert_same_bits(grad_weight, total.astype(dtype))


# ---- bits ------------------------------------------------------------------------------------------------------------
@pytest.mark.promise("rotary positions' bits")
def test_tables_threads_strides_and_the_batch_change_no_bit(isa: str, dtype: type, rng: np.random.Generator) -> None:
    x, g = rng.standard_normal((2, 3, 170, 77)).astype(dtype)
    weight = rng.standard_normal(77).astype(dtype)
    with cattn.num_threads(1), table("scalar"):
        expected, (grad_x, grad_weight) = cattn.rms_norm(x, weight), cattn.rms_norm_backward(g, x, weight)
    for threads in (1, 2, 5):
        with cattn.num_threads(threads):
            assert_same_bits(cattn.rms_norm(x, weight), expected)
            for actual, right in zip(cattn.rms_norm_backward(g, x, weight), (grad_x, grad_weight), strict=True):
                assert actual is not None
                assert right is not None
                assert_same_bits(actual, right)
    assert_same_bits(cattn.rms_norm(x[1, 100], weight), expected[1, 100], "one row alone")
    strided = np.repeat(weight, 3)[::3]
    for view in (
        np.asfortranarray(x),
        np.ascontiguousarray(x[..., ::-1])[..., ::-1],
        np.repeat(x, 2, axis=-1)[..., ::2],
        np.ascontiguousarray(x.swapaxes(0, 1)).swapaxes(0, 1),
    ):
        assert_same_bits(cattn.rms_norm(view, strided), expected)
        out = np.empty_like(view)
        assert cattn.rms_norm(view, strided, out=out) is out
        assert_same_bits(np.ascontiguousarray(out), expected)
        assert_same_bits(cattn.rms_norm_backward(g, view, strided)[0], grad_x)


@pytest.mark.promise("halves")
@pytest.mark.parametrize("half", HALVES, ids=str)
def test_halves_are_computed_in_float32_and_rounded_once(isa: str, half: np.dtype, rng: np.random.Generator) -> None:
    x, g = rng.standard_normal((2, 3, 40, 50)).astype(half)
    weight = rng.standard_normal(50).astype(half)
    wide = [a.astype(np.float32) for a in (g, x, weight)]
    for view in (x, np.asfortranarray(x)):
        assert_same_bits(cattn.rms_norm(view, weight), cattn.rms_norm(wide[1], wide[2]).astype(half))
        assert_same_bits(cattn.rms_norm(view), cattn.rms_norm(wide[1]).astype(half))
        for actual, right in zip(cattn.rms_norm_backward(g, view, weight), cattn.rms_norm_backward(*wide), strict=True):
            assert actual is not None
            assert right is not None
            assert_same_bits(actual, right.astype(half))
    assert cattn.rms_norm(x, wide[2]).dtype == np.float32, "as NumPy promotes"


def test_other_dtypes_are_promoted_as_numpy_does(rng: np.random.Generator) -> None:
    x = rng.standard_normal((3, 4)).astype(np.float32)
    weight = rng.standard_normal(4)
    assert_same_bits(cattn.rms_norm(x, weight), cattn.rms_norm(x.astype(np.float64), weight))
    assert_same_bits(cattn.rms_norm([[3, 4]], [1, 2]), cattn.rms_norm(np.array([[3.0, 4.0]]), np.array([1.0, 2.0])))


@pytest.mark.promise("out")
def test_out_may_overlap_x_or_the_weight(isa: str, rng: np.random.Generator) -> None:
    for step, shift in itertools.product((1, -1), (0, 1, 5, -3)):
        memory = rng.standard_normal(400)
        x, weight = memory[100:244].reshape(12, 12), memory[94:106]
        out = memory[100 + shift : 244 + shift][::step].reshape(12, 12)
        expected = cattn.rms_norm(x.copy(), weight.copy())
        assert cattn.rms_norm(x, weight, out=out) is out
        np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize("mode", ["down", "up", "to zero", "flush"])
def test_the_mode_of_the_caller_changes_no_bit(mode: str, rng: np.random.Generator) -> None:
    x, g = rng.standard_normal((2, 300, 16)).astype(np.float32)
    weight = rng.standard_normal(16).astype(np.float32)

    def compute() -> list[Any]:
        halves = [a.astype(np.float16) for a in (g, x, weight)]
        return [cattn.rms_norm(x, weight), *cattn.rms_norm_backward(g, x, weight), *cattn.rms_norm_backward(*halves)]

    expected = compute()
    with floating_point_mode(mode):
        actual = compute()
    for a, b in zip(actual, expected, strict=True):
        assert_same_bits(a, b)


# ---- special numbers, shapes -----------------------------------------------------------------------------------------
def test_special_numbers_go_as_in_arithmetic(isa: str, dtype: type) -> None:
    tiny, huge = np.finfo(dtype).smallest_subnormal, np.finfo(dtype).max
    x = np.array([[NAN, 1, 2], [INF, 1, 2], [huge, 1, 2], [0, 0, 0], [tiny, 0, 0], [3, 4, 0]], dtype)
    y = cattn.rms_norm(x)
    assert np.isnan(y[0]).all()
    np.testing.assert_array_equal(y[1], [NAN, 0, 0])
    np.testing.assert_array_equal(y[2:4], 0)
    np.testing.assert_allclose(y[4, 0] / tiny, 1000, rtol=1e-6)
    np.testing.assert_allclose(y[5], np.array([3, 4, 0]) / np.sqrt(25 / 3), rtol=1e-5)
    assert np.isnan(cattn.rms_norm(x[3], eps=0.0)).all(), "0 / 0"
    _, grad_weight = cattn.rms_norm_backward(np.ones_like(x), x, np.ones(3, dtype))
    assert grad_weight is not None
    assert np.isnan(grad_weight).all()


@pytest.mark.parametrize("shape", [(0,), (0, 4), (3, 0), (0, 0), (2, 0, 4)], ids=str)
def test_empty_arrays_keep_their_shape(shape: tuple[int, ...]) -> None:
    x, weight = np.ones(shape), np.ones(shape[-1])
    assert cattn.rms_norm(x, weight).shape == shape
    grad_x, grad_weight = cattn.rms_norm_backward(x, x, weight)
    assert grad_x.shape == shape
    assert grad_weight is not None
    np.testing.assert_array_equal(grad_weight, np.zeros(shape[-1]))
    assert cattn.rms_norm_backward(x, x)[1] is None


@given(
    st.lists(st.integers(1, 4), max_size=3),
    st.integers(1, 600),
    st.integers(0, 2**32),
    st.sampled_from(["f4", "f8"]),
    st.sampled_from([1, -1, 2]),
    st.integers(1, 4),
)
def test_any_call_agrees_with_the_reference_and_the_scalar_table(
    lead: list[int], n: int, seed: int, kind: str, step: int, threads: int
) -> None:
    rng = np.random.default_rng(seed)
    g, x = rng.standard_normal((2, *lead, n * abs(step))).astype(kind)[..., ::step]
    weight = rng.standard_normal(n).astype(kind) if seed % 3 else None
    with cattn.num_threads(threads):
        results = [cattn.rms_norm(x, weight), *cattn.rms_norm_backward(g, x, weight)]
    right = [reference.rms_norm(x, weight), *reference.rms_norm_backward(g, x, weight)]
    with table("scalar"):
        scalar = [cattn.rms_norm(x, weight), *cattn.rms_norm_backward(g, x, weight)]
    for actual, expected, same in zip(results, right, scalar, strict=True):
        if weight is None and expected is None:
            assert actual is None
            continue
        assert actual is not None
        assert expected is not None
        assert same is not None
        assert_same_bits(actual, same)
        scale = 1 + np.abs(expected).max()
        np.testing.assert_allclose(actual, expected, rtol=0, atol=400 * np.finfo(kind).eps * scale)


# ---- errors of the gradient; rms_norm is in wrong_calls.py -----------------------------------------------------------
@pytest.mark.promise("errors")
def test_rms_norm_backward_refuses_wrong_arguments() -> None:
    x = np.ones((2, 3))
    wrong: list[tuple[type[Exception], str, tuple[Any, ...]]] = [
        (ValueError, r"grad_out has shape \(3, 2\), x has \(2, 3\)", (x.T, x)),
        (
            ValueError,
            r"weight must have one number for each column of x, shape \(3,\), got shape \(2,\)",
            (x, x, [1, 1]),
        ),
        (ValueError, r"weight must have one number .*, got shape \(1, 3\)", (x, x, np.ones((1, 3)))),
        (ValueError, r"x must have at least 1 dimension \(\.\.\., D\), got 0", (1.0, 1.0)),
        (ValueError, "eps must not be negative, got -1", (x, x, None, -1)),
        (ValueError, "eps must be finite, got nan", (x, x, None, NAN)),
        (TypeError, "eps must be a real number, got NoneType", (x, x, None, None)),
        (TypeError, "x must be an array of real numbers, got NoneType", (x, None)),
        (TypeError, "grad_out must be an array of real numbers, got NoneType", (None, x)),
        (TypeError, "weight has dtype complex128", (x, x, [1j] * 3)),
        (
            TypeError,
            "grad_out, x and weight mix float16 and bfloat16",
            (x.astype(np.float16), x.astype(HALVES[1]), np.ones(3, np.float16)),
        ),
    ]
    for error, says, arguments in wrong:
        with pytest.raises(error, match=f"^{says}"):
            cattn.rms_norm_backward(*arguments)


def test_the_c_function_of_rms_norm_backward_refuses_halves() -> None:
    half = np.ones((2, 3), np.float16)
    with pytest.raises(TypeError, match=r"^x must be float32 or float64: cattn\.rms_norm_backward widens halves"):
        cattn._cattn.rms_norm_backward(half, half, None, 1e-6)
