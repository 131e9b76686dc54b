"""The residual of JAX's attention, the log-sum-exp, and its gradients; test_jax.py compares their bits with NumPy's."""

from functools import partial
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402
from test_jax import (  # noqa: E402
    VMAPS,
    B,
    K,
    N,
    S,
    T,
    assert_close,
    assert_same,
    attention,
    bits,
    case,
    inputs,
    loop,
    mask,
    normal,
    vmap_arguments,
    wide,
)

assert wide  # a fixture, which switches float64 on for tests with the dtype float64


def test_the_residual_beside_a_gradient_has_the_same_bits() -> None:
    arrays, _, _ = case("groups", "float32")
    plain = attention(*arrays, return_residual=True)[1]
    (_, beside), _ = jax.vjp(lambda q: attention(q, *arrays[1:], return_residual=True), arrays[0])
    assert bits(beside) == bits(plain)


def plain_formula(query: Any, key: Any, value: Any, bias: Any, mask: Any, sinks: Any) -> tuple[Any, Any]:
    """Attention and its log-sum-exp in JAX's own operations."""
    groups = query.shape[2] // key.shape[2]
    key, value = (jnp.repeat(x, groups, axis=2) for x in (key, value))
    scores = jnp.einsum("btnh,bsnh->bnts", query, key) / np.sqrt(query.shape[3]) + bias
    scores = jnp.where(mask, scores, -jnp.inf)
    sink = jnp.broadcast_to(sinks[:, None, None], (*scores.shape[:3], 1))
    lse = jax.nn.logsumexp(jnp.concatenate([scores, sink], axis=3), axis=3)
    return jnp.einsum("bnts,bsnh->btnh", jnp.exp(scores - lse[..., None]), value), lse.swapaxes(1, 2)


@pytest.mark.promise("JAX")
@pytest.mark.parametrize("dtype", ["float64"])
@pytest.mark.parametrize("uses", ["residual", "both"])
def test_the_residual_has_the_gradients_of_the_plain_formula(dtype: str, uses: str) -> None:
    arrays = [jnp.asarray(x, dtype) for x in inputs(kv_heads=K)]
    bias, sinks, visible = jnp.asarray(normal(1, N, T, S)), jnp.asarray(normal(N)), mask(B, 1, T, S)

    def loss(function: Any, *operands: Any) -> Any:
        out, residual = function(*operands)
        z_loss = (residual**2).mean() + jnp.sin(residual).sum()
        return z_loss if uses == "residual" else z_loss + jnp.cos(out).sum()

    def ours(query: Any, key: Any, value: Any, bias: Any, sinks: Any) -> Any:
        return attention(query, key, value, bias, visible, sinks=sinks, return_residual=True)

    def right(query: Any, key: Any, value: Any, bias: Any, sinks: Any) -> Any:
        return plain_formula(query, key, value, bias, visible, sinks)

    operands = (*arrays, bias, sinks)
    found = jax.jit(jax.grad(partial(loss, ours), range(5)))(*operands)
    expected = jax.jit(jax.grad(partial(loss, right), range(5)))(*operands)
    for a, b in zip(found, expected, strict=True):
        assert_close(a, b, 1e-12)


def test_a_row_without_keys_has_no_gradient_by_its_residual() -> None:
    """Its residual is -inf: the square has the gradient -inf, which does not count."""
    arrays, _, rest = case("no visible key", "float32")
    loss = jax.grad(lambda *a: (attention(*a, **rest, return_residual=True)[1] ** 2).sum(), (0, 1, 2))
    for grad in loss(*arrays):
        assert np.isfinite(grad).all()
        assert not np.any(grad[0])


@pytest.mark.parametrize("name", VMAPS)
def test_gradients_by_the_residual_under_vmap_are_a_loop_in_every_bit(name: str) -> None:
    axes = VMAPS[name]
    arguments = vmap_arguments(axes)

    def loss(query: Any, key: Any, value: Any, bias: Any, lengths: Any, sinks: Any) -> Any:
        options = {"key_value_seq_lengths": lengths, "key_value_seq_starts": lengths // 3, "sinks": sinks}
        out, residual = attention(query, key, value, bias, **options, return_residual=True)
        return jnp.sin(out).sum() + (residual**2).sum()

    grad = jax.grad(loss, (0, 1, 2, 3, 5))
    assert_same(jax.jit(jax.vmap(grad, axes))(*arguments), loop(jax.jit(grad), axes, *arguments))
