"""Attention and its gradients under JAX's vmap are a loop in every bit, whatever operands it maps."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402
from test_jax import (  # noqa: E402
    VMAPS,
    B,
    D,
    H,
    K,
    N,
    assert_close,
    assert_same,
    attention,
    batch,
    by_python,
    loop,
    vmap_arguments,
    wide,
    with_all,
    with_dropout,
)

assert wide  # fixtures
assert by_python


@pytest.mark.parametrize("name", VMAPS)
def test_vmap_is_a_loop_in_every_bit(name: str) -> None:
    axes = VMAPS[name]
    arguments = vmap_arguments(axes)
    assert_same(jax.vmap(with_all, axes)(*arguments), loop(with_all, axes, *arguments))
    assert_same(jax.jit(jax.vmap(with_all, axes))(*arguments), loop(with_all, axes, *arguments))


@pytest.mark.parametrize("name", VMAPS)
def test_gradients_under_vmap_are_a_loop_in_every_bit(name: str) -> None:
    axes = VMAPS[name]
    arguments = vmap_arguments(axes)
    grad = jax.grad(lambda *a: jnp.sin(with_all(*a)).sum(), (0, 1, 2, 3))
    assert_same(jax.jit(jax.vmap(grad, axes))(*arguments), loop(jax.jit(grad), axes, *arguments))


@pytest.mark.parametrize("name", VMAPS)
def test_gradients_of_a_vmap_sum_over_what_is_shared(name: str) -> None:
    axes = VMAPS[name]
    arguments = vmap_arguments(axes)
    grads = jax.grad(lambda *a: jnp.sin(jax.vmap(with_all, axes)(*a)).sum(), (0, 1, 2, 3, 5))(*arguments)
    right = jax.grad(lambda *a: jnp.sin(loop(with_all, axes, *a)).sum(), (0, 1, 2, 3, 5))(*arguments)
    for a, b in zip(grads, right, strict=True):
        assert_close(a, b, 1e-5)


@pytest.mark.usefixtures("by_python")
@pytest.mark.parametrize("name", ["all", "keys", "bias"])
def test_calls_by_python_under_vmap_are_a_loop_in_every_bit(name: str) -> None:
    axes = VMAPS[name]
    arguments = vmap_arguments(axes)
    grad = jax.grad(lambda *a: jnp.sin(with_all(*a)).sum(), (0, 1, 2, 3))
    assert_same(jax.vmap(with_all, axes)(*arguments), loop(with_all, axes, *arguments))
    assert_same(jax.vmap(grad, axes)(*arguments), loop(grad, axes, *arguments))


def test_two_vmaps_are_two_loops() -> None:
    query, key, value = batch((3, B, 9, N, H), (2, B, 9, N, H), (B, 9, N, H))
    inner = partial(loop, attention, (None, 0, None))
    nested = jax.vmap(jax.vmap(attention, (None, 0, None)), (0, None, None))
    assert_same(nested(query, key, value), loop(inner, (0, None, None), query, key, value))


@pytest.mark.parametrize("route", ["foreign", "python"])
def test_two_vmaps_with_dropout_are_two_loops(route: str, request: pytest.FixtureRequest) -> None:
    """Of the operands, some are mapped by the outer vmap only, some by the inner one only."""
    if route == "python":
        request.getfixturevalue("by_python")

    def attend(query: Any, key: Any, value: Any, bias: Any, lengths: Any, sinks: Any, drawn: Any) -> Any:
        options = {"key_value_seq_lengths": lengths, "sinks": sinks, "dropout_p": 0.4, "dropout_key": drawn}
        return attention(query, key, value, bias, is_causal=True, **options)

    query, key, value, bias, sinks = batch((3, 2, B, 9, N, H), (2, B, 11, K, H), (3, B, 11, K, D), (N, 9, 11), (3, N))
    lengths = jnp.array([[11, 4], [7, 10]], np.int32)
    arguments = (query, key, value, bias, lengths, sinks, jax.random.split(jax.random.key(1), 3))
    outer, inner = (0, None, 0, None, None, 0, 0), (0, 0, None, None, 0, None, None)
    grad = jax.jit(jax.grad(lambda *a: jnp.sin(attend(*a)).sum(), (0, 1, 2, 3, 5)))
    for function in (attend, grad):
        nested = jax.jit(jax.vmap(jax.vmap(function, inner), outer))
        assert_same(nested(*arguments), loop(partial(loop, function, inner), outer, *arguments))


@pytest.mark.parametrize("axes", [(0, 0, 0), (0, None, None), (None, None, 0)])
@pytest.mark.parametrize("route", ["foreign", "python"])
def test_dropout_under_vmap_is_a_loop_in_every_bit(
    axes: tuple[int | None, ...], route: str, request: pytest.FixtureRequest
) -> None:
    """Each entry draws from its own key, or all draw the same mask from one key."""
    if route == "python":
        request.getfixturevalue("by_python")
    query, value = (x if axis == 0 else x[0] for x, axis in zip(batch(*[(3, B, 9, N, H)] * 2), axes, strict=False))
    key = jax.random.key(1) if axes[2] is None else jax.random.split(jax.random.key(1), 3)
    arguments = (query, value, key)
    found = jax.jit(jax.vmap(with_dropout, axes))(*arguments)
    assert_same(found, loop(with_dropout, axes, *arguments))
    grad = jax.grad(lambda *a: jnp.sin(with_dropout(*a)).sum(), (0, 1))
    assert_same(jax.jit(jax.vmap(grad, axes))(*arguments), loop(jax.jit(grad), axes, *arguments))
    if axes[2] == 0:
        assert not np.array_equal(found[0] == 0, found[1] == 0) or not np.array_equal(found[0], found[1])
