"""Forward mode of attention and its gradients: reference, finite differences, PyTorch; bits; hidden keys; errors."""

from __future__ import annotations

import inspect
import itertools
from typing import Any

import numpy as np
import pytest

import cattn
from cattn import reference
from support import HALVES, NAN, assert_same_bits
from support.derivatives import (
    MOVING,
    NAMES,
    SHAPES,
    TANGENTS,
    TOLERANCE,
    arguments,
    check_tangents,
    cotangents,
    derive,
    direction,
    options,
    qkv,
    results_of,
    second,
    shaped,
)

LOOSER = {dtype: 4 * tolerance for dtype, tolerance in TOLERANCE.items()}  # sums of more products


@pytest.mark.parametrize("name", NAMES)
def test_every_option_agrees_with_the_reference(name: str, dtype: Any, rng: np.random.Generator) -> None:
    call = qkv(rng, dtype, (2, 3, 130, 20), (2, 3, 250, 20), (2, 3, 250, 9))
    call |= options(rng, 2, 3, 130, 250)[name]
    check_tangents(call, direction(call), LOOSER[dtype])


def test_a_bias_without_axes_has_a_tangent_without_axes(dtype: Any, rng: np.random.Generator) -> None:
    """It changes all scores by the same number, which changes no weight."""
    call = qkv(rng, dtype, (3, 4), (5, 4), (5, 2))
    one: Any = np.asarray(2, dtype)
    derived = cattn.attention_jvp(**call, bias=one, bias_tangent=one, return_lse=True)
    np.testing.assert_allclose(derived.out_tangent, np.zeros((3, 2)), atol=1e-5)
    np.testing.assert_allclose(derived.lse_tangent, np.full(3, 2), rtol=1e-5)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("extra", ["plain", "causal", "sinks and bias"])
def test_every_shape_agrees_with_the_reference(name: str, extra: str, dtype: Any, rng: np.random.Generator) -> None:
    call = shaped(rng, dtype, name, extra)
    check_tangents(call, direction(call), LOOSER[dtype])


@pytest.mark.parametrize("name", MOVING)
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_a_missing_tangent_is_a_tangent_of_zeros(name: str, softcap: float | None, rng: np.random.Generator) -> None:
    call = qkv(rng, np.float64, (2, 3, 20, 8), (2, 3, 30, 8), (2, 3, 30, 5)) | {"softcap": softcap}
    call |= {"bias": rng.standard_normal((3, 20, 30)), "sinks": rng.standard_normal(3)}
    every = direction(call)
    for some in (direction(call, names=[name]), direction(call, names=set(MOVING) - {name})):
        zeros = {key: np.zeros_like(every[key]) for key in every if key not in some}
        for actual, expected in (
            (derive(call, some), derive(call, some | zeros)),
            (second(call, some), second(call, some | zeros)),
        ):
            for a, b in zip(actual, expected, strict=True):
                if a is not None or b is not None:
                    np.testing.assert_allclose(a, b, rtol=0, atol=1e-14)


def test_without_tangents_the_derivatives_are_zero(rng: np.random.Generator) -> None:
    call = qkv(rng, np.float32, (2, 3, 20, 8), (2, 3, 30, 8), (2, 3, 30, 5))
    result = derive(call, {})
    assert not result.out_tangent.any()
    assert not result.lse_tangent.any()
    out = cattn.scaled_dot_product_attention(**call, return_lse=True)
    assert_same_bits(result.out, out.out)
    assert_same_bits(result.lse, out.lse)
    assert not any(a.any() for a in second(call, {})[:3])


# ---- finite differences, PyTorch -----------------------------------------------------------------------------------
@pytest.mark.parametrize("name", NAMES)
def test_every_option_agrees_with_finite_differences(name: str, rng: np.random.Generator) -> None:
    call = qkv(rng, np.float64, (2, 3, 9, 5), (2, 3, 12, 5), (2, 3, 12, 4)) | options(rng, 2, 3, 9, 12)[name]
    tangents, h = direction(call), 1e-4
    keywords = {n: "attn_mask" if n == "bias" and call.get("bias") is None else n for n in arguments(call)}

    def moved(step: float) -> Any:
        return call | {keywords[n]: a + step * tangents[f"{n}_tangent"] for n, a in arguments(call).items()}

    def outputs(step: float) -> Any:
        return cattn.scaled_dot_product_attention(**moved(step), return_lse=True)

    def gradients(step: float) -> Any:
        given = outputs(step)
        grads = cotangents(given)
        return cattn.attention_backward(
            grads["grad_out_tangent"], out=given.out, lse=given.lse, grad_lse=grads["grad_lse_tangent"], **moved(step)
        )

    result = derive(call, tangents)
    finite = np.isfinite(result.lse)
    np.testing.assert_allclose((outputs(h).out - outputs(-h).out) / (2 * h), result.out_tangent, atol=1e-6)
    difference = (outputs(h).lse[finite] - outputs(-h).lse[finite]) / (2 * h)
    np.testing.assert_allclose(difference, result.lse_tangent[finite], atol=1e-6)
    for field, a, b, c in zip(
        cattn.AttentionGradients._fields, gradients(h), gradients(-h), second(call, tangents), strict=True
    ):
        if a is not None:
            np.testing.assert_allclose((a - b) / (2 * h), c, atol=1e-6, err_msg=field)


# ---- bits ----------------------------------------------------------------------------------------------------------
def test_a_row_depends_on_nothing_around_it(dtype: Any, rng: np.random.Generator) -> None:
    call = qkv(rng, dtype, (3, 4, 300, 16), (3, 2, 300, 16), (3, 2, 300, 8)) | {"is_causal": "lower_right"}
    tangents = direction(call)
    whole = derive(call, tangents)
    part = {name: a[1:2, :, :200] for name, a in call.items() if name != "is_causal"} | {"is_causal": "lower_right"}
    alone = derive(part, {name: a[1:2, :, :200] for name, a in tangents.items()})
    for a, b in zip(alone, whole, strict=True):
        assert_same_bits(a, b[1:2, :, :200])
    few = part | {"query": part["query"][:, :, 150:]}
    last = derive(few, {name: a[1:2, :, (150 if "query" in name else 0) : 200] for name, a in tangents.items()})
    for a, b in zip(last, alone, strict=True):
        assert_same_bits(a, b[:, :, 150:])


def test_strides_and_given_results_change_no_bit(rng: np.random.Generator) -> None:
    call = qkv(rng, np.float32, (2, 3, 50, 20), (2, 3, 70, 20), (2, 3, 70, 18))
    call |= {"bias": rng.standard_normal((50, 70)).astype(np.float32)}
    tangents = direction(call)

    def odd(a: np.ndarray) -> np.ndarray:  # reversed, transposed, every third
        wide = np.zeros((*a.shape[:-2], a.shape[-1] * 3, a.shape[-2]), a.dtype)
        view = wide[..., ::-3, ::-1].swapaxes(-1, -2)
        view[...] = a
        return view

    expected, gradients = derive(call, tangents), second(call, tangents)
    strided = {name: odd(a) for name, a in tangents.items()}
    forward = cattn.scaled_dot_product_attention(**call, return_lse=np.float64)
    for actual in (derive(call, strided), derive(call, tangents, out=odd(forward.out), lse=forward.lse)):
        assert_same_bits(actual.out_tangent, expected.out_tangent)
        assert_same_bits(actual.lse_tangent, expected.lse_tangent)
    for a, b in zip(second(call, strided)[:4], gradients[:4], strict=True):
        assert_same_bits(a, b)


# ---- hidden keys ---------------------------------------------------------------------------------------------------


def test_a_poisoned_query_spoils_its_row_only(rng: np.random.Generator) -> None:
    call = qkv(rng, np.float64, (2, 60, 8), (2, 70, 8), (2, 70, 5)) | {"is_causal": True, "query_offset": 0}
    tangents = direction(call)
    right = derive(call, tangents)
    tangents["query_tangent"][:, 20] = NAN
    result = derive(call, tangents)
    others = np.arange(60) != 20
    assert np.isnan(result.out_tangent[:, 20]).all()
    assert_same_bits(result.out_tangent[:, others], right.out_tangent[:, others])
    grads, expected = second(call, tangents), None
    tangents["query_tangent"][:, 20] = 0
    expected = second(call, tangents)
    assert_same_bits(grads.key[:, 21:], expected.key[:, 21:])  # hidden from query 20
    assert np.isnan(grads.key[:, :21]).all()


# ---- errors --------------------------------------------------------------------------------------------------------
X = np.ones((3, 4))
WRONG: dict[str, tuple[Any, type[Exception], str]] = {
    "shape": ({"query_tangent": X[:2]}, ValueError, r"query_tangent has shape \(2, 4\), query has \(3, 4\)"),
    "dtype": (
        {"query": X.astype("f4"), "key": X.astype("f4"), "value": X.astype("f4"), "key_tangent": X}, TypeError,
        r"key_tangent has dtype float64, its input float32: pass key_tangent.astype\('float32'\)",
    ),
    "no bias": ({"bias_tangent": X}, ValueError, "bias_tangent is given without a bias or a float attn_mask"),
    "boolean mask": (
        {"attn_mask": np.ones((3, 3), bool), "bias_tangent": X[:, :3]}, ValueError, "without a bias or a float"
    ),
    "no sinks": ({"sinks_tangent": X[0]}, ValueError, "sinks_tangent is given without sinks"),
    "generator": (
        {"dropout_p": 0.5, "rng": np.random.default_rng(0)}, ValueError, "rng must be the int that draws the dropout"
    ),
    "no seed": ({"dropout_p": 0.5}, ValueError, "rng must be the int"),
    "out alone": ({"out": X}, ValueError, "out is given without lse: pass both results of the forward pass"),
    "lse alone": ({"lse": X[:, 0]}, ValueError, "lse is given without out: pass both"),
    "lists": ({"key_indices": [[0]]}, TypeError, "'key_indices': pass a boolean attn_mask of the listed keys"),
    "quantized key": ({"key": cattn.quantize(X)}, TypeError, r"key is quantized .* pass cattn\.dequantize\(key\)"),
    "quantized value": ({"value": cattn.quantize(X)}, TypeError, r"value is quantized and has no tangent"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_are_named(name: str) -> None:
    keywords, error, text = WRONG[name]
    with pytest.raises(error, match=text):
        cattn.attention_jvp(**{"query": X, "key": X, "value": X} | keywords)


def test_results_of_another_call_are_an_error() -> None:
    call = {"query": X, "key": X, "value": X}
    result = derive(call, direction(call))
    given = cotangents(result) | results_of(result) | {"lse": result.lse + 1}
    with pytest.raises(ValueError, match="lse is not that of these arguments"):
        cattn.attention_jvp_backward(**given, **call)
    for name in ("out_tangent", "lse_tangent", "grad_out_tangent", "grad_lse_tangent"):
        wrong = given | {name: given[name][:2]}
        with pytest.raises(ValueError, match=rf"^{name} has shape"):
            cattn.attention_jvp_backward(**wrong, **call)


CASES = {
    "plain": {},
    "causal": {"is_causal": "lower_right"},
    "mask": {"attn_mask": np.tri(40, 30, 5, dtype=bool), "softcap": 3.0},
    "dropout": {"dropout_p": 0.3, "rng": 5},
    "starts": {
        "key_value_seq_starts": [3, 0],
        "key_value_seq_lengths": [30, 20],
        "window_size": (9, 9),
        "query_offset": 0,
    },
    "blocks": {"block_mask": cattn.BlockMask(np.tri(5, 4, dtype=bool), 8), "alibi_slopes": [0.1, 0.2, 0.3, 0.4]},
}


@pytest.mark.parametrize("dtype", [np.float32, np.float64, *HALVES], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_tangents_of_another_call_are_an_error(name: str, dtype: Any, rng: np.random.Generator) -> None:
    """Each tangent forgotten, and another one in its place; the results of the call itself are taken."""
    call = qkv(rng, dtype, (2, 4, 40, 8), (2, 2, 30, 8), (2, 2, 30, 8)) | CASES[name]
    wide = np.float64 if dtype == np.float64 else np.float32
    call |= {"bias": rng.standard_normal((40, 30)).astype(wide), "sinks": rng.standard_normal(4).astype(wide)}
    tangents = direction(call)
    result = derive(call, tangents)
    given = cotangents(result) | results_of(result)
    cattn.attention_jvp_backward(**given, **call, **tangents)
    for tangent, own in tangents.items():
        for other in (None, np.roll(own, 1, 0) + own.dtype.type(1)):
            which = "out_tangent" if tangent == "value_tangent" else "(out|lse)_tangent"
            with pytest.raises(ValueError, match=rf"^{which} is not the derivative .* at \(\d, \d, \d+\)\. Pass every"):
                cattn.attention_jvp_backward(**given, **call, **tangents | {tangent: other})


@pytest.mark.parametrize("dtype", [np.float32, *HALVES], ids=str)
def test_tangents_that_vanish_are_no_error(dtype: Any, rng: np.random.Generator) -> None:
    """The large parts of S' cancel, outputs are subnormal, hidden keys are NaN; results of cattn and exact ones."""
    call = qkv(rng, dtype, (40, 8), (30, 8), (30, 8))
    tangents = {"query_tangent": -call["query"], "key_tangent": call["key"].copy()}
    tiny = call | {"value": (call["value"] * 2.0**-20).astype(dtype)}
    hidden = call | {"attn_mask": np.arange(30) % 3 > 0, "key": call["key"].copy()}
    hidden["key"][::3] = np.nan
    for case in (call, tiny, hidden):
        result = derive(case, tangents)
        exact = reference.attention_jvp(**case, **tangents, return_lse=True)
        given = cotangents(result)
        rounded = {x: a.astype(b.dtype) for (x, a), b in zip(results_of(exact).items(), result, strict=True)}
        for results in (results_of(result), rounded):
            cattn.attention_jvp_backward(**given, **results, **case, **tangents)


def test_the_reference_has_the_same_signatures() -> None:
    parameters = inspect.signature(reference.attention_jvp).parameters
    assert [name for name in parameters if name.endswith("_tangent")] == TANGENTS
    result = reference.attention_jvp(X, X, X, query_tangent=X)
    assert result.lse is None
    assert result.lse_tangent is None


@pytest.mark.parametrize("module", [cattn, reference])
@pytest.mark.parametrize("name", ["query", "key", "value", *TANGENTS])
def test_quantized_arrays_are_refused_by_name(module: Any, name: str) -> None:
    text = rf"^{name} (is quantized and has no tangent|must be an array of real numbers).*: pass cattn.dequantize"
    call = {"query": X, "key": X, "value": X, name: cattn.quantize(X)}
    if name in ("bias_tangent", "sinks_tangent"):
        call |= {"bias": X[:, :3], "sinks": X[0, :1]}
    with pytest.raises(TypeError, match=text):
        module.attention_jvp(**call)
    with pytest.raises(TypeError, match=text):
        module.attention_jvp_backward(X, out=X, lse=X[:, 0], out_tangent=X, lse_tangent=X[:, 0], **call)


def test_packed_sequences_are_called_one_by_one(rng: np.random.Generator) -> None:
    """As the error says."""
    starts = np.array([0, 9, 9, 30])
    packed = {name: rng.standard_normal((30, 2, 8)).astype(np.float32) for name in ("query", "key", "value")}
    for function in (cattn.attention_jvp, cattn.attention_jvp_backward):
        with pytest.raises(TypeError, match="cu_seqlens_q': packed sequences have no tangents: call it for each"):
            function(**packed, cu_seqlens_q=starts)
    expected = cattn.varlen_attention(**packed, cu_seqlens_q=starts, cu_seqlens_k=starts)
    for begin, end in itertools.pairwise(starts):
        call = {name: a[begin:end].swapaxes(0, 1) for name, a in packed.items()}
        result = derive(call, direction(call))
        assert_same_bits(result.out.swapaxes(0, 1), expected[begin:end])
        assert result.out_tangent.shape == result.out.shape
