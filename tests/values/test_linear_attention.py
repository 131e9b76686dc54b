"""Linear attention with a state and the short convolution: values, gradients, errors."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

import cattn
from cattn import functional, reference
from support.calls import LIMITS, again, from_rng
from support.functions import FUNCTIONS, arrays, assert_near

NAMES = ("linear_attention", "linear_attention_backward", "causal_conv", "causal_conv_backward")
RULES = list(itertools.product((None, "token", "row"), (False, True)))


def tolerance(call: dict[str, Any]) -> float:
    size = min(x.dtype.itemsize for x in call.values() if isinstance(x, np.ndarray) and x.dtype.kind in "fV")
    return {8: 1e-10, 4: 1e-4, 2: 4e-2}[size]


def widened(call: dict[str, Any]) -> dict[str, Any]:
    def wide(x: Any) -> Any:
        return x.astype(np.float64) if isinstance(x, np.ndarray) and x.dtype.kind in "fV" else x

    return {name: wide(x) for name, x in call.items() if name not in ("out", "state_out")}


def test_random_calls_are_those_of_the_reference() -> None:
    """Of each function, each storage and each rule some that are longer than two blocks of tokens."""
    for name, seed in itertools.product(NAMES, range(40)):
        function, make = FUNCTIONS[name]
        call = make(from_rng(np.random.default_rng(seed)), LIMITS)
        wanted = getattr(reference, name)(**widened(call))
        assert_near(arrays(function(**again(call))), arrays(wanted), tolerance(call))


def test_sums_have_the_documented_order() -> None:
    """2**24 + 1 is 2**24 in float32, so sums that begin with the ones would be larger."""
    key = np.zeros((1, 130), np.float32)
    key[0, ::16] = 1
    query = np.where(np.arange(130) == 0, np.float32(2**24), np.float32(1))[None]
    assert cattn.linear_attention(query, key, np.ones((1, 1), np.float32), scale=1.0) == 2**24
    x, grad = np.ones((20, 1), np.float32), np.ones((20, 1), np.float32)
    grad[0] = 2**24
    of_weight = functional.causal_conv_backward(grad, x, np.ones((1, 1), np.float32))[1]
    assert of_weight == np.float32(2**24 + 19), "the sum over tokens is one of float64"


def test_a_state_of_very_many_rows_or_columns_is_computed_in_shorter_blocks() -> None:
    """No bit differs from one token at a time, and gradients are right."""
    rng = np.random.default_rng(1)
    for d_k, d_v in ((17000, 1), (1, 17000)):
        q, k, v = (rng.standard_normal((17, d)).astype(np.float32) / np.float32(d**0.5) for d in (d_k, d_k, d_v))
        decay, beta = -rng.random((17, d_k)).astype(np.float32), rng.random(17)
        whole, last = cattn.linear_attention(q, k, v, decay=decay, beta=beta, return_state=True)
        state = None
        for t in range(17):
            now = [x[t : t + 1] for x in (q, k, v, decay, beta)]
            step = cattn.linear_attention(*now[:3], decay=now[3], beta=now[4], state=state, return_state=True)
            state = step.state
            np.testing.assert_array_equal(step.out, whole[t : t + 1])
        np.testing.assert_array_equal(state, last)
        grads, right = (
            m.linear_attention_backward(v, q, k, v, decay=decay[:, 0], beta=beta) for m in (functional, reference)
        )
        assert_near(arrays(grads), arrays(right), 1e-4)


def test_a_convolution_of_a_very_large_width_is_computed_in_parts_of_the_channels() -> None:
    rng, width = np.random.default_rng(1), 70000
    x, weight, bias = (rng.standard_normal(shape).astype(np.float32) for shape in ((3, 70), (70, 3), 70))
    wide = np.broadcast_to(np.float32(7), (70, width)).copy()
    wide[:, -3:] = weight  # the factors before them meet no token
    for given in (wide, np.asfortranarray(wide)):
        found = functional.causal_conv(x, given, bias, activation="silu")
        np.testing.assert_array_equal(found, functional.causal_conv(x, weight, bias, activation="silu"))


@pytest.mark.parametrize(("decay", "beta"), RULES)
def test_gradients_are_the_derivative_of_the_reference(decay: str | None, beta: bool) -> None:
    """By complex steps, which lose no digit."""
    rng = np.random.default_rng(1)
    shapes = {"query": (2, 3, 7, 20), "key": (2, 3, 7, 20), "value": (2, 3, 7, 70), "state": (2, 3, 20, 70)}
    call = {name: rng.standard_normal(shape) / 3 for name, shape in shapes.items()}
    if decay is not None:
        call["decay"] = -rng.random((2, 3, 7) if decay == "token" else (2, 3, 7, 20))
    if beta:
        call["beta"] = rng.random((2, 3, 7))
    out = cattn.linear_attention(**call, return_state=True)
    weights = [rng.standard_normal(x.shape) for x in out]
    grads = functional.linear_attention_backward(weights[0], **call, grad_state=weights[1])
    for name, x in call.items():
        direction = rng.standard_normal(x.shape)
        slope = loss({**call, name: x + 1e-30j * direction}, weights).imag / 1e-30
        assert np.isclose((getattr(grads, name) * direction).sum(), slope, rtol=1e-10), name


def loss(call: dict[str, Any], weights: list[np.ndarray]) -> Any:
    """Return a weighted sum of the results of the recurrence, for complex numbers too."""
    state, total = call["state"], 0
    for t in range(call["query"].shape[2]):
        q, k, v = (call[name][:, :, t] for name in ("query", "key", "value"))
        if "decay" in call:
            decay = np.exp(call["decay"][:, :, t])
            state = state * (decay[..., None] if decay.ndim == 3 else decay[..., None, None])
        if "beta" in call:
            v = call["beta"][:, :, t, None] * (v - np.einsum("bhkv,bhk->bhv", state, k))
        state = state + k[..., None] * v[..., None, :]
        total = total + (weights[0][:, :, t] * np.einsum("bhkv,bhk->bhv", state, q)).sum() / np.sqrt(20)
    return total + (weights[1] * state).sum()


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_new_states_begin_at_a_cache_line(dtype: Any) -> None:
    kept = []
    for n in (0, 1, 3, 500):
        x = np.ones((n, 5, 4), dtype)
        for state in (
            cattn.linear_attention(x, x, x, return_state=True).state,
            functional.causal_conv(x, np.ones((4, 3)), return_state=True).state,
        ):
            assert state.ctypes.data % 64 == 0
            assert state.flags.c_contiguous
            assert state.flags.writeable
            kept.append(state)


def test_a_positive_decay_grows_the_state() -> None:
    x = np.ones((3, 1), np.float32)
    for decay in (0.5, 60.0, 88.7, 89.0, np.inf):
        out = cattn.linear_attention(x[:2], x[:2], x[:2], decay=[0.0, decay], scale=1.0)
        with np.errstate(over="ignore"):
            assert np.allclose(out[1, 0], np.exp(np.float32(decay)) + 1, rtol=3e-7)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"key": np.ones((2, 5, 9))}, "key has d_k 9, query has 8"),
        ({"value": np.ones((2, 6, 3))}, "value has T 6, query has 5"),
        ({"decay": np.ones(4)}, r"decay has shape \(4,\), which does not broadcast to \(..., T\) \(2, 5\)"),
        ({"beta": np.ones((3, 5))}, r"beta has shape \(3, 5\), which does not broadcast"),
        ({"state": np.ones((2, 8, 4))}, r"state has shape \(2, 8, 4\), which does not broadcast to the states' shape"),
        ({"seq_lengths": 6}, "seq_lengths must be between 0 and 5, got 6"),
        ({"seq_lengths": 5, "cu_seqlens": [0, 5]}, "seq_lengths and cu_seqlens exclude each other"),
        ({"cu_seqlens": [0, 4]}, r"cu_seqlens must start with 0, never fall and end with 5, got \[0, 4\]"),
        ({"layout": "thd"}, "layout must be 'bhtd' or 'bthd', got 'thd'"),
        ({"state_out": np.ones((2, 8, 4))}, r"state_out has shape \(2, 8, 4\), the result has \(2, 8, 3\)"),
        ({"scale": np.inf}, "scale must be finite, got inf"),
        ({"query": np.ones(8)}, r"query must have at least 2 dimensions \(..., T, d_k\), got 1"),
    ],
)
def test_a_wrong_argument_is_named(changes: dict[str, Any], says: str) -> None:
    call = {"query": np.ones((2, 5, 8)), "key": np.ones((2, 5, 8)), "value": np.ones((2, 5, 3))}
    with pytest.raises(ValueError, match=says):
        cattn.linear_attention(**{**call, **changes})


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"weight": np.ones((3, 4))}, r"weight must have shape \(C, K\) with C = 6 channels"),
        ({"bias": np.ones(5)}, r"bias must have one number for each column of x, shape \(6,\), got shape \(5,\)"),
        ({"state": np.ones((2, 6))}, r"state has shape \(2, 6\), which does not broadcast to \(..., K - 1, C\)"),
        ({"activation": "relu"}, "activation must be None or 'silu', got 'relu'"),
        ({"x": np.ones(6)}, "x must have at least 2 dimensions"),
    ],
)
def test_a_wrong_argument_of_the_convolution_is_named(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        functional.causal_conv(**{"x": np.ones((5, 6)), "weight": np.ones((6, 4)), **changes})


def test_numbers_of_heads_must_divide() -> None:
    x = {n: np.ones((1, n, 5, 4)) for n in (0, 1, 2, 3, 4)}
    with pytest.raises(ValueError, match=r"key has 2 heads .* value has 3: one must be a multiple"):
        cattn.linear_attention(x[2], x[2], x[3])
    with pytest.raises(ValueError, match=r"query has 3 heads .* the states have 4"):
        cattn.linear_attention(x[3], x[2], x[4])
    for query, states in ((3, 0), (0, 1), (0, 2)):
        with pytest.raises(ValueError, match=rf"query has {query} heads .* the states have {states}"):
            cattn.linear_attention(x[query], x[states], x[states])
        with pytest.raises(ValueError, match=rf"query has {query} heads .* the states have {states}"):
            functional.linear_attention_backward(x[query], x[query], x[states], x[states])
    assert cattn.linear_attention(x[0], x[0], x[0]).shape == (1, 0, 5, 4)
