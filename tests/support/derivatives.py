"""Gradients and tangents of attention: a call with its passes, the reference's results, and every option alone."""

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


def random_gradients(call: Call, seed: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Return random gradients of the output and of the log-sum-exp."""
    rng, result = np.random.default_rng(seed), forward(call)
    return rng.standard_normal(result.out.shape).astype(result.out.dtype), rng.standard_normal(result.lse.shape)


def backward(call: Call, grad_out: Any = None, grad_lse: Any = None, **others: Any) -> cattn.AttentionGradients:
    """Return the gradients of a call, after its own forward pass."""
    result = forward(call)
    if grad_out is None:
        grad_out, _ = random_gradients(call)
    return cattn.attention_backward(grad_out, out=result.out, lse=result.lse, grad_lse=grad_lse, **call, **others)


def right(call: Call, grad_out: np.ndarray, grad_lse: np.ndarray | None) -> cattn.AttentionGradients:
    result = reference.scaled_dot_product_attention(**call, return_lse=True)
    assert isinstance(result, cattn.AttentionOutput)
    return reference.attention_backward(grad_out, out=result.out, lse=result.lse, grad_lse=grad_lse, **call)


def arguments(call: Call) -> dict[str, Any]:
    """Return the arguments that have a gradient, under the name of the gradient."""
    found = {name: call[name] for name in ("query", "key", "value")}
    for name in ("attn_mask", "bias"):
        if call.get(name) is not None and np.asarray(call[name]).dtype.kind == "f":
            found["bias"] = call[name]
    return found | {name: call[name] for name in ("sinks", "gate") if name in call}


def check(call: Call, rtol: float) -> None:
    """Assert that the reference agrees, up to rtol times the largest number of each gradient; with and without lse."""
    grad_out, grad_lse = random_gradients(call)
    for of_lse in (None, grad_lse):
        actual, expected = backward(call, grad_out, of_lse), right(call, grad_out, of_lse)
        for name in FIELDS:
            a, b = getattr(actual, name), getattr(expected, name)
            assert (a is None) == (b is None) == (name not in arguments(call)), name
            if a is not None:
                assert a.shape == np.shape(arguments(call)[name]), name
                tolerance = rtol * (1 + np.abs(b).max(initial=0))
                np.testing.assert_allclose(a, b, rtol=0, atol=tolerance, err_msg=f"{name} of {list(call)}")


# ---- tangents ------------------------------------------------------------------------------------------------------
MOVING = [name for name in FIELDS if name != "gate"]  # what may have a tangent
TANGENTS = [f"{name}_tangent" for name in MOVING]


def direction(call: Call, seed: int = 2, names: Any = MOVING) -> Call:
    """Return random tangents of the inputs, each with the shape and type of its input."""
    rng = np.random.default_rng(seed)
    found = {name: np.asarray(a) for name, a in arguments(call).items()}
    own = {name: rng.standard_normal(a.shape).astype(a.dtype) for name, a in found.items()}
    return {f"{name}_tangent": own[name] for name in own if name in names}


def derive(call: Call, tangents: Call, **more: Any) -> cattn.AttentionTangents:
    return cattn.attention_jvp(**call, **tangents, return_lse=True, **more)


def results_of(result: cattn.AttentionTangents) -> Call:
    return dict(zip(result._fields, result, strict=True))


def second(call: Call, tangents: Call, seed: int = 3, **more: Any) -> cattn.AttentionGradients:
    """Return the gradients of a random function of the derivatives."""
    result = cattn.attention_jvp(**call, **tangents, return_lse=np.float64)
    given = cotangents(result, seed)
    return cattn.attention_jvp_backward(**given, **call, **tangents, **results_of(result), **more)


def cotangents(result: Any, seed: int = 3) -> Call:
    rng = np.random.default_rng(seed)
    grad_out = rng.standard_normal(result.out.shape).astype(result.out.dtype)
    return {"grad_out_tangent": grad_out, "grad_lse_tangent": rng.standard_normal(result.lse.shape)}


def check_tangents(call: Call, tangents: Call, rtol: float) -> None:
    """Assert that the reference agrees, up to rtol times the largest number of each array."""
    actual = derive(call, tangents)
    expected = reference.attention_jvp(**call, **tangents, return_lse=True)
    _compare(actual, expected, rtol, call)
    given = cotangents(actual)
    of_expected = reference.attention_jvp_backward(**given, **call, **tangents, **results_of(expected))
    _compare(second(call, tangents), of_expected, rtol, call)


def _compare(actual: Any, expected: Any, rtol: float, call: Call) -> None:
    for name, a, b in zip(actual._fields, actual, expected, strict=True):
        assert (a is None) == (b is None), name
        if a is not None:
            assert a.shape == b.shape, name
            finite = b[np.isfinite(b)]
            tolerance = rtol * (1 + np.abs(finite).max(initial=0))
            np.testing.assert_allclose(a, b, rtol=0, atol=tolerance, err_msg=f"{name} of {list(call)}")


# ---- calls ---------------------------------------------------------------------------------------------------------
def qkv(rng: np.random.Generator, dtype: Any, *shapes: tuple[int, ...]) -> Call:
    names = ("query", "key", "value")
    return {name: rng.standard_normal(shape).astype(dtype) for name, shape in zip(names, shapes, strict=True)}


def shaped(rng: np.random.Generator, dtype: Any, name: str, extra: str) -> Call:
    """Return a call of one of SHAPES, plain, causal, or with sinks and bias."""
    call = qkv(rng, dtype, *SHAPES[name])
    heads = max(a.shape[-3] if a.ndim > 3 else 1 for a in call.values())
    T_q, T_k = call["query"].shape[-2], call["key"].shape[-2]
    if extra == "sinks and bias":
        numbers = {"sinks": rng.standard_normal(heads), "bias": rng.standard_normal((T_q, T_k))}
        call |= {name: a.astype(dtype) for name, a in numbers.items()}
    return call | ({"is_causal": "lower_right"} if extra == "causal" else {})


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


def gated(rng: np.random.Generator, B: int, H: int, T_q: int, D_v: int) -> dict[str, Call]:
    """Return gates of every shape, and with other options."""
    gate = 3 * rng.standard_normal((B, H, T_q, D_v))
    return {
        "gate": {"gate": gate},
        "gate of heads": {"gate": gate[..., :1], "is_causal": "upper_left"},
        "gate of columns": {"gate": gate[0, 0, 0], "sinks": rng.standard_normal(H)},
        "gate of all heads": {"gate": gate[:, :1], "dropout_p": 0.3, "rng": 7},
        "gate of hidden rows": {"gate": gate, "query_seq_lengths": rng.integers(0, T_q, B)},
        "gate far from 0": {"gate": 100 * gate, "softcap": 3.0},
    }


NAMES = list(options(np.random.default_rng(0), 1, 1, 1, 1))
GATES = list(gated(np.random.default_rng(0), 1, 1, 1, 1))
TOLERANCE = {np.float32: 2e-5, np.float64: 1e-13}


SHAPES = {
    "two dimensions": ((130, 8), (70, 8), (70, 5)),
    "three dimensions": ((3, 10, 8), (3, 200, 8), (3, 200, 33)),
    "five dimensions": ((2, 1, 3, 4, 7), (1, 3, 3, 20, 7), (20, 33)),
    "groups": ((2, 8, 100, 16), (2, 2, 200, 16), (2, 2, 200, 16)),
    "one key head": ((2, 6, 40, 16), (2, 1, 40, 16), (1, 1, 40, 16)),
    "one query": ((2, 3, 1, 16), (2, 3, 400, 16), (2, 3, 400, 16)),
    "one value head": ((2, 3, 5, 16), (2, 3, 9, 16), (2, 1, 9, 1)),
    "one query for all": ((1, 1, 5, 16), (2, 3, 9, 16), (3, 9, 2)),
    "no queries": ((2, 0, 8), (2, 9, 8), (2, 9, 3)),
    "no keys": ((2, 9, 8), (2, 0, 8), (2, 0, 3)),
    "no keys, work for several threads": ((2, 3, 8000, 8), (2, 3, 0, 8), (2, 3, 0, 8)),
    "no batch": ((0, 9, 8), (0, 5, 8), (0, 5, 3)),
    "no head_dim": ((2, 9, 0), (2, 5, 0), (2, 5, 3)),
    "no d_v": ((2, 9, 4), (2, 5, 4), (2, 5, 0)),
}
