"""The log-sum-exp: in float64 for float32 and halves, its gradient, and a float32 output of halves."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cattn
from cattn import reference
from support import HALVES, INF, NAN, assert_same_bits, quiet, widened
from support.derivatives import FIELDS, backward, forward, options, qkv, random_gradients

NARROW = [np.dtype(np.float32), *HALVES]
Call = dict[str, Any]


def inputs(dtype: np.dtype, *shapes: tuple[int, ...], seed: int = 0) -> Call:
    rng = np.random.default_rng(seed)
    names = ("query", "key", "value")
    return {name: quiet(rng.standard_normal(s), dtype) for name, s in zip(names, shapes, strict=True)}


def attend(call: Call, lse: np.ndarray | None = None) -> cattn.AttentionOutput:
    """Attend, with the log-sum-exp written to `lse`."""
    result: cattn.AttentionOutput = cattn.scaled_dot_product_attention(
        **call, return_lse=True, out=cattn.AttentionOutput(lse=lse)
    )
    assert lse is None or result.lse is lse
    return result


def differentiate(call: Call, result: cattn.AttentionOutput, grad_out: np.ndarray | None = None) -> tuple[Any, ...]:
    grad_out = np.ones_like(result.out) if grad_out is None else grad_out
    grads = cattn.attention_backward(grad_out, out=result.out, lse=result.lse, merged=True, **call)
    return tuple(grad for grad in grads if grad is not None)


def assert_same(actual: tuple[Any, ...], expected: tuple[Any, ...]) -> None:
    for a, b in zip(actual, expected, strict=True):
        assert_same_bits(a, b)


# ---- the forward pass ----------------------------------------------------------------------------------------------
@pytest.mark.promise("log-sum-exp in float64")
@pytest.mark.parametrize("kind", NARROW, ids=str)
def test_a_float64_lse_is_more_accurate_and_changes_nothing_else(kind: np.dtype, isa: str, path: str) -> None:
    call = inputs(kind, (2, 3, 50, 20), (2, 3, 60, 20), (2, 3, 60, 9))
    usual, wide = attend(call), attend(call, np.empty((2, 3, 50)))
    assert usual.lse.dtype == np.float32
    assert_same_bits(wide.out, usual.out)
    assert_same_bits(wide.lse.astype(np.float32), usual.lse)
    exact = reference.scaled_dot_product_attention(
        **{name: a.astype(np.float64) for name, a in call.items()}, return_lse=True
    )
    assert isinstance(exact, cattn.AttentionOutput)

    def rms(lse: np.ndarray) -> float:
        return float(np.sqrt(((lse - exact.lse) ** 2).mean()))

    assert 0 < rms(wide.lse) < 0.7 * rms(usual.lse)


def test_the_float64_lse_is_minus_infinity_without_keys_and_nan_with_nan() -> None:
    call = inputs(NARROW[0], (4, 8), (5, 8), (5, 8)) | {"attn_mask": np.ones((4, 5), bool)}
    call["attn_mask"][1] = False
    call["query"][2] = np.nan
    wide = attend(call, np.empty(4))
    assert wide.lse[1] == -np.inf
    assert np.isnan(wide.lse[2])
    assert_same_bits(wide.lse.astype(np.float32), attend(call).lse)
    assert_same_bits(differentiate(call, wide)[0][1:3], differentiate(call, attend(call))[0][1:3])


@pytest.mark.parametrize("stride", [1, 3, -2])
def test_a_float64_lse_may_have_any_strides(stride: int) -> None:
    """Nothing is written between its elements. Unaligned elements are refused as output and accepted as input."""
    call = inputs(NARROW[0], (2, 30, 8), (2, 40, 8), (2, 40, 8))
    expected = attend(call, np.empty((2, 30)))
    room = np.full((2, 30 * abs(stride)), 7.0)
    lse = room[:, ::stride]
    attend(call, lse)
    assert (lse == expected.lse).all()
    assert (room == 7).sum() == room.size - lse.size
    mixed = np.zeros((2, 30), [("pad", np.float32), ("lse", np.float64)])
    with pytest.raises(TypeError, match=r"out\.lse must be aligned"):
        attend(call, mixed["lse"])
    assert_same(differentiate(call, expected._replace(lse=lse)), differentiate(call, expected))
    assert_same(differentiate(call, expected._replace(lse=mixed["lse"] + expected.lse)), differentiate(call, expected))


@pytest.mark.promise("log-sum-exp in float64")
@pytest.mark.parametrize("kind", [*NARROW, np.dtype(np.float64)], ids=str)
@pytest.mark.parametrize("wide", [np.float64, np.dtype(np.float64), float, np.dtype(">f8")], ids=str)
def test_return_lse_may_be_its_dtype(kind: np.dtype, wide: Any) -> None:
    """With float64 the bits are those that a float64 array in ``out=`` gets."""
    call = inputs(kind, (2, 4, 30, 20), (2, 2, 40, 20), (2, 2, 40, 9))
    expected = attend(call, np.empty((2, 4, 30)))
    for function in (cattn.scaled_dot_product_attention, cattn.causal_attention):
        call |= {"query_offset": 40} if function is cattn.causal_attention else {}  # all keys are visible
        result = function(**call, return_lse=wide)
        assert result.lse.dtype == np.float64
        assert_same_bits(result.out, expected.out)
        assert_same_bits(result.lse, expected.lse)
    del call["query_offset"]
    compute = np.float64 if kind == np.float64 else np.float32
    assert_same_bits(cattn.scaled_dot_product_attention(**call, return_lse=compute).lse, attend(call).lse)
    packed = [np.ascontiguousarray(a[0].swapaxes(0, 1)) for a in call.values()]
    result = cattn.varlen_attention(*packed, [0, 30], [0, 40], return_lse=wide)
    assert_same_bits(np.ascontiguousarray(result.lse), expected.lse[0])


def test_return_lse_and_the_array_in_out_must_agree() -> None:
    call = inputs(NARROW[0], (3, 8), (5, 8), (5, 8))
    for wanted, given in ((np.float64, np.float32), (np.float32, np.float64)):
        out = cattn.AttentionOutput(lse=np.empty(3, given))
        message = rf"^out\.lse has dtype {np.dtype(given)}, the result has {np.dtype(wanted)}"
        with pytest.raises(TypeError, match=message):
            cattn.scaled_dot_product_attention(**call, return_lse=wanted, out=out)  # type: ignore[call-overload]


@pytest.mark.parametrize(("kind", "wrong", "message"), [
    (np.float32, np.float16, "^return_lse must be a bool, float32 or float64 for these inputs, got float16"),
    (np.float64, np.float32, "^return_lse must be a bool, or float64 for these inputs, got float32"),
    (np.float32, bool, "^return_lse must be a bool, float32 or float64 for these inputs, got bool"),
    (np.float32, np.dtype("i4"), "^return_lse must be a bool, float32 or float64 for these inputs, got int32"),
    (np.float32, Ellipsis.__class__, "Cannot interpret|got object"),
])  # fmt: skip
def test_other_dtypes_for_return_lse_are_refused(kind: Any, wrong: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        cattn.scaled_dot_product_attention(**inputs(np.dtype(kind), (3, 8), (5, 8), (5, 8)), return_lse=wrong)


def test_return_lse_is_still_a_flag() -> None:
    """Objects that are neither dtypes nor types mean their truth."""
    call = inputs(NARROW[0], (3, 8), (5, 8), (5, 8))
    for yes in (True, np.True_, 1, "yes"):
        assert cattn.scaled_dot_product_attention(**call, return_lse=yes).lse.dtype == np.float32  # type: ignore[call-overload]
    for no in (False, np.False_, 0, None, ""):
        assert isinstance(cattn.scaled_dot_product_attention(**call, return_lse=no), np.ndarray)  # type: ignore[call-overload]


# ---- gradients -----------------------------------------------------------------------------------------------------
OPTIONS: dict[str, Call] = {
    "plain": {},
    "causal": {"is_causal": "lower_right"},
    "dropout": {"dropout_p": 0.3, "rng": 5},
    "drawn dropout": {"dropout_p": 0.3},
    "bias and sinks": {"bias": np.linspace(-1, 1, 200), "sinks": np.array([0.5, 1, 3])},
    "softcap": {"softcap": 2.0},
}


def again(call: Call) -> Call:
    """Return the call with a new generator in its first state."""
    return call | ({"rng": cattn.TorchGenerator(1)} if "dropout_p" in call and "rng" not in call else {})


@pytest.mark.parametrize("kind", NARROW, ids=str)
@pytest.mark.parametrize("name", OPTIONS)
def test_a_float64_lse_rounded_to_float32_gives_the_gradients_of_float32(name: str, kind: np.dtype) -> None:
    """The dtype of lse does not matter, only its numbers."""
    call = inputs(kind, (2, 3, 60, 20), (2, 3, 200, 20), (2, 3, 200, 9)) | OPTIONS[name]
    usual = attend(again(call))
    wide = usual._replace(lse=usual.lse.astype(np.float64))
    assert_same(differentiate(again(call), wide), differentiate(again(call), usual))


@pytest.mark.promise("log-sum-exp in float64")
@pytest.mark.parametrize("name", [name for name in OPTIONS if "dropout" not in name])
def test_a_float64_lse_makes_gradients_more_accurate(name: str, isa: str) -> None:
    call = inputs(NARROW[0], (2, 3, 130, 20), (2, 3, 200, 20), (2, 3, 200, 9)) | OPTIONS[name]
    grad_out = np.random.default_rng(1).standard_normal((2, 3, 130, 9)).astype(np.float32)
    exact = call | {name: call[name].astype(np.float64) for name in ("query", "key", "value")}
    right = differentiate(exact, attend(exact), grad_out.astype(np.float64))
    usual, wide = (differentiate(call, attend(call, lse), grad_out) for lse in (None, np.empty((2, 3, 130))))

    def rms(grad: np.ndarray, exact: np.ndarray) -> float:
        return float(np.sqrt(((grad - exact) ** 2).mean()))

    for i, name in enumerate(("query", "key", "value")):  # bias and sinks have too few numbers to compare
        assert rms(wide[i], right[i]) < 0.95 * rms(usual[i], right[i]), name


@pytest.mark.promise("log-sum-exp in float64")
@pytest.mark.parametrize(
    ("height", "n"), [(1e3, 6), (1e5, 6), (3e5, 5), (3e5, 18), (1e7, 6), (1e10, 6), (-1e10, 6), (1e30, 6)]
)
def test_equal_scores_give_equal_weights_even_if_float32_loses_their_number(height: float, n: int, isa: str) -> None:
    """n keys of equal scores have weights 1/n, although lse = score + log(n) in float32 loses most of log(n).

    For n = 5 and 18 and the spacing 1/32 of float32 at 3e5, log(n) is rounded by nearly half a unit, up and down.
    """
    x = np.full((n, 4), np.sqrt(abs(height)) / 2, np.float32)
    call = {"query": np.copysign(x, np.float32(height)), "key": x, "value": np.eye(n, dtype=np.float32), "scale": 1.0}
    result = attend(call, np.empty(n))
    np.testing.assert_allclose(result.out, 1 / n, rtol=1e-6)
    wide = differentiate(call, result)
    if abs(height) < 1e15:  # beyond that, float64 loses log(n) too
        rtol = 4e-7 + np.spacing(abs(height))
        np.testing.assert_allclose(wide[2], 1, rtol=rtol)
        sink = call | {"sinks": [(call["query"] * x).sum(-1, dtype=np.float32)[0]]}
        grads = differentiate(sink, attend(sink, np.empty(n)))
        np.testing.assert_allclose(grads[2], n / (n + 1), rtol=rtol)
        np.testing.assert_allclose(grads[3], -((n / (n + 1)) ** 2), rtol=n * rtol)
    assert np.isfinite(wide[2]).all()


@pytest.mark.parametrize("lse", [np.inf, -np.inf, np.nan, 1e300, -1e300, 5e-324, -0.0])
def test_a_float64_lse_beyond_float32_counts_as_its_float32_rounding(lse: float, isa: str) -> None:
    """Infinity, NaN, numbers too large or too small for float32, and -0."""
    call = inputs(NARROW[0], (5, 4), (7, 4), (7, 4))
    result = attend(call)._replace(lse=np.full(5, lse))
    rounded = result._replace(lse=quiet(result.lse, np.float32))
    assert_same(differentiate(call, result), differentiate(call, rounded))


def test_lse_may_be_a_list_but_not_of_another_dtype() -> None:
    call = inputs(NARROW[0], (3, 4), (5, 4), (5, 4))
    result = attend(call, np.empty(3))
    assert_same(differentiate(call, result._replace(lse=result.lse.tolist())), differentiate(call, result))
    for wrong in (np.float16, np.longdouble, np.complex128):
        with pytest.raises(TypeError, match="lse"):
            differentiate(call, result._replace(lse=result.lse.astype(wrong)))
    with pytest.raises(TypeError, match=r"out\.lse has dtype float16, the result has float32"):
        attend(call, np.empty(3, np.float16))


# ---- layers and PyTorch --------------------------------------------------------------------------------------------
def test_layers_keep_the_lse_in_float64() -> None:
    attention = cattn.CausalAttention(4, 4, 5, 0.0, rng=0)
    context = attention(np.random.default_rng(0).standard_normal((5, 4), dtype=np.float32))
    assert context.dtype == np.float32
    assert attention._kept.attended.lse.dtype == np.float64


def test_the_torch_operator_uses_a_float64_lse() -> None:
    torch = pytest.importorskip("torch")
    import cattn.integrations.torch

    call = inputs(NARROW[0], (2, 3, 30, 8), (2, 3, 40, 8), (2, 3, 40, 5))
    tensors = [torch.from_numpy(a).requires_grad_() for a in call.values()]
    out = cattn.integrations.torch.scaled_dot_product_attention(*tensors)
    grads = torch.autograd.grad(out, tensors, torch.ones_like(out))
    expected = differentiate(call, attend(call, np.empty((2, 3, 30))))
    assert_same(tuple(grad.numpy() for grad in grads), expected)


# ---- grad_lse --------------------------------------------------------------------------------------------------------
def assert_same_gradients(actual: cattn.AttentionGradients, expected: cattn.AttentionGradients) -> None:
    for name in FIELDS:
        if getattr(expected, name) is not None:
            assert_same_bits(getattr(actual, name), getattr(expected, name), name)


# ---- values --------------------------------------------------------------------------------------------------------


@pytest.mark.promise("rows without keys")
@pytest.mark.parametrize("wrong", [NAN, INF])
def test_rows_without_keys_have_gradient_zero(wrong: float, dtype: Any, isa: str, rng: np.random.Generator) -> None:
    mask = rng.random((40, 50)) < 0.5
    mask[3] = False
    call = qkv(rng, dtype, (2, 40, 8), (2, 50, 8), (2, 50, 8)) | {"attn_mask": mask}
    grad_out, grad_lse = random_gradients(call)
    clean = backward(call, grad_out, grad_lse)
    assert (clean.query[:, 3] == 0).all()
    grad_lse[:, 3] = wrong
    assert_same_gradients(backward(call, grad_out, grad_lse), clean)


def test_the_lse_of_a_row_without_keys_is_the_sink(dtype: Any, isa: str) -> None:
    """Its derivative with respect to the sink is 1. The gradient of its output does not count."""
    call: Call = {n: np.ones((3, 2), dtype) for n in ("query", "key", "value")}
    call |= {"attn_mask": np.zeros((3, 3), bool), "sinks": [0.5]}
    grads = backward(call, np.full((3, 2), NAN, dtype), [1.0, 2.0, 4.0])
    assert grads.sinks.tolist() == [7.0]
    assert not any(g.any() for g in grads[:3])
    call["sinks"] = [-INF]
    assert backward(call, np.ones((3, 2), dtype), [1.0, 2.0, NAN]).sinks.tolist() == [0.0]


# ---- bits ----------------------------------------------------------------------------------------------------------
def everything(rng: np.random.Generator, dtype: Any) -> Call:
    call = qkv(rng, dtype, (2, 4, 201, 11), (2, 2, 400, 11), (2, 2, 400, 19))
    every = options(rng, 2, 4, 201, 400)
    for name in ("bias of all", "softcap", "slopes", "sinks", "dropout"):
        call |= every[name]
    return call | {"is_causal": True, "window_size": (150, 90), "query_offset": 199}


def test_a_gradient_of_zero_has_the_bits_of_none(dtype: Any, isa: str, rng: np.random.Generator) -> None:
    call = everything(rng, dtype)
    grad_out, grad_lse = random_gradients(call)
    assert_same_gradients(backward(call, grad_out, np.zeros_like(grad_lse)), backward(call, grad_out, None))
    assert (backward(call, grad_out, grad_lse).query != backward(call, grad_out, None).query).any()


def test_strides_and_dtypes_of_grad_lse_change_no_bit(dtype: Any, rng: np.random.Generator) -> None:
    call = qkv(rng, dtype, (2, 3, 50, 20), (2, 3, 70, 20), (2, 3, 70, 18))
    grad_out, grad_lse = random_gradients(call)
    grad_lse = quiet(grad_lse, np.float16)
    grad_lse[...] = grad_lse[:, :1]
    expected = backward(call, grad_out, grad_lse.astype(np.float64))
    wide = np.zeros((50, 3, 2), np.float64)[::-1].T
    wide[...] = grad_lse
    for other in (
        grad_lse,
        grad_lse.astype(np.float32),
        grad_lse.tolist(),
        wide,
        np.broadcast_to(grad_lse[:, :1], (2, 3, 50)),
        grad_lse.astype(">f8"),
    ):
        assert_same_gradients(backward(call, grad_out, other), expected)


def test_a_float64_gradient_keeps_its_digits() -> None:
    """grad_lse cancels the sum of grad_out * out, which it could not do if it was rounded to float32 first."""
    one, grad_lse = np.ones((1, 1), np.float32), [2**20 + 1 + 2**-20]
    call: Call = {"query": one, "key": np.ones((2, 1), np.float32), "value": np.array([[0], [2**21 + 2]], np.float32)}
    assert forward(call).out.item() == 2**20 + 1
    assert backward(call, one, grad_lse).key[0].item() == 2**-21
    assert backward(call, one, np.array(grad_lse, np.float32)).key[0].item() == 0


# ---- a float32 output of halves ------------------------------------------------------------------------------------
def unrounded(call: Call) -> np.ndarray:
    out: np.ndarray = forward(widened(call)).out
    return out


@pytest.mark.parametrize("half", HALVES, ids=str)
def test_a_float32_output_gives_the_bits_of_a_float32_call(half: np.dtype, isa: str, rng: np.random.Generator) -> None:
    call = qkv(rng, half, (2, 4, 110, 9), (2, 2, 210, 9), (2, 2, 210, 5)) | {"sinks": np.ones(4, np.float32)}
    call |= {"is_causal": "lower_right", "bias": rng.standard_normal((110, 210)).astype(np.float32)}
    result, out = forward(call), unrounded(call)
    assert_same_bits(quiet(out, half), result.out)
    grad_out, grad_lse = random_gradients(call)
    common = {"lse": result.lse, "grad_lse": grad_lse}
    wide = cattn.attention_backward(quiet(grad_out, np.float32), out=out, **common, **widened(call))
    expected = wide._replace(**{name: quiet(getattr(wide, name), half) for name in ("query", "key", "value")})
    for n in (1, 3):
        with cattn.num_threads(n):
            assert_same_gradients(cattn.attention_backward(grad_out, out=out, **common, **call), expected)
    strided = np.repeat(out, 3, axis=-1)[:, ::-1, :, ::3][:, ::-1]
    assert_same_gradients(cattn.attention_backward(grad_out, out=strided, **common, **call), expected)
    rounded = quiet(result.out, np.float32)
    assert_same_gradients(
        cattn.attention_backward(grad_out, out=rounded, **common, **call),
        cattn.attention_backward(grad_out, out=result.out, **common, **call),
    )


@pytest.mark.parametrize("half", HALVES, ids=str)
def test_a_float32_output_makes_gradients_more_exact(half: np.dtype, rng: np.random.Generator) -> None:
    """Only the sums of grad_out * out gain, so the values have a large mean, which those sums subtract."""
    call = qkv(rng, half, (3, 60, 16), (3, 80, 16), (3, 80, 16))
    call["value"] = quiet(call["value"].astype(np.float32) + 4, half)
    grad_out = quiet(rng.standard_normal((3, 60, 16)), half)
    result, exact = forward(call), {name: array.astype(np.float64) for name, array in call.items()}
    expected = backward(exact, grad_out.astype(np.float64), None)

    def error(out: np.ndarray, name: str) -> float:
        grads = cattn.attention_backward(grad_out, out=out, lse=result.lse, **call)
        right = getattr(expected, name)
        return float(np.sqrt(((getattr(grads, name).astype(np.float64) - right) ** 2).mean()))

    for name in ("query", "key"):
        assert error(unrounded(call), name) < error(result.out, name) / 2


@pytest.mark.parametrize(("dtype", "out", "wanted"), [
    (np.float16, np.float64, "float16"), (np.float32, np.float64, "float32"), (np.float32, np.float16, "float32"),
])  # fmt: skip
def test_an_output_of_another_dtype_is_refused(dtype: Any, out: Any, wanted: str) -> None:
    call: Call = {n: np.ones((5, 4), dtype) for n in ("query", "key", "value")}
    message = rf"^out has dtype {np.dtype(out)}, the forward pass gives {wanted}: pass out\.astype\('{wanted}'\)"
    with pytest.raises(TypeError, match=message):
        cattn.attention_backward(call["query"], out=np.ones((5, 4), out), lse=np.ones(5, np.float32), **call)


# ---- errors --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("grad_lse", "error", "message"),
    [
        (np.ones((2, 5, 1)), ValueError, r"grad_lse has shape \(2, 5, 1\), the log-sum-exp has \(2, 5\)"),
        (np.ones(5), ValueError, r"grad_lse has shape \(5,\), the log-sum-exp has \(2, 5\)"),
        (1.0, ValueError, r"grad_lse has shape \(\), the log-sum-exp has \(2, 5\)"),
        (np.ones((2, 5), complex), TypeError, "grad_lse has dtype complex128"),
    ],
)
def test_wrong_gradients_are_refused(grad_lse: Any, error: type[Exception], message: str) -> None:
    call: Call = {n: np.ones((2, 5, 4), np.float32) for n in ("query", "key", "value")}
    with pytest.raises(error, match=message):
        backward(call, np.ones((2, 5, 4), np.float32), grad_lse)
