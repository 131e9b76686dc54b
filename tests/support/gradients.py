"""Gradients of attention: a call with its backward pass, the reference's gradients, and every option alone."""

from __future__ import annotations

from typing import Any

import numpy as np

import cattn
from cattn import reference
from support import INF

Call = dict[str, Any]
FIELDS = cattn.AttentionGradients._fields


def forward(call: Call) -> cattn.AttentionOutput:
    result: cattn.AttentionOutput = cattn.scaled_dot_product_attention(**call, return_lse=True)
    return result


def backward(call: Call, grad_out: Any = None, seed: int = 1) -> cattn.AttentionGradients:
    """Return the gradients of a call, after its own forward pass."""
    result = forward(call)
    if grad_out is None:
        grad_out = np.random.default_rng(seed).standard_normal(result.out.shape).astype(result.out.dtype)
    return cattn.attention_backward(grad_out, out=result.out, lse=result.lse, **call)


def right(call: Call, grad_out: np.ndarray) -> cattn.AttentionGradients:
    result = reference.scaled_dot_product_attention(**call, return_lse=True)
    assert isinstance(result, cattn.AttentionOutput)
    return reference.attention_backward(grad_out, out=result.out, lse=result.lse, **call)


def arguments(call: Call) -> dict[str, Any]:
    """Return the arguments that have a gradient, under the name of the gradient."""
    found = {name: call[name] for name in ("query", "key", "value")}
    for name in ("attn_mask", "bias"):
        if call.get(name) is not None and np.asarray(call[name]).dtype.kind == "f":
            found["bias"] = call[name]
    return found | ({"sinks": call["sinks"]} if "sinks" in call else {})


def check(call: Call, rtol: float) -> None:
    """Assert that the reference agrees, up to rtol times the largest number of each gradient."""
    shape = forward(call).out.shape
    grad_out = np.random.default_rng(1).standard_normal(shape).astype(np.asarray(call["query"]).dtype)
    actual, expected = backward(call, grad_out), right(call, grad_out)
    for name in FIELDS:
        a, b = getattr(actual, name), getattr(expected, name)
        assert (a is None) == (b is None) == (name not in arguments(call)), name
        if a is not None:
            assert a.shape == np.shape(arguments(call)[name]), name
            tolerance = rtol * (1 + np.abs(b).max(initial=0))
            np.testing.assert_allclose(a, b, rtol=0, atol=tolerance, err_msg=f"{name} of {list(call)}")


# ---- calls ---------------------------------------------------------------------------------------------------------
def qkv(rng: np.random.Generator, dtype: Any, *shapes: tuple[int, ...]) -> Call:
    names = ("query", "key", "value")
    return {name: rng.standard_normal(shape).astype(dtype) for name, shape in zip(names, shapes, strict=True)}


def options(rng: np.random.Generator, B: int, H: int, T_q: int, T_k: int) -> dict[str, Call]:
    """Return every option alone, for shapes (B, H, T_q, T_k)."""
    mask = rng.random((B, 1, T_q, T_k)) < 0.4
    hiding = np.where(rng.random((T_q, T_k)) < 0.3, -INF, rng.standard_normal((T_q, T_k)))
    return {
        "plain": {},
        "causal": {"is_causal": "lower_right"},
        "causal from the left": {"is_causal": "upper_left"},
        "offset": {"is_causal": True, "query_offset": np.arange(B) - 3},
        "window": {"is_causal": "upper_left", "window_size": (7, 2)},
        "lengths": {"query_seq_lengths": rng.integers(0, T_q, B), "key_value_seq_lengths": rng.integers(0, T_k, B)},
        "starts": {"key_value_seq_starts": rng.integers(0, T_k, B), "is_causal": "lower_right"},
        "softcap": {"softcap": 1.5},
        "slopes": {"alibi_slopes": cattn.get_alibi_slopes(H)},
        "scale": {"scale": -0.3},
        "sinks": {"sinks": rng.standard_normal(H)},
        "sinks of each": {"sinks": np.where(rng.random((B, H)) < 0.3, -INF, rng.standard_normal((B, H)))},
        "mask": {"attn_mask": mask},
        "float mask": {"attn_mask": hiding},
        "bias": {"bias": rng.standard_normal((B, H, T_q, T_k))},
        "bias of all heads": {"bias": rng.standard_normal((B, 1, T_q, T_k)), "softcap": 3.0},
        "bias of all": {"bias": hiding},
        "bias of keys": {"bias": rng.standard_normal((H, 1, T_k))},
        "bias of queries": {"bias": rng.standard_normal((B, 1, T_q, 1))},
        "bias of heads": {"bias": rng.standard_normal((H, 1, 1))},
        "mask and bias": {"attn_mask": mask, "bias": rng.standard_normal((B, 1, 1, T_k))},
        "two biases": {"attn_mask": hiding, "bias": rng.standard_normal((1, H, T_q, T_k))},
        "dropout": {"dropout_p": 0.3, "rng": 7},
        "all dropped": {"dropout_p": 1.0, "rng": 7},
    }


NAMES = list(options(np.random.default_rng(0), 1, 1, 1, 1))
TOLERANCE = {np.float32: 2e-5, np.float64: 1e-13}
