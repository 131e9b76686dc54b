"""The log-sum-exp in float64 for inputs in float32 and halves: its accuracy, and how the gradients use it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cattn
from cattn import reference
from support import HALVES, assert_same_bits, in_contract, quiet, table

NARROW = [np.dtype(np.float32), *HALVES]
Call = dict[str, Any]


def qkv(dtype: np.dtype, *shapes: tuple[int, ...], seed: int = 0) -> Call:
    rng = np.random.default_rng(seed)
    names = ("query", "key", "value")
    return {name: quiet(rng.standard_normal(s), dtype) for name, s in zip(names, shapes, strict=True)}


def forward(call: Call, lse: np.ndarray | None = None) -> cattn.AttentionOutput:
    """Attend, with the log-sum-exp written to `lse`."""
    result: cattn.AttentionOutput = cattn.scaled_dot_product_attention(
        **call, return_lse=True, out=cattn.AttentionOutput(lse=lse)
    )
    assert lse is None or result.lse is lse
    return result


def backward(call: Call, result: cattn.AttentionOutput, grad_out: np.ndarray | None = None) -> tuple[Any, ...]:
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
    call = qkv(kind, (2, 3, 50, 20), (2, 3, 60, 20), (2, 3, 60, 9))
    usual, wide = forward(call), forward(call, np.empty((2, 3, 50)))
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


def test_every_table_and_number_of_threads_gives_the_same_float64_lse(isa: str) -> None:
    call = qkv(NARROW[0], (3, 130, 20), (3, 1600, 20), (3, 1600, 9)) | {"sinks": [0.5]}
    with table("scalar" if in_contract(isa) else isa), cattn.num_threads(1):
        expected = forward(call, np.empty((3, 130)))
    for n in (1, 3):
        with cattn.num_threads(n):
            assert_same(forward(call, np.empty((3, 130)))[:3:2], expected[:3:2])


def test_the_float64_lse_is_minus_infinity_without_keys_and_nan_with_nan() -> None:
    call = qkv(NARROW[0], (4, 8), (5, 8), (5, 8)) | {"attn_mask": np.ones((4, 5), bool)}
    call["attn_mask"][1] = False
    call["query"][2] = np.nan
    wide = forward(call, np.empty(4))
    assert wide.lse[1] == -np.inf
    assert np.isnan(wide.lse[2])
    assert_same_bits(wide.lse.astype(np.float32), forward(call).lse)
    assert_same_bits(backward(call, wide)[0][1:3], backward(call, forward(call))[0][1:3])


@pytest.mark.parametrize("stride", [1, 3, -2])
def test_a_float64_lse_may_have_any_strides(stride: int) -> None:
    """Nothing is written between its elements. Unaligned elements are refused as output and accepted as input."""
    call = qkv(NARROW[0], (2, 30, 8), (2, 40, 8), (2, 40, 8))
    expected = forward(call, np.empty((2, 30)))
    room = np.full((2, 30 * abs(stride)), 7.0)
    lse = room[:, ::stride]
    forward(call, lse)
    assert (lse == expected.lse).all()
    assert (room == 7).sum() == room.size - lse.size
    mixed = np.zeros((2, 30), [("pad", np.float32), ("lse", np.float64)])
    with pytest.raises(TypeError, match=r"out\.lse must be aligned"):
        forward(call, mixed["lse"])
    assert_same(backward(call, expected._replace(lse=lse)), backward(call, expected))
    assert_same(backward(call, expected._replace(lse=mixed["lse"] + expected.lse)), backward(call, expected))


def test_the_lse_of_float64_inputs_is_always_float64() -> None:
    call = qkv(np.dtype(np.float64), (3, 8), (5, 8), (5, 8))
    assert_same_bits(forward(call, np.empty(3)).lse, forward(call).lse)
    with pytest.raises(TypeError, match=r"out\.lse has dtype float32, the result has float64"):
        forward(call, np.empty(3, np.float32))


@pytest.mark.promise("log-sum-exp in float64")
@pytest.mark.parametrize("kind", [*NARROW, np.dtype(np.float64)], ids=str)
@pytest.mark.parametrize("wide", [np.float64, np.dtype(np.float64), float, np.dtype(">f8")], ids=str)
def test_return_lse_may_be_its_dtype(kind: np.dtype, wide: Any) -> None:
    """With float64 the bits are those that a float64 array in ``out=`` gets."""
    call = qkv(kind, (2, 4, 30, 20), (2, 2, 40, 20), (2, 2, 40, 9))
    expected = forward(call, np.empty((2, 4, 30)))
    for function in (cattn.scaled_dot_product_attention, cattn.causal_attention):
        call |= {"query_offset": 40} if function is cattn.causal_attention else {}  # all keys are visible
        result = function(**call, return_lse=wide)
        assert result.lse.dtype == np.float64
        assert_same_bits(result.out, expected.out)
        assert_same_bits(result.lse, expected.lse)
    del call["query_offset"]
    compute = np.float64 if kind == np.float64 else np.float32
    assert_same_bits(cattn.scaled_dot_product_attention(**call, return_lse=compute).lse, forward(call).lse)
    packed = [np.ascontiguousarray(a[0].swapaxes(0, 1)) for a in call.values()]
    result = cattn.varlen_attention(*packed, [0, 30], [0, 40], return_lse=wide)
    assert_same_bits(np.ascontiguousarray(result.lse), expected.lse[0])


def test_return_lse_and_the_array_in_out_must_agree() -> None:
    call = qkv(NARROW[0], (3, 8), (5, 8), (5, 8))
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
        cattn.scaled_dot_product_attention(**qkv(np.dtype(kind), (3, 8), (5, 8), (5, 8)), return_lse=wrong)


def test_return_lse_is_still_a_flag() -> None:
    """Objects that are neither dtypes nor types mean their truth."""
    call = qkv(NARROW[0], (3, 8), (5, 8), (5, 8))
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


@pytest.mark.promise("log-sum-exp in float64")
@pytest.mark.parametrize("name", OPTIONS)
def test_gradients_have_the_same_bits_everywhere(name: str, isa: str) -> None:
    call = qkv(NARROW[0], (2, 3, 130, 20), (2, 3, 200, 20), (2, 3, 200, 9)) | OPTIONS[name]
    with table("scalar" if in_contract(isa) else isa), cattn.num_threads(1):
        result = forward(again(call), np.empty((2, 3, 130)))
        expected = backward(again(call), result)
    for n in (1, 3):
        with cattn.num_threads(n):
            assert_same(backward(again(call), result), expected)


@pytest.mark.parametrize("kind", NARROW, ids=str)
@pytest.mark.parametrize("name", OPTIONS)
def test_a_float64_lse_rounded_to_float32_gives_the_gradients_of_float32(name: str, kind: np.dtype) -> None:
    """The dtype of lse does not matter, only its numbers."""
    call = qkv(kind, (2, 3, 60, 20), (2, 3, 200, 20), (2, 3, 200, 9)) | OPTIONS[name]
    usual = forward(again(call))
    wide = usual._replace(lse=usual.lse.astype(np.float64))
    assert_same(backward(again(call), wide), backward(again(call), usual))


@pytest.mark.promise("log-sum-exp in float64")
@pytest.mark.parametrize("name", [name for name in OPTIONS if "dropout" not in name])
def test_a_float64_lse_makes_gradients_more_accurate(name: str, isa: str) -> None:
    call = qkv(NARROW[0], (2, 3, 130, 20), (2, 3, 200, 20), (2, 3, 200, 9)) | OPTIONS[name]
    grad_out = np.random.default_rng(1).standard_normal((2, 3, 130, 9)).astype(np.float32)
    exact = call | {name: call[name].astype(np.float64) for name in ("query", "key", "value")}
    right = backward(exact, forward(exact), grad_out.astype(np.float64))
    usual, wide = (backward(call, forward(call, lse), grad_out) for lse in (None, np.empty((2, 3, 130))))

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
    result = forward(call, np.empty(n))
    np.testing.assert_allclose(result.out, 1 / n, rtol=1e-6)
    wide = backward(call, result)
    if abs(height) < 1e15:  # beyond that, float64 loses log(n) too
        rtol = 4e-7 + np.spacing(abs(height))
        np.testing.assert_allclose(wide[2], 1, rtol=rtol)
        sink = call | {"sinks": [(call["query"] * x).sum(-1, dtype=np.float32)[0]]}
        grads = backward(sink, forward(sink, np.empty(n)))
        np.testing.assert_allclose(grads[2], n / (n + 1), rtol=rtol)
        np.testing.assert_allclose(grads[3], -((n / (n + 1)) ** 2), rtol=n * rtol)
    assert np.isfinite(wide[2]).all()


@pytest.mark.parametrize("lse", [np.inf, -np.inf, np.nan, 1e300, -1e300, 5e-324, -0.0])
def test_a_float64_lse_beyond_float32_counts_as_its_float32_rounding(lse: float, isa: str) -> None:
    """Infinity, NaN, numbers too large or too small for float32, and -0."""
    call = qkv(NARROW[0], (5, 4), (7, 4), (7, 4))
    result = forward(call)._replace(lse=np.full(5, lse))
    rounded = result._replace(lse=quiet(result.lse, np.float32))
    assert_same(backward(call, result), backward(call, rounded))


def test_lse_may_be_a_list_but_not_of_another_dtype() -> None:
    call = qkv(NARROW[0], (3, 4), (5, 4), (5, 4))
    result = forward(call, np.empty(3))
    assert_same(backward(call, result._replace(lse=result.lse.tolist())), backward(call, result))
    for wrong in (np.float16, np.longdouble, np.complex128):
        with pytest.raises(TypeError, match="lse"):
            backward(call, result._replace(lse=result.lse.astype(wrong)))
    with pytest.raises(TypeError, match=r"out\.lse has dtype float16, the result has float32"):
        forward(call, np.empty(3, np.float16))


# ---- layers and PyTorch --------------------------------------------------------------------------------------------
def test_layers_keep_the_lse_in_float64() -> None:
    attention = cattn.CausalAttention(4, 4, 5, 0.0, rng=0)
    context = attention(np.random.default_rng(0).standard_normal((5, 4), dtype=np.float32))
    assert context.dtype == np.float32
    assert attention._kept.attended.lse.dtype == np.float64


def test_the_torch_operator_uses_a_float64_lse() -> None:
    torch = pytest.importorskip("torch")
    import cattn.integrations.torch

    call = qkv(NARROW[0], (2, 3, 30, 8), (2, 3, 40, 8), (2, 3, 40, 5))
    tensors = [torch.from_numpy(a).requires_grad_() for a in call.values()]
    out = cattn.integrations.torch.scaled_dot_product_attention(*tensors)
    grads = torch.autograd.grad(out, tensors, torch.ones_like(out))
    expected = backward(call, forward(call, np.empty((2, 3, 30))))
    assert_same(tuple(grad.numpy() for grad in grads), expected)
