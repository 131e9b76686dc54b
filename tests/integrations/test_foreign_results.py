"""Gradients for the results of another forward pass are refused, and gradients for the right one never."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import cattn
from support import assert_same_bits, quiet
from support.calls import calls
from support.derivatives import Call, forward, options, qkv

FORGOTTEN: dict[str, dict[str, Any]] = {
    name: call
    for name, call in options(np.random.default_rng(3), 2, 3, 130, 250).items()
    if name not in ("plain", "all dropped", "offset")
} | {
    "dropout": {"dropout_p": 0.3, "rng": 7, "is_causal": "upper_left"},
    "sinks": {"sinks": np.array([1.0, 4.0, 3.0])},
    "sinks of each": {"sinks": np.full((2, 3), 4.0)},
}


@pytest.mark.promise("forgotten options")
@pytest.mark.parametrize("name", FORGOTTEN)
def test_a_forgotten_option_is_an_error(name: str, dtype: Any, rng: np.random.Generator) -> None:
    """In both directions: the forward pass has the option, or the backward pass."""
    plain = qkv(rng, dtype, (2, 3, 130, 20), (2, 3, 250, 20), (2, 3, 250, 9))
    extra = FORGOTTEN[name] if name != "dropout" else {"dropout_p": 0.3, "rng": 7}
    common = {"is_causal": "upper_left"} if name == "dropout" else {}
    both = plain | common, plain | common | extra
    for first, call in (both, both[::-1]):
        result = forward(first)
        grad_out = rng.standard_normal(result.out.shape).astype(dtype)
        # where an option changes the weights of the first rows a little, their output shows it first
        wrong = "out is not the output" if name == "dropout" else "(lse is not that|out is not the output)"
        with pytest.raises(
            ValueError, match=f"^{wrong} of these arguments.*Pass .*every option of the forward pass.*merged=True"
        ):
            cattn.attention_backward(grad_out, out=result.out, lse=result.lse, **call)
        merged = cattn.attention_backward(grad_out, out=result.out, lse=result.lse, merged=True, **call)
        assert merged.query.shape == plain["query"].shape


@pytest.mark.promise("forgotten options")
@given(calls(), st.integers(0, 2**32), st.sampled_from([0.01, 1.0, 30.0]), st.sampled_from(["own", "lse", "out"]))
def test_right_results_are_never_refused(case: tuple[Call, type], seed: int, size: float, rounded: str) -> None:
    """Also if other software has rounded lse or out to bfloat16, and the bits are the same as without the check."""
    call, _ = case
    for name in ("query", "key", "value"):
        call[name] = (call[name].astype(np.float64) * size).astype(call[name].dtype)
    result, rng = forward(call), np.random.default_rng(seed)
    out, lse = result.out, result.lse
    if rounded == "lse":
        lse = quiet(quiet(lse, ml_dtypes.bfloat16), lse.dtype)
    if rounded == "out":
        out = quiet(quiet(out, ml_dtypes.bfloat16), out.dtype)
    results: dict[str, Any] = {"out": out, "lse": lse}
    if seed % 2:
        results["grad_lse"] = rng.standard_normal(lse.shape)
    grad_out = rng.standard_normal(out.shape).astype(out.dtype)
    grads = cattn.attention_backward(grad_out, **results, **call)
    for actual, expected in zip(grads, cattn.attention_backward(grad_out, merged=True, **results, **call), strict=True):
        if actual is not None:
            assert_same_bits(actual, expected)


@pytest.mark.promise("forgotten options")
def test_packed_sequences_are_checked_in_their_own_rows(rng: np.random.Generator) -> None:
    query, key, value = rng.standard_normal((3, 300, 2, 8), dtype=np.float32)
    edges = [0, 0, 100, 300]
    packed = {"query": query, "key": key, "value": value, "cu_seqlens_q": edges, "cu_seqlens_k": edges}
    result = cattn.varlen_attention(**packed, is_causal=True, return_lse=True)
    given = {"grad_out": np.ones_like(query), "out": result.out, "lse": result.lse}
    cattn.varlen_attention_backward(**given, **packed, is_causal=True)
    with pytest.raises(ValueError, match=r"^lse is not that of these arguments: at \(0, 0\) the weights sum to"):
        cattn.varlen_attention_backward(**given, **packed)
    given["lse"] = result.lse.copy()
    given["lse"][1, 299] += 1
    with pytest.raises(ValueError, match=r"^lse .* at \(1, 299\) the weights sum to 0.368, not to 1"):
        cattn.varlen_attention_backward(**given, **packed, is_causal=True)
    cattn.varlen_attention_backward(**given, **packed, is_causal=True, merged=True)


def test_a_row_that_does_not_fit_is_the_same_one_for_any_number_of_threads(rng: np.random.Generator) -> None:
    """And a generator of the stream stays where it was."""
    call = qkv(rng, np.float32, (2, 4, 400, 16), (2, 4, 400, 16), (2, 4, 400, 16)) | {"dropout_p": 0.1}
    result = forward(call | {"rng": cattn.TorchGenerator(1)})
    lse, texts = result.lse.copy(), set()
    lse[0, 2, 390] += 1
    lse[1, 1, 5:] += 1
    for threads in (1, 2, 5):
        generator = cattn.TorchGenerator(1)
        with cattn.num_threads(threads), pytest.raises(ValueError, match=r"^lse is not") as error:
            cattn.attention_backward(result.out, out=result.out, lse=lse, **call, rng=generator)
        texts.add(str(error.value))
        assert_same_bits(generator.get_state(), cattn.TorchGenerator(1).get_state())
    assert len(texts) == 1
    assert "at (0, 2, 390)" in texts.pop()
