"""cattn inside JAX: derivatives of every order and mode."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

import cattn

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402
from jax.test_util import check_grads  # noqa: E402
from test_jax import assert_same, attention, plain_formula, wide  # noqa: E402

assert wide  # a fixture, which switches float64 on for tests with the dtype float64

rng = np.random.default_rng(3)
B, T, S, N, K, H, D = 2, 5, 6, 4, 2, 3, 2


def normal(*shape: int) -> Any:
    return rng.standard_normal(shape)


INPUTS: dict[str, Any] = {
    "query": normal(B, T, N, H), "key": normal(B, S, K, H), "value": normal(B, S, K, D), "sinks": normal(N),
}  # fmt: skip
VISIBLE = normal(B, 1, T, S) > -0.7
VISIBLE[1, 0, 2] = False  # a query that sees no key
OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "causal": ({}, {"is_causal": True, "scale": 0.3}),
    "bias": ({"bias": normal(B, N, T, S)}, {}),
    "bias of one row": ({"bias": normal(1, N, 1, S)}, {"softcap": 2.0}),
    "bias of one column": ({"bias": normal(B, 1, T, 1)}, {"mask": VISIBLE}),
    "bias of one number": ({"bias": normal(1, 1, 1, 1)}, {"is_causal": True}),
    "window and slopes": ({}, {"local_window_size": (2, 1), "alibi_slopes": np.array([0.5, 0.1, 0.2, 0.3])}),
    "lengths": ({}, {"query_seq_lengths": np.array([T, 2]), "key_value_seq_lengths": np.array([S, 0])}),
    "blocks": ({}, {"block_mask": (np.array([[True, False, True], [False, True, True], [True, True, False]]), 2)}),
}  # fmt: skip


def case(name: str, dtype: str = "float64") -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return attention with its residual as a function of arrays, and these."""
    moving, options = OPTIONS[name]
    arrays = {name: jnp.asarray(x, dtype) for name, x in (INPUTS | moving).items()}
    hidden = "mask" in options or "query_seq_lengths" in options  # where the residual is -inf

    def function(*operands: Any) -> Any:
        given = dict(zip(arrays, operands, strict=True))
        out, residual = attention(**given, **options, return_residual=True)
        return out, jnp.where(residual == -jnp.inf, 0, residual) if hidden else residual

    return function, tuple(arrays.values())


def second_derivatives(function: Callable[..., Any], arrays: tuple[Any, ...]) -> None:
    """Check the derivatives up to the second against differences, in each order of the modes that there is."""
    check_grads(function, arrays, order=1, modes=["fwd", "rev"])
    check_grads(function, arrays, order=2, modes=["rev"])
    directions = tuple(jnp.asarray(normal(*x.shape)) for x in arrays)
    check_grads(lambda *x: jax.jvp(function, x[: len(arrays)], x[len(arrays) :]), (*arrays, *directions), 1, ["rev"])

    def gradients(*operands: Any) -> Any:
        results, back = jax.vjp(function, *operands)
        return back(results)

    check_grads(gradients, arrays, order=1, modes=["fwd"])


@pytest.mark.parametrize("dtype", ["float64"])
@pytest.mark.parametrize("name", OPTIONS)
def test_second_derivatives_agree_with_differences(dtype: str, name: str) -> None:
    second_derivatives(*case(name))


@pytest.mark.parametrize("dtype", ["float64"])
def test_second_derivatives_with_dropout(dtype: str) -> None:
    key = jax.random.key(5)
    second_derivatives(
        lambda q, k, v: attention(q, k, v, dropout_p=0.4, dropout_key=key),
        tuple(jnp.asarray(INPUTS[name]) for name in ("query", "key", "value")),
    )


def energies(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *x: sum((result**2).sum() for result in function(*x))


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["float64"])
def test_hessians_agree_with_the_plain_formula(dtype: str) -> None:
    """By each function for them, and of batches under vmap and jit."""
    arrays = [jnp.asarray(INPUTS[name]) for name in ("query", "key", "value")]
    bias, sinks = jnp.asarray(normal(1, N, T, S)), jnp.asarray(INPUTS["sinks"])
    visible = np.tril(np.ones((T, S), bool))

    def own(*x: Any) -> Any:
        return attention(*x[:3], x[3], visible, sinks=x[4], return_residual=True)

    def plain(*x: Any) -> Any:
        return plain_formula(*x[:4], visible, x[4])

    def hessian(function: Callable[..., Any], outer: Any, inner: Any) -> Any:
        return outer(inner(energies(function), argnums=tuple(range(5))), argnums=tuple(range(5)))

    at = (*arrays, bias, sinks)
    expected = jax.tree.leaves(hessian(plain, jax.jacfwd, jax.jacrev)(*at))
    for outer, inner in ((jax.jacfwd, jax.jacrev), (jax.jacrev, jax.jacrev), (jax.jacrev, jax.jacfwd)):
        for right, found in zip(expected, jax.tree.leaves(hessian(own, outer, inner)(*at)), strict=True):
            np.testing.assert_allclose(found, right, rtol=1e-9, atol=1e-10)
    batch = jnp.stack([arrays[0], 2 * arrays[0]])
    by_query = jax.hessian(lambda q: energies(own)(q, *at[1:]))
    together = jax.jit(jax.vmap(by_query))(batch)
    for i in range(2):
        np.testing.assert_allclose(together[i], by_query(batch[i]), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit, jax.checkpoint], ids=["eager", "jit", "checkpoint"])
def test_products_of_hessian_and_vector(transform: Any) -> None:
    """Three ways to the same vector, in float32."""
    query = jnp.asarray(INPUTS["query"], np.float32)
    key, value, direction = (jnp.asarray(normal(B, T, N, H), np.float32) for _ in range(3))

    @transform
    def loss(x: Any) -> Any:
        return (attention(x, key, value, is_causal=True) ** 2).sum()

    found = [
        jax.jvp(jax.grad(loss), (query,), (direction,))[1],
        jax.grad(lambda x: (jax.grad(loss)(x) * direction).sum())(query),
        jax.grad(lambda x: jax.jvp(loss, (x,), (direction,))[1])(query),
    ]
    full = jax.hessian(loss)(query)
    expected = jnp.tensordot(full, direction, 4)
    for product in found:
        np.testing.assert_allclose(product, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
def test_bits_of_forward_mode_are_the_bits_of_the_function_for_numpy(dtype: str) -> None:
    arrays = [jnp.asarray(INPUTS[name], dtype) for name in ("query", "key", "value")]
    along = [jnp.asarray(normal(*x.shape), dtype) for x in arrays]
    out, moved = jax.jvp(partial(attention, is_causal="upper_left"), arrays, along)
    numbers = [np.asarray(x).swapaxes(1, 2) for x in (*arrays, *along)]
    result = cattn.attention_jvp(*numbers, is_causal="upper_left", enable_gqa=True)
    assert_same([out, moved], [result.out.swapaxes(1, 2), result.out_tangent.swapaxes(1, 2)])


def test_what_is_constant_takes_part_in_nothing() -> None:
    x = jnp.ones((1, 3, 2, 4), np.float32)
    slopes = jnp.ones(2)
    moved = jax.jvp(lambda s: attention(x, x, x, alibi_slopes=s), (slopes,), (slopes,))[1]
    assert not moved.any()

    def loss(x: Any) -> Any:
        return attention(x, x, x).sum()

    once = jax.grad(lambda x: jax.grad(loss)(jax.lax.stop_gradient(x)).sum() + loss(x))(x)
    np.testing.assert_array_equal(once, jax.grad(loss)(x))


X = np.ones((1, 3, 2, 4), np.float32)


def loss(x: Any) -> Any:
    return attention(x, x, x).sum()


def of_quantized(x: Any) -> Any:
    key = cattn.Quantized(np.ones((1, 3, 2, 4), np.int8), np.ones((1, 3, 2, 1), np.float32))
    return attention(x, key, x).sum()


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize(
    ("function", "what"),
    [
        (jax.grad(lambda x: jax.hessian(loss)(x).sum()), "third derivatives"),
        (jax.grad(lambda x: jax.grad(lambda x: jax.grad(loss)(x).sum())(x).sum()), "third derivatives"),
        (jax.jacfwd(jax.hessian(loss)), "(third derivatives|forward mode over forward mode .* no third derivatives)"),
        (jax.jacfwd(jax.jacfwd(loss)), r"forward mode over forward mode .* take jax\.hessian for second"),
        (jax.jacfwd(of_quantized), "forward mode and no second derivatives with quantized arrays"),
        (jax.hessian(of_quantized), "forward mode and no second derivatives with quantized arrays"),
    ],
)
def test_what_is_not_there_is_refused_by_name(function: Any, what: str, transform: Any) -> None:
    with pytest.raises(NotImplementedError, match=rf"^cattn's dot_product_attention has no {what}"):
        transform(function)(X)
