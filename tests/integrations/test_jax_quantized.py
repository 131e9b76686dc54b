"""cattn inside JAX: keys and values of one byte, with scales."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import cattn

jax = pytest.importorskip("jax")
import jax.numpy as jnp  # noqa: E402

from cattn.integrations import jax as bridge  # noqa: E402
from support import as_tuple, paired  # noqa: E402

dot_product_attention = bridge.dot_product_attention
B, T, S, N, K, H, D = 2, 20, 210, 4, 2, 16, 24
DTYPES = ["float32", "float64", "float16", "bfloat16"]
SHAPES = {  # of the scales of keys and of values
    "tokens": ((B, S, K, 1), (B, S, K, 1)),
    "columns": ((1, 1, K, H), (D,)),
    "elements": ((B, S, K, H), (B, S, K, D)),
    "one": ((), (1, 1)),
    "keys alone": ((S, 1, 1), None),
    "values alone": (None, (B, 1, K, 1)),
}


def bits(x: Any) -> bytes:
    return np.ascontiguousarray(x).tobytes()


@pytest.fixture(autouse=True)
def wide(request: pytest.FixtureRequest) -> Iterator[None]:
    callspec = getattr(request.node, "callspec", None)
    with jax.enable_x64(callspec is not None and callspec.params.get("dtype") == "float64"):
        yield


def arrays_of(name: str, dtype: str, quantized: Any = jnp.int8) -> tuple[Any, Any, Any, dict[str, Any]]:
    """Return query, key, value, and the scales that key and value have."""
    rng = np.random.default_rng(len(name))
    arrays = [jnp.asarray(rng.standard_normal((B, T, N, H)), dtype)]
    scales = {}
    for which, shape, columns in zip(("key", "value"), SHAPES[name], (H, D), strict=True):
        numbers = rng.standard_normal((B, S, K, columns))
        if shape is None:
            arrays.append(jnp.asarray(numbers, dtype))
        else:
            arrays.append(jnp.asarray(numbers * 40, jnp.float32).astype(quantized))
            scales[f"{which}_scale"] = jnp.asarray(rng.uniform(0.01, 0.05, shape), jnp.float32)
    return (*arrays, scales)  # type: ignore[return-value]


def attention(query: Any, key: Any, value: Any, **options: Any) -> Any:
    """Call the function with pairs of arrays and their scales."""
    return dot_product_attention(**paired({"query": query, "key": key, "value": value, **options}, as_tuple))


def options_of(compute: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the arguments with a gradient, and the others."""
    rng = np.random.default_rng(3)
    numbers = {"bias": rng.standard_normal((B, N, T, S)), "sinks": rng.standard_normal((B, N))}
    others = {"key_value_seq_lengths": jnp.asarray([S, 150]), "softcap": 9.0}
    return {name: jnp.asarray(x, compute) for name, x in numbers.items()}, others


def check_bits(name: str, dtype: str, quantized: Any) -> None:
    """The function for NumPy has the same bits; beside halves, with the other arrays in float32."""
    query, key, value, scales = arrays_of(name, dtype, quantized)
    compute = np.dtype(np.float64 if dtype == "float64" else np.float32)
    wanted, others = options_of(compute)
    first = {n: np.asarray(x, compute) for n, x in (("query", query), ("key", key), ("value", value))}
    first |= {n: np.asarray(x) for n, x in (("key", key), ("value", value)) if f"{n}_scale" in scales}
    first = {n: x.swapaxes(1, 2) for n, x in first.items()}
    full = {n: np.broadcast_to(x, (key if n == "key_scale" else value).shape) for n, x in scales.items()}
    options: dict[str, Any] = {n: np.asarray(x) if n != "softcap" else x for n, x in (wanted | others).items()}
    first = paired(first | {n: x.swapaxes(1, 2) for n, x in full.items()})
    options |= {"enable_gqa": True, "query_offset": 0}
    lse = np.empty((B, N, T))
    right = cattn.scaled_dot_product_attention(**first, **options, return_lse=True, out=cattn.AttentionOutput(lse=lse))
    assert right.out is not None
    grad_out = np.random.default_rng(1).standard_normal((B, T, N, D)).astype(dtype)
    out, pull = jax.vjp(lambda q, w: attention(q, key, value, **w, **scales, **others), query, wanted)
    grads = pull(jnp.asarray(grad_out))
    assert out.dtype == query.dtype
    assert bits(out) == bits(jnp.asarray(right.out.swapaxes(1, 2)).astype(dtype))
    expected = cattn.attention_backward(
        grad_out.astype(compute).swapaxes(1, 2), *first.values(), right.out, lse, **options
    )
    assert bits(grads[0]) == bits(jnp.asarray(expected.query.swapaxes(1, 2)).astype(dtype))
    assert bits(grads[1]["bias"]) == bits(expected.bias)
    assert bits(grads[1]["sinks"]) == bits(expected.sinks)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("quantized", [jnp.int8, jnp.float8_e4m3fn], ids=["int8", "float8"])
@pytest.mark.parametrize("name", SHAPES)
def test_bits_are_those_of_the_functions_for_numpy(name: str, quantized: Any, dtype: str) -> None:
    check_bits(name, dtype, quantized)


@pytest.mark.parametrize("quantized", [jnp.int8, jnp.float8_e4m3fn], ids=["int8", "float8"])
@pytest.mark.parametrize("name", SHAPES)
def test_results_and_gradients_are_those_of_the_products(name: str, quantized: Any) -> None:
    """Whatever has a scale may be dequantized before."""
    query, key, value, scales = arrays_of(name, "float32", quantized)
    wide = [
        x.astype(jnp.float32) * scales[f"{n}_scale"] if f"{n}_scale" in scales else x
        for n, x in (("key", key), ("value", value))
    ]
    ours = jax.jit(jax.value_and_grad(lambda q: jnp.sin(attention(q, key, value, **scales)).sum()))(query)
    right = jax.jit(jax.value_and_grad(lambda q: jnp.sin(attention(q, *wide)).sum()))(query)
    assert bits(ours[1]) == bits(right[1])
    without_batch = {n: x[0] if x.ndim == 4 else x for n, x in scales.items()}
    out, residual = attention(query[0], key[0], value[0], **without_batch, return_residual=True)
    right, their_residual = attention(query, *wide, return_residual=True)
    assert bits(out) == bits(right[0])
    assert bits(residual) == bits(their_residual[0])


def test_other_arrays_than_the_quantized_ones_have_gradients() -> None:
    query, key, value, scales = arrays_of("keys alone", "float32")
    grads = jax.grad(lambda q, v: jnp.sin(attention(q, key, v, **scales)).sum(), (0, 1))(query, value)
    wide = key.astype(jnp.float32) * scales["key_scale"]
    right = jax.grad(lambda q, v: jnp.sin(attention(q, wide, v)).sum(), (0, 1))(query, value)
    assert list(map(bits, grads)) == list(map(bits, right))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_quantized_arrays_and_scales_are_constants(dtype: str) -> None:
    def loss(key: Any, scale: Any) -> Any:
        return attention(query, key, value, key_scale=scale, value_scale=scales["value_scale"]).sum()

    query, key, value, scales = arrays_of("tokens", dtype, jnp.float8_e4m3fn)
    grads = jax.grad(loss, (0, 1))(key, scales["key_scale"])
    assert grads[0].dtype == key.dtype
    assert not grads[0].astype(jnp.float32).any()
    assert not grads[1].any()
    query, key, value, scales = arrays_of("tokens", dtype)
    assert jax.grad(loss, allow_int=True)(key, scales["key_scale"]).dtype == jax.dtypes.float0


@pytest.mark.parametrize("axes", [(0, 0, 0, 0, 0), (0, None, None, None, None), (None, None, None, 0, 0),
                                  (None, 0, None, None, 0)])  # fmt: skip
def test_vmap_is_a_loop_in_every_bit(axes: tuple[int | None, ...]) -> None:
    def attend(query: Any, key: Any, value: Any, key_scale: Any, value_scale: Any) -> Any:
        return attention(query, key, value, key_scale=key_scale, value_scale=value_scale, is_causal=True)

    query, key, value, scales = arrays_of("tokens", "float32")
    arguments = [query, key, value, *scales.values()]
    full = [x if a is None else jnp.stack([x, x[:, ::-1], x[::-1]]) for x, a in zip(arguments, axes, strict=True)]
    ours = jax.jit(jax.vmap(attend, axes))(*full)
    for i in range(3):
        part = [x if a is None else x[i] for x, a in zip(full, axes, strict=True)]
        assert bits(ours[i]) == bits(attend(*part))
