"""Windows of the causal classes, and output projections without a bias."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import cattn

WINDOWED: dict[str, Callable[..., Any]] = {
    "causal": lambda **k: cattn.CausalAttention(6, 5, 64, 0.0, **k),
    "wrapper": lambda **k: cattn.MultiHeadAttentionWrapper(6, 5, 64, 0.0, 3, **k),
    "groups": lambda **k: cattn.MultiHeadAttention(6, 8, 64, 0.0, 4, num_kv_groups=2, out_bias=False, **k),
}


@pytest.mark.parametrize("name", WINDOWED)
def test_a_window_hides_the_tokens_before_it(name: str) -> None:
    x = np.random.default_rng(0).standard_normal((2, 12, 6))
    module = WINDOWED[name](window_size=cattn.sliding_window(4), dtype=np.float64, rng=1).eval()
    everything = WINDOWED[name](dtype=np.float64, rng=1).eval()
    context, weights = module(x, return_weights=True)
    near = np.arange(12)[:, None] - np.arange(12) < 4
    assert np.all(weights[..., ~near] == 0)
    expected = everything(x, return_weights=True)[1] * near
    np.testing.assert_allclose(weights, expected / expected.sum(-1, keepdims=True), rtol=1e-12)
    kv_heads, head_dim = module._kv_heads, module._head_dim
    cache = cattn.KVCache((2,), num_kv_heads=kv_heads, max_len=12, head_dim=head_dim, dtype=np.float64)
    steps = [module(x[:, t : t + 1], cache=cache) for t in range(12)]
    np.testing.assert_allclose(np.concatenate(steps, axis=1), context, rtol=1e-12)


@pytest.mark.parametrize("name", WINDOWED)
def test_gradients_through_a_window(name: str) -> None:
    x = np.random.default_rng(0).standard_normal((1, 9, 6))
    module = WINDOWED[name](window_size=(2, 0), dtype=np.float64, rng=1)
    out = module(x)
    direction = np.random.default_rng(1).standard_normal(out.shape)
    grad = module.backward(direction)
    step = 1e-6 * np.random.default_rng(2).standard_normal(x.shape)
    difference = ((module(x + step) - module(x - step)) * direction).sum() / 2
    np.testing.assert_allclose((grad * step).sum(), difference, rtol=1e-6)


def test_a_wrong_window_is_refused_when_the_class_is_made() -> None:
    assert "window_size=(3, 0)" in repr(cattn.CausalAttention(6, 5, 64, 0.0, window_size=(3, 0)))
    assert "out_bias=False" in repr(cattn.MultiHeadAttention(6, 8, 64, 0.0, 4, out_bias=False))
    for name, make in WINDOWED.items():
        with pytest.raises((TypeError, ValueError), match="window_size"):
            make(window_size=(1, 2, 3))
        assert make(window_size=None).window_size is None, name
