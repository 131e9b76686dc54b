"""attention_backward(grad_lse=) against the reference, differences and PyTorch; a float32 output of halves."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cattn
from cattn import reference
from support import HALVES, INF, NAN, assert_same_bits, in_contract, quiet, table, widened
from support.derivatives import FIELDS, NAMES, TOLERANCE, arguments, forward, options, qkv

Call = dict[str, Any]


def gradients_of(call: Call, seed: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Return random gradients of the output and of the log-sum-exp."""
    rng, result = np.random.default_rng(seed), forward(call)
    return rng.standard_normal(result.out.shape).astype(result.out.dtype), rng.standard_normal(result.lse.shape)


def backward(call: Call, grad_out: Any, grad_lse: Any, **others: Any) -> cattn.AttentionGradients:
    result = forward(call)
    return cattn.attention_backward(grad_out, out=result.out, lse=result.lse, grad_lse=grad_lse, **call, **others)


def assert_same(actual: cattn.AttentionGradients, expected: cattn.AttentionGradients) -> None:
    for name in FIELDS:
        if getattr(expected, name) is not None:
            assert_same_bits(getattr(actual, name), getattr(expected, name), name)


def assert_close(actual: cattn.AttentionGradients, expected: Any, rtol: float) -> None:
    """Assert that each gradient is right up to rtol times its largest number."""
    for name, a, b in zip(FIELDS, actual, expected, strict=True):
        assert (a is None) == (b is None), name
        if a is not None:
            np.testing.assert_allclose(a, b, rtol=0, atol=rtol * (1 + np.abs(b).max(initial=0)), err_msg=name)


# ---- values --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", NAMES)
def test_every_option_agrees_with_the_reference(name: str, dtype: Any, rng: np.random.Generator) -> None:
    call = qkv(rng, dtype, (2, 4, 101, 20), (2, 2, 210, 20), (2, 2, 210, 9)) | options(rng, 2, 4, 101, 210)[name]
    grad_out, grad_lse = gradients_of(call)
    result = reference.scaled_dot_product_attention(**call, return_lse=True)
    assert isinstance(result, cattn.AttentionOutput)
    expected = reference.attention_backward(grad_out, out=result.out, lse=result.lse, grad_lse=grad_lse, **call)
    assert_close(backward(call, grad_out, grad_lse), expected, TOLERANCE[dtype])


@pytest.mark.promise("gradients")
@pytest.mark.parametrize("name", NAMES)
def test_every_option_agrees_with_finite_differences(name: str, rng: np.random.Generator) -> None:
    """The loss is the sum of grad_out * out and grad_lse * lse, over the rows with a finite log-sum-exp."""
    call = qkv(rng, np.float64, (2, 3, 9, 5), (2, 3, 12, 5), (2, 3, 12, 4)) | options(rng, 2, 3, 9, 12)[name]
    grad_out, grad_lse = gradients_of(call)
    grads = backward(call, grad_out, grad_lse)
    for field, array in arguments(call).items():
        keyword = "attn_mask" if field == "bias" and call.get("bias") is None else field
        direction = rng.standard_normal(array.shape)

        def along(step: float, keyword: str = keyword, array: Any = array, direction: Any = direction) -> float:
            result = forward(call | {keyword: array + step * direction})
            rows = np.isfinite(result.lse)
            return float((result.out * grad_out).sum() + (result.lse[rows] * grad_lse[rows]).sum())

        h = 2e-4  # two central differences give an error of order h**4
        near, far = (along(h) - along(-h)) / (2 * h), (along(2 * h) - along(-2 * h)) / (4 * h)
        terms = getattr(grads, field) * direction
        assert abs(terms.sum() - (4 * near - far) / 3) <= 1e-7 * (1 + np.abs(terms).sum() ** 0.5), field


@pytest.mark.promise("gradients")
@pytest.mark.parametrize("name", ["plain", "causal", "mask", "groups", "sinks", "softcap"])
def test_autograd_of_torch_agrees_on_a_z_loss(name: str, rng: np.random.Generator) -> None:
    """The loss is a linear function of the output, and 0.1 times the mean square of the log-sum-exp."""
    torch = pytest.importorskip("torch")
    kv_heads = 2 if name == "groups" else 4
    call = qkv(rng, np.float64, (2, 4, 110, 16), (2, kv_heads, 110, 16), (2, kv_heads, 110, 8))
    call |= {"causal": {"is_causal": True}, "mask": {"attn_mask": rng.random((2, 1, 110, 110)) < 0.5},
             "sinks": {"sinks": rng.standard_normal(4)}, "softcap": {"softcap": 1.5}}.get(name, {})  # fmt: skip
    result = forward(call)
    grad_out = rng.standard_normal(result.out.shape)
    grads = backward(call, grad_out, 0.2 * result.lse / result.lse.size)

    leaves = {n: torch.tensor(a, requires_grad=True) for n, a in arguments(call).items()}
    key, value = (leaves[n].repeat_interleave(4 // kv_heads, dim=1) for n in ("key", "value"))
    scores = leaves["query"] @ key.mT / 4
    if name == "softcap":
        scores = 1.5 * torch.tanh(scores / 1.5)
    if name == "causal":
        scores = scores.masked_fill(torch.ones(110, 110, dtype=torch.bool).triu(1), -INF)
    if name == "mask":
        scores = scores.masked_fill(~torch.tensor(call["attn_mask"]), -INF)
    if name == "sinks":
        scores = torch.cat([scores, leaves["sinks"][:, None, None].expand(2, 4, 110, 1)], dim=-1)
    out = torch.softmax(scores, dim=-1)[..., :110] @ value
    ((out * torch.tensor(grad_out)).sum() + 0.1 * (torch.logsumexp(scores, dim=-1) ** 2).mean()).backward()
    for n, leaf in leaves.items():
        np.testing.assert_allclose(getattr(grads, n), leaf.grad.numpy(), rtol=1e-11, atol=1e-11, err_msg=n)


@pytest.mark.promise("rows without keys")
@pytest.mark.parametrize("wrong", [NAN, INF])
def test_rows_without_keys_have_gradient_zero(wrong: float, dtype: Any, isa: str, rng: np.random.Generator) -> None:
    mask = rng.random((40, 50)) < 0.5
    mask[3] = False
    call = qkv(rng, dtype, (2, 40, 8), (2, 50, 8), (2, 50, 8)) | {"attn_mask": mask}
    grad_out, grad_lse = gradients_of(call)
    clean = backward(call, grad_out, grad_lse)
    assert (clean.query[:, 3] == 0).all()
    grad_lse[:, 3] = wrong
    assert_same(backward(call, grad_out, grad_lse), clean)


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
    grad_out, grad_lse = gradients_of(call)
    assert_same(backward(call, grad_out, np.zeros_like(grad_lse)), backward(call, grad_out, None))
    assert (backward(call, grad_out, grad_lse).query != backward(call, grad_out, None).query).any()


@pytest.mark.promise("gradients' bits")
def test_every_table_and_number_of_threads_gives_the_same_bits(dtype: Any, isa: str, rng: np.random.Generator) -> None:
    call = everything(rng, dtype)
    grad_out, grad_lse = gradients_of(call)
    with table("scalar" if in_contract(isa) else isa), cattn.num_threads(1):
        expected = backward(call, grad_out, grad_lse)
    for n in (1, 3):
        with cattn.num_threads(n):
            assert_same(backward(call, grad_out, grad_lse), expected)


def test_strides_and_dtypes_of_grad_lse_change_no_bit(dtype: Any, rng: np.random.Generator) -> None:
    call = qkv(rng, dtype, (2, 3, 50, 20), (2, 3, 70, 20), (2, 3, 70, 18))
    grad_out, grad_lse = gradients_of(call)
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
        assert_same(backward(call, grad_out, other), expected)


def test_a_float64_gradient_keeps_its_digits() -> None:
    """grad_lse cancels the sum of grad_out * out, which it could not do if it was rounded to float32 first."""
    one, grad_lse = np.ones((1, 1), np.float32), [2**20 + 1 + 2**-20]
    call: Call = {"query": one, "key": np.ones((2, 1), np.float32), "value": np.array([[0], [2**21 + 2]], np.float32)}
    assert forward(call).out.item() == 2**20 + 1
    assert backward(call, one, grad_lse).key[0].item() == 2**-21
    assert backward(call, one, np.array(grad_lse, np.float32)).key[0].item() == 0


@pytest.mark.parametrize("half", HALVES, ids=str)
def test_halves_have_the_bits_of_float32_rounded_once(half: np.dtype, isa: str, rng: np.random.Generator) -> None:
    call = qkv(rng, half, (2, 4, 110, 9), (2, 2, 210, 9), (2, 2, 210, 5)) | {"sinks": np.ones(4, np.float32)}
    result = forward(call)
    grad_out, grad_lse = gradients_of(call)
    halves = backward(call, grad_out, grad_lse)
    floats = cattn.attention_backward(
        quiet(grad_out, np.float32), out=quiet(result.out, np.float32), lse=result.lse, grad_lse=grad_lse,
        **widened(call),
    )  # fmt: skip
    for name, ours, wide in zip(FIELDS, halves, floats, strict=True):
        if wide is not None:
            assert_same_bits(ours, quiet(wide, half) if name in ("query", "key", "value") else wide, name)


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
    grad_out, grad_lse = gradients_of(call)
    common = {"lse": result.lse, "grad_lse": grad_lse}
    wide = cattn.attention_backward(quiet(grad_out, np.float32), out=out, **common, **widened(call))
    expected = wide._replace(**{name: quiet(getattr(wide, name), half) for name in ("query", "key", "value")})
    for n in (1, 3):
        with cattn.num_threads(n):
            assert_same(cattn.attention_backward(grad_out, out=out, **common, **call), expected)
    strided = np.repeat(out, 3, axis=-1)[:, ::-1, :, ::3][:, ::-1]
    assert_same(cattn.attention_backward(grad_out, out=strided, **common, **call), expected)
    rounded = quiet(result.out, np.float32)
    assert_same(
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
