"""assert_attention_close: right results of every dtype and option are close, and errors above rounding are not."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cattn
from cattn.testing import assert_attention_close

try:
    import torch
except ImportError:
    torch = None  # type: ignore[assignment]

needs_torch = pytest.mark.skipif(torch is None, reason="PyTorch is not installed")
Array = np.ndarray[Any, Any]

DTYPES: list[Any] = [np.float16, ml_dtypes.bfloat16, np.float32, np.float64]
OPTIONS: dict[str, dict[str, Any]] = {
    "causal": {"is_causal": True},
    "mask, bias and scale": {
        "attn_mask": np.tri(40, dtype=bool),
        "bias": np.linspace(-9, 9, 1600).reshape(40, 40).astype(np.float32),
        "scale": 0.7,
    },
    "softcap, slopes, sinks, window": {
        "softcap": 3.0,
        "alibi_slopes": [0.5, 0.1],
        "sinks": [1.0, -3.0],
        "window_size": (7, 0),
    },
    "lengths": {"key_value_seq_lengths": [40, 3], "query_seq_lengths": [40, 0]},
    "dropout": {"dropout_p": 0.4, "rng": 5},
    "dropout of PyTorch's stream": {"dropout_p": 0.4, "is_causal": True},
    "listed keys": {"key_indices": np.stack([np.arange(40), np.arange(40)[::-1], np.full(40, -1)], axis=-1)},
}


def inputs_of(dtype: Any, T: int = 40, size: float = 1.0) -> list[Array]:
    rng = np.random.default_rng(2)
    return [(size * rng.standard_normal((2, 2, T, 16))).astype(dtype) for _ in range(3)]


def with_stream(options: dict[str, Any]) -> dict[str, Any]:
    needs = options.get("dropout_p") and "rng" not in options
    return options | {"rng": cattn.TorchGenerator(3)} if needs else options


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: np.dtype(dtype).name)
@pytest.mark.parametrize("name", OPTIONS)
def test_right_results_are_close(name: str, dtype: Any) -> None:
    """Small and large scores; and each result is close by the bound of its own dtype only."""
    for size in (1.0, 6.0):
        arrays = inputs_of(dtype, size=size)
        out = cattn.scaled_dot_product_attention(*arrays, **with_stream(OPTIONS[name]))
        assert_attention_close(out, *arrays, **with_stream(OPTIONS[name]))
    if np.dtype(dtype).itemsize < 8:
        wide = [a.astype(np.float64) for a in arrays]
        with pytest.raises(AssertionError, match="rows are off"):
            assert_attention_close(out.astype(np.float64), *wide, **with_stream(OPTIONS[name]))


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: np.dtype(dtype).name)
def test_errors_above_the_bound_are_found(dtype: Any) -> None:
    """One weight of 40 dropped, and one element moved by a few units in the last place."""
    q, k, v = inputs_of(dtype)
    weights = cattn.attention_weights(*(a.astype(np.float64) for a in (q, k)))
    right = (weights @ v.astype(np.float64)).astype(dtype)
    assert_attention_close(right, q, k, v)
    weights[1, 0, 7, np.argsort(weights[1, 0, 7])[20]] = 0
    with pytest.raises(AssertionError, match=r"1 of 160 rows is off .*\n    row \(1, 0, 7\): ") as info:
        assert_attention_close((weights @ v.astype(np.float64)).astype(dtype), q, k, v)
    assert "all other rows are within" in str(info.value)

    limit = float(re.findall(r"the bound is (\S+)", str(info.value))[0])
    for factor, close in ((0.2, True), (4.0, False)):
        moved = right.astype(np.float64)
        moved[1, 0, 7] += factor * limit
        if close:
            assert_attention_close(moved.astype(dtype), q, k, v)
        else:
            with pytest.raises(AssertionError, match=r"row \(1, 0, 7\)"):
                assert_attention_close(moved.astype(dtype), q, k, v)


def test_the_bound_is_a_bound_and_not_far_from_the_errors() -> None:
    """Sums in float32, one after the other, in the worst order that NumPy can be made to take."""
    rng = np.random.default_rng(4)
    q, k, v = (np.abs(rng.standard_normal((300, 8), dtype=np.float32)) for _ in range(3))
    e = np.exp(np.cumsum(q[:, None] * k * np.float32(8**-0.5), axis=-1, dtype=np.float32)[..., -1])
    numerator = np.cumsum(e[..., None] * v, axis=1, dtype=np.float32)[:, -1]
    out = numerator / np.cumsum(e, axis=1, dtype=np.float32)[:, -1:]
    assert_attention_close(out, q, k, v)
    with pytest.raises(AssertionError, match="300 of 300 rows are off"):
        assert_attention_close(out * np.float32(1 + 2e-4), q, k, v)


def test_weights_in_halves_are_found_in_float32_and_allowed_in_halves() -> None:
    q, k, v = inputs_of(np.float32, T=200)
    weights = cattn.attention_weights(q, k).astype(ml_dtypes.bfloat16).astype(np.float32)
    with pytest.raises(AssertionError, match=r"of 800 rows are off .*\(float32\):\n(.*\n){5}    and \d+ more rows"):
        assert_attention_close(weights @ v, q, k, v)
    assert_attention_close(weights @ v, q, k, v, weights_dtype=ml_dtypes.bfloat16)
    half = [a.astype(ml_dtypes.bfloat16) for a in (q, k, v)]
    weights = cattn.attention_weights(*(a.astype(np.float32) for a in half[:2]))
    rounded = weights.astype(ml_dtypes.bfloat16).astype(np.float32) @ half[2].astype(np.float32)
    assert_attention_close(rounded.astype(ml_dtypes.bfloat16), *half)


def test_nan_and_infinity_have_to_stand_where_they_stand() -> None:
    q, k, v = inputs_of(np.float32)
    v[0, 0, 5, 2] = np.nan
    out = cattn.causal_attention(q, k, v)
    assert_attention_close(out, q, k, v, is_causal=True)
    with pytest.raises(AssertionError, match=r"35 of 160 rows .*\n    row \(0, 0, 5\): inf times the bound"):
        assert_attention_close(np.nan_to_num(out), q, k, v, is_causal=True)
    out[1, 1, 3] = np.nan
    with pytest.raises(AssertionError, match=r"row \(1, 1, 3\): inf times the bound.* got nan"):
        assert_attention_close(out, q, k, v, is_causal=True)


@needs_torch
@pytest.mark.parametrize("name", ["float16", "bfloat16", "float32", "float64"])
def test_tensors_are_close(name: str) -> None:
    q, k, v = (torch.from_numpy(a).to(getattr(torch, name)).requires_grad_() for a in inputs_of(np.float64, T=70))
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, torch.ones(70, 70).tril().bool())
    assert_attention_close(out, q, k, v, attn_mask=torch.ones(70, 70).tril().bool())
    with pytest.raises(AssertionError, match="rows are off"):
        assert_attention_close(out, q, k, v)


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda x: assert_attention_close(x[:2], x, x, x), AssertionError, r"out has shape \(2, 4\), wanted \(4, 4\)"),
        (lambda x: assert_attention_close(x.astype(int), x, x, x), TypeError, "out must be float16, bfloat16, "),
        (lambda x: assert_attention_close(x, x, x, x, return_lse=True), TypeError, "return_lse does not change"),
        (lambda x: assert_attention_close(x, x, x, x, causal=True), TypeError, "did you mean 'is_causal'"),
        (lambda x: assert_attention_close(x, x, x[:, :3], x), ValueError, "key"),
        (lambda x: assert_attention_close(x, x, x, x, compute_dtype=int), TypeError, "compute_dtype must be one of"),
    ],
)
def test_wrong_arguments_of_the_comparison(call: Callable[[Array], None], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        call(np.eye(4))
