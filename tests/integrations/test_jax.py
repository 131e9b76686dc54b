"""cattn inside JAX: values and bits of JAX's own function and of the functions for NumPy; vmap, residual, pairs."""

from __future__ import annotations

import doctest
import re
import threading
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest

import cattn

jax = pytest.importorskip("jax")
import jax.numpy as jnp  # noqa: E402

from cattn.integrations import jax as bridge  # noqa: E402
from support import as_tuple, paired  # noqa: E402

attention = bridge.dot_product_attention
theirs = jax.nn.dot_product_attention

B, T, S, N, K, H, D = 2, 40, 50, 4, 2, 16, 8
DTYPES = ["float32", "float64", "float16", "bfloat16"]
rng = np.random.default_rng(7)


def normal(*shape: int) -> Any:
    return rng.standard_normal(shape)


def inputs(queries: int = T, keys: int = S, heads: int = N, kv_heads: int = N, d_v: int = H) -> list[Any]:
    return [normal(B, queries, heads, H), normal(B, keys, kv_heads, H), normal(B, keys, kv_heads, d_v)]


def mask(*shape: int) -> Any:
    """Return a mask that hides no row as a whole."""
    found = rng.random(shape) < 0.6
    found[..., 0] = True
    return found


# In float64. The second member has the keywords; arrays among them are converted as the inputs are.
SHARED: dict[str, tuple[list[Any], dict[str, Any]]] = {
    "plain": (inputs(), {}),
    "without batch": ([x[0] for x in inputs()], {"is_causal": True}),
    "causal": (inputs(T, T), {"is_causal": True}),
    "causal, more keys": (inputs(), {"is_causal": True}),
    "causal, more queries": (inputs(S, T), {"is_causal": True}),
    "more than one block": ([normal(1, 300, 2, 8), normal(1, 300, 1, 8), normal(1, 300, 1, 8)], {"is_causal": True}),
    "groups": (inputs(kv_heads=K), {"scale": 0.3}),
    "one head of keys": (inputs(kv_heads=1), {"is_causal": True}),
    "one query": (inputs(1, S, kv_heads=K), {}),
    "bias": (inputs(kv_heads=K), {"bias": normal(B, N, T, S)}),
    "bias of all entries and heads": (inputs(), {"bias": normal(1, 1, T, S), "is_causal": True}),
    "bias of two axes": (inputs(), {"bias": normal(T, S)}),
    "bias of one row": (inputs(), {"bias": normal(1, N, 1, S)}),
    "bias of one column": (inputs(), {"bias": normal(B, 1, T, 1)}),
    "bias of one number": (inputs(), {"bias": normal(1, 1, 1, 1)}),
    "mask": (inputs(kv_heads=K), {"mask": mask(B, N, T, S)}),
    "mask of keys": (inputs(), {"mask": mask(B, 1, 1, S)}),
    "mask and bias": (inputs(), {"mask": mask(T, S), "bias": normal(B, 1, T, S), "is_causal": True}),
    "window": (inputs(), {"local_window_size": 5}),
    "window of two sides": (inputs(T, T), {"local_window_size": (7, 2)}),
    "window with causality": (inputs(), {"local_window_size": (7, 2), "is_causal": True}),
    "lengths": (inputs(), {"query_seq_lengths": np.array([T, 9]), "key_value_seq_lengths": np.array([3, S])}),
    "lengths beyond the arrays": (
        inputs(),
        {"query_seq_lengths": np.array([99, -1]), "key_value_seq_lengths": np.array([3, 99])},
    ),
    "lengths with causality": (
        inputs(),
        {"query_seq_lengths": np.array([T, 9]), "key_value_seq_lengths": np.array([30, S]), "is_causal": True},
    ),
}
OWN: dict[str, tuple[list[Any], dict[str, Any]]] = {
    "other columns of values": (inputs(d_v=D), {}),
    "one column": ([normal(B, T, N, 1), normal(B, S, N, 1), normal(B, S, N, 1)], {}),
    "softcap": (inputs(kv_heads=K), {"softcap": 1.5, "is_causal": True}),
    "sinks": (inputs(), {"sinks": normal(N)}),
    "sinks of each entry": (inputs(), {"sinks": normal(B, N), "is_causal": True}),
    "slopes": (inputs(), {"alibi_slopes": np.array([0.5, 0.25, 0.1, 0.0]), "is_causal": True}),
    "lower right": (inputs(), {"is_causal": "lower_right"}),
    "lower right with lengths": (
        inputs(),
        {"is_causal": "lower_right", "query_seq_lengths": np.array([T, 9]), "key_value_seq_lengths": np.array([45, S])},
    ),
    "offset": (inputs(), {"is_causal": True, "query_offset": np.array(10)}),
    "offsets": (inputs(), {"is_causal": "upper_left", "query_offset": np.array([10, -5]), "local_window_size": 4}),
    "window without a bound": (inputs(), {"local_window_size": (None, 3)}),
    "one length": (inputs(), {"key_value_seq_lengths": np.array(17)}),
    "starts": (inputs(kv_heads=K), {"key_value_seq_starts": np.array([7, 0]), "is_causal": "lower_right"}),
    "starts and lengths": (
        inputs(),
        {"key_value_seq_starts": np.array([7, 20]), "key_value_seq_lengths": np.array([30, 9]), "sinks": normal(N)},
    ),
    "starts beyond the arrays": (inputs(), {"key_value_seq_starts": np.array([-(2**31), 2**31 - 1])}),
    "more queries than keys, lengths of both": (
        inputs(S, T, kv_heads=K),
        {
            "query_seq_lengths": np.array([S, 47]),
            "key_value_seq_lengths": np.array([13, T]),
            "is_causal": "lower_right",
        },
    ),
    "numbers beyond both axes": (
        inputs(S, T),
        {
            "query_seq_lengths": np.array([2**31 - 1, 44]),
            "key_value_seq_lengths": np.array([45, 2**31 - 1]),
            "key_value_seq_starts": np.array([-(2**31), 9]),
            "is_causal": "lower_right",
        },
    ),
    "one start": (inputs(), {"key_value_seq_starts": np.array(17), "is_causal": True, "query_offset": np.array(30)}),
    "blocks": (inputs(kv_heads=K), {"block_mask": (mask(B, N, 3, 4), 16), "is_causal": True}),
    "blocks of all entries and heads": (inputs(), {"block_mask": (mask(6, 8), 7), "sinks": normal(N)}),
    "one block": (inputs(), {"block_mask": (mask(1, 1), 2**62), "mask": mask(T, S)}),
    "no visible key": (inputs(), {"key_value_seq_lengths": np.array([0, S])}),
    "dropout": (inputs(kv_heads=K), {"dropout_p": 0.3, "dropout_key": 5, "is_causal": True}),
    "all is dropped": (inputs(), {"dropout_p": 1.0, "dropout_key": 5}),
    "no queries": (inputs(0), {"is_causal": True}),
    "no keys": (inputs(keys=0), {}),
    "no batch entries": ([x[:0] for x in inputs()], {"bias": normal(1, N, T, S)}),
}
CASES = SHARED | OWN
DIFFERENTIABLE = ("bias", "sinks")


def convert(x: Any, dtype: str) -> Any:
    return jnp.asarray(x, dtype if x.dtype == np.float64 else np.int32 if x.dtype == np.int64 else None)


def case(name: str, dtype: str) -> tuple[list[Any], dict[str, Any], dict[str, Any]]:
    """Return the arrays, the keywords that are differentiable arrays, and the other keywords."""
    arrays, keywords = CASES[name]
    compute = "float64" if dtype == "float64" else "float32"
    found = {key: convert(x, compute) if isinstance(x, np.ndarray) else x for key, x in keywords.items()}
    if "dropout_key" in found:
        found["dropout_key"] = jax.random.key(found["dropout_key"])
    wanted = {key: found.pop(key) for key in DIFFERENTIABLE if key in found}
    return [convert(x, dtype) for x in arrays], wanted, found


@pytest.fixture(autouse=True)
def wide(request: pytest.FixtureRequest) -> Iterator[None]:
    """Switch float64 on where a test is about it."""
    callspec = getattr(request.node, "callspec", None)
    with jax.enable_x64(callspec is not None and callspec.params.get("dtype") == "float64"):
        yield


def gradients(function: Callable[..., Any], name: str, dtype: str, *grads: Any) -> tuple[Any, Any, Any]:
    """Return the results and the gradients of the arrays and of the differentiable keywords.

    Gradients are given for the output and, if it is to be differentiated, for the residual.
    """
    arrays, wanted, rest = case(name, dtype)
    rest |= {"return_residual": True} if len(grads) == 2 else {}

    def differentiate(arrays: Any, wanted: Any) -> tuple[Any, Any, Any]:
        results, pull = jax.vjp(lambda arrays, wanted: function(*arrays, **wanted, **rest), arrays, wanted)
        leaves, tree = jax.tree.flatten(results)
        pulled = [jnp.asarray(g, x.dtype).reshape(x.shape) for g, x in zip(grads, leaves, strict=True)]
        return results, *pull(jax.tree.unflatten(tree, pulled))

    found: tuple[Any, Any, Any] = jax.jit(differentiate)(arrays, wanted)  # JAX compiles every operation outside of jit
    return found


def assert_close(ours: Any, right: Any, tolerance: float) -> None:
    ours, right = (np.asarray(x, np.float64) for x in (ours, right))
    assert ours.shape == right.shape
    np.testing.assert_allclose(ours, right, rtol=tolerance, atol=tolerance)


# ---- values and gradients --------------------------------------------------------------------------------------------
@pytest.mark.promise("JAX")
@pytest.mark.parametrize("name", SHARED)
def test_values_residuals_and_gradients_agree_with_jax(name: str) -> None:
    """Up to the rounding of float32, in which the two sum in other orders. A query without visible keys is ours."""
    arrays, wanted, rest = case(name, "float32")
    out, residual = attention(*arrays, **wanted, **rest, return_residual=True)
    right, their_residual = jax.jit(lambda a, w: theirs(*a, **w, **rest, return_residual=True))(arrays, wanted)
    assert out.dtype == right.dtype
    assert residual.dtype == their_residual.dtype
    assert residual.shape == their_residual.shape
    assert_close(out, right, 3e-6)
    seen = np.isfinite(residual)
    assert_close(residual[seen], their_residual[seen], 3e-6)
    assert bool((np.asarray(their_residual)[~seen] < -1e38).all())
    grad = np.random.default_rng(1).standard_normal(out.shape)
    found = gradients(attention, name, "float32", grad)
    expected = gradients(theirs, name, "float32", grad)
    for ours, their in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert ours.dtype == their.dtype
        assert_close(ours, their, 2e-5)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", ["causal", "groups", "bias", "mask of keys", "window", "lengths"])
def test_halves_agree_with_jax_in_float32(name: str, dtype: str) -> None:
    """Only results are rounded, and the output from which gradients are taken, not the inputs."""
    step = float(jnp.finfo(dtype).eps)
    arrays, wanted, rest = case(name, dtype)
    widened = [x.astype(np.float32) for x in arrays]
    grad = jnp.asarray(np.random.default_rng(1).standard_normal((B, arrays[0].shape[1], N, H)), dtype)

    def differentiate(function: Any, arrays: Any) -> Any:
        out, pull = jax.vjp(lambda *a: function(*a, **wanted, **rest), *arrays)
        return out, pull(grad.astype(out.dtype))

    out, grads = jax.jit(partial(differentiate, attention))(arrays)
    right, their_grads = jax.jit(partial(differentiate, theirs))(widened)
    assert out.dtype == dtype
    assert_close(out, right, step)
    for ours, their in zip(grads, their_grads, strict=True):
        assert ours.dtype == dtype
        assert_close(ours, their, 8 * step)


def bits(x: Any) -> bytes:
    return np.ascontiguousarray(x).tobytes()


def numpy_call(name: str, dtype: str) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments of cattn's function for NumPy, spelled out."""
    arrays, wanted, rest = case(name, dtype)
    arrays = [np.asarray(x).reshape((*(1,) * (4 - x.ndim), *x.shape)) for x in arrays]
    options: dict[str, Any] = {key: np.asarray(x) for key, x in wanted.items()}
    for key, x in rest.items():
        options[key] = np.asarray(x) if isinstance(x, jax.Array) and key != "dropout_key" else x
    if "mask" in options:
        options["attn_mask"] = options.pop("mask")
    window = options.pop("local_window_size", None)
    left, right = window if isinstance(window, tuple) else (window, window)
    options["window_size"] = (left, right)
    for key in ("query_seq_lengths", "key_value_seq_lengths", "key_value_seq_starts"):
        if key in options:
            options[key] = np.clip(options[key], 0, arrays[key != "query_seq_lengths"].shape[1])
    if "block_mask" in options:
        options["block_mask"] = cattn.BlockMask(*options["block_mask"])
    if options.get("is_causal") != "lower_right":
        options.setdefault("query_offset", 0)
    if "dropout_key" in options:
        words = jax.random.bits(options.pop("dropout_key"), (2,), np.uint32)
        options["rng"] = int(words[0]) + int(words[1]) * 2**32
    return [x.swapaxes(1, 2) for x in arrays], options


def check_bits(name: str, dtype: str, with_residual: bool) -> None:
    (query, key, value), options = numpy_call(name, dtype)
    lse = np.empty(query.shape[:3])
    right = cattn.scaled_dot_product_attention(
        query, key, value, **options, return_lse=True, out=cattn.AttentionOutput(lse=lse)
    )
    narrow = cattn.scaled_dot_product_attention(query, key, value, **options, return_lse=True)
    assert right.out is not None
    assert narrow.lse is not None
    grad_out = np.random.default_rng(1).standard_normal(right.out.shape).astype(right.out.dtype)
    given, grad_lse = [grad_out.swapaxes(1, 2)], None
    if with_residual:
        grad_lse = np.random.default_rng(2).standard_normal(lse.shape).astype(right.out.dtype)
        given.append(grad_lse.swapaxes(1, 2))
    expected = cattn.attention_backward(grad_out, query, key, value, right.out, lse, grad_lse=grad_lse, **options)
    arrays, wanted, rest = case(name, dtype)
    jitted = jax.jit(lambda arrays, wanted: attention(*arrays, **wanted, **rest, return_residual=True))
    out, residual = jitted(arrays, wanted)
    assert bits(out) == bits(right.out.swapaxes(1, 2))
    assert bits(residual) == bits(narrow.lse.swapaxes(1, 2).astype(out.dtype))
    saved, grads, others = gradients(attention, name, dtype, *given)
    assert_same(saved, (out, residual) if with_residual else out)
    for ours, field in zip(grads, ("query", "key", "value"), strict=True):
        assert bits(ours) == bits(getattr(expected, field).swapaxes(1, 2)), field
    for field, ours in others.items():
        theirs_summed = getattr(expected, field)
        if theirs_summed.shape[-2:] == (query.shape[2], key.shape[2]) or theirs_summed.shape == query.shape[:2]:
            assert bits(ours) == bits(theirs_summed), field  # no sum is left to NumPy and JAX
        else:
            assert_close(ours, theirs_summed, 1e-4 if dtype != "float64" else 1e-12)


@pytest.mark.promise("JAX")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("with_residual", [False, True], ids=["", "residual"])
def test_bits_are_those_of_the_functions_for_numpy(name: str, dtype: str, with_residual: bool) -> None:
    check_bits(name, dtype, with_residual)


def test_gradients_agree_with_differences() -> None:
    with jax.enable_x64(True):
        arrays, wanted, rest = case("sinks of each entry", "float64")
        wanted["bias"] = jnp.asarray(normal(1, N, 1, S))
        rest |= {"softcap": 2.0, "dropout_p": 0.2, "dropout_key": jax.random.key(3)}

        def loss(arrays: Any, wanted: Any) -> Any:
            return jnp.sin(attention(*arrays, **wanted, **rest)).sum()

        grads = jax.grad(loss, (0, 1))(arrays, wanted)
        steps = jax.tree.map(lambda x: jnp.asarray(normal(*x.shape)), (arrays, wanted))
        slope = sum(float((g * s).sum()) for g, s in zip(*map(jax.tree.leaves, (grads, steps)), strict=True))
        ends = [loss(*jax.tree.map(lambda x, s, h=h: x + h * s, (arrays, wanted), steps)) for h in (1e-6, -1e-6)]
        assert slope == pytest.approx(float(ends[0] - ends[1]) / 2e-6, rel=1e-6)


def results_of_calls(function: Callable[..., Any], *arrays: Any) -> list[tuple[str, int]]:
    """Return the calls of foreign functions in a program, with their numbers of results."""
    text = jax.jit(function).lower(*arrays).as_text()
    return [(name, int(n)) for n, name in re.findall(r":(\d) = stablehlo.custom_call @cattn_attention_(\w+)\(", text)]


def test_the_gradient_of_a_constant_bias_is_not_computed() -> None:
    arrays, wanted, _ = case("bias", "float32")
    loss = jax.grad(lambda q, bias: attention(q, *arrays[1:], bias=bias).sum(), argnums=0)
    assert results_of_calls(loss, arrays[0], wanted["bias"]) == [("forward", 2), ("backward", 3)]
    loss = jax.grad(lambda q, bias: attention(q, *arrays[1:], bias=bias).sum(), argnums=1)
    assert results_of_calls(loss, arrays[0], wanted["bias"]) == [("forward", 2), ("backward", 4)]


# ---- transforms ------------------------------------------------------------------------------------------------------
def loop(function: Callable[..., Any], axes: tuple[int | None, ...], *arguments: Any) -> Any:
    """Return what vmap should."""
    size = next(x.shape[axis] for x, axis in zip(arguments, axes, strict=True) if axis is not None)
    parts = [
        function(*(x if axis is None else jnp.take(x, i, axis) for x, axis in zip(arguments, axes, strict=True)))
        for i in range(size)
    ]
    return jax.tree.map(lambda *x: jnp.stack(x), *parts)


def batch(*shapes: tuple[int, ...]) -> list[Any]:
    return [jnp.asarray(normal(*shape), np.float32) for shape in shapes]


def assert_same(ours: Any, right: Any) -> None:
    for a, b in zip(*map(jax.tree.leaves, (ours, right)), strict=True):
        assert a.shape == b.shape
        assert bits(a) == bits(b)


# query, key, value, bias, lengths, sinks
VMAPS: dict[str, tuple[int | None, ...]] = {
    "all": (0, 0, 0, 0, 0, 0),
    "query": (0, None, None, None, None, None),
    "keys": (None, 0, 0, None, None, None),
    "bias": (None, None, None, 0, None, None),
    "lengths": (None, None, None, None, 0, None),
    "sinks": (None, None, None, None, None, 0),
    "another axis": (2, 1, 3, None, None, None),
}


def vmap_arguments(axes: tuple[int | None, ...]) -> list[Any]:
    shapes = [(B, 10, N, H), (B, 12, K, H), (B, 12, K, D), (1, N, 10, 12), (B,), (N,)]
    found = []
    for shape, axis in zip(shapes, axes, strict=True):
        full = shape if axis is None else (*shape[:axis], 3, *shape[axis:])
        found.append(jnp.asarray(normal(*full), np.float32))
    found[4] = jnp.asarray(rng.integers(1, 13, found[4].shape), np.int32)
    return found


def with_all(query: Any, key: Any, value: Any, bias: Any, lengths: Any, sinks: Any) -> Any:
    return attention(query, key, value, bias, key_value_seq_lengths=lengths, sinks=sinks, is_causal=True)


def with_dropout(query: Any, value: Any, key: Any) -> Any:
    return attention(query, query, value, dropout_p=0.4, dropout_key=key)


def test_dropout_depends_on_the_key_alone() -> None:
    (x,) = batch((B, 9, N, H))
    first, again, other = (with_dropout(x, x, jax.random.key(seed)) for seed in (1, 1, 2))
    assert bits(first) == bits(again)
    assert not np.array_equal(first, other)
    old_kind = with_dropout(x, x, jax.random.PRNGKey(1))
    assert bits(first) == bits(old_kind)


def test_scan_checkpoint_and_lengths_as_tracers() -> None:
    """A cache is filled token by token: the last queries of one causal call, in every bit."""
    query, key, value = batch((1, 12, N, H), (1, 12, K, H), (1, 12, K, H))

    @jax.checkpoint
    def step(position: Any, query: Any) -> tuple[Any, Any]:
        out = attention(query[:, None], key, value, is_causal=True, query_offset=position)
        return position + 1, out[:, 0]

    def decode(query: Any) -> Any:
        return jax.lax.scan(step, jnp.int32(0), query.swapaxes(0, 1))[1].swapaxes(0, 1)

    assert bits(decode(query)) == bits(attention(query, key, value, is_causal=True))
    grad = jax.jit(jax.grad(lambda q: jnp.sin(decode(q)).sum()))(query)
    right = jax.grad(lambda q: jnp.sin(attention(q, key, value, is_causal=True)).sum())(query)
    assert_close(grad, right, 1e-6)


def test_bits_do_not_depend_on_the_number_of_threads() -> None:
    arrays, wanted, rest = case("more than one block", "float32")
    before = cattn.get_num_threads()
    found = []
    try:
        for threads in (1, 3):
            cattn.set_num_threads(threads)
            found.append(jax.vjp(lambda *a: attention(*a, **wanted, **rest), *arrays)[1](jnp.ones((1, 300, 2, 8))))
    finally:
        cattn.set_num_threads(before)
    assert_same(*found)


def test_calls_from_several_threads_at_once() -> None:
    arrays, _, rest = case("more than one block", "float32")
    right = attention(*arrays, **rest)
    found: list[bool] = []

    def work() -> None:
        found.extend(bits(attention(*arrays, **rest)) == bits(right) for _ in range(10))

    workers = [threading.Thread(target=work) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert found == [True] * 40


def test_subnormal_numbers_are_kept() -> None:
    """XLA flushes them on its own threads."""
    tiny = np.float32(1e-40)
    value = np.full((1, 3, 1, 4), tiny)
    out = jax.jit(attention)(np.ones((1, 3, 1, 4), np.float32), np.ones((1, 3, 1, 4), np.float32), value)
    assert bool((np.asarray(out) > 0).all())


def test_the_examples_run() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert doctest.testmod(bridge).failed == 0


# ---- vmap ------------------------------------------------------------------------------------------------------------
assert wide  # fixtures


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


def test_two_vmaps_are_two_loops() -> None:
    query, key, value = batch((3, B, 9, N, H), (2, B, 9, N, H), (B, 9, N, H))
    inner = partial(loop, attention, (None, 0, None))
    nested = jax.vmap(jax.vmap(attention, (None, 0, None)), (0, None, None))
    assert_same(nested(query, key, value), loop(inner, (0, None, None), query, key, value))


def test_two_vmaps_with_dropout_are_two_loops() -> None:
    """Of the operands, some are mapped by the outer vmap only, some by the inner one only."""

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
def test_dropout_under_vmap_is_a_loop_in_every_bit(axes: tuple[int | None, ...]) -> None:
    """Each entry draws from its own key, or all draw the same mask from one key."""
    query, value = (x if axis == 0 else x[0] for x, axis in zip(batch(*[(3, B, 9, N, H)] * 2), axes, strict=False))
    key = jax.random.key(1) if axes[2] is None else jax.random.split(jax.random.key(1), 3)
    arguments = (query, value, key)
    found = jax.jit(jax.vmap(with_dropout, axes))(*arguments)
    assert_same(found, loop(with_dropout, axes, *arguments))
    grad = jax.grad(lambda *a: jnp.sin(with_dropout(*a)).sum(), (0, 1))
    assert_same(jax.jit(jax.vmap(grad, axes))(*arguments), loop(jax.jit(grad), axes, *arguments))
    if axes[2] == 0:
        assert not np.array_equal(found[0] == 0, found[1] == 0) or not np.array_equal(found[0], found[1])


# ---- gradients of the residual ---------------------------------------------------------------------------------------
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


# ---- keys and values of one byte, with scales ------------------------------------------------------------------------
LONG, WIDTH = 210, 24
SHAPES = {  # of the scales of keys and of values
    "tokens": ((B, LONG, K, 1), (B, LONG, K, 1)),
    "columns": ((1, 1, K, H), (WIDTH,)),
    "elements": ((B, LONG, K, H), (B, LONG, K, WIDTH)),
    "one": ((), (1, 1)),
    "keys alone": ((LONG, 1, 1), None),
    "values alone": (None, (B, 1, K, 1)),
}


def arrays_of(name: str, dtype: str, quantized: Any = jnp.int8) -> tuple[Any, Any, Any, dict[str, Any]]:
    """Return query, key, value, and the scales that key and value have."""
    rng = np.random.default_rng(len(name))
    arrays = [jnp.asarray(rng.standard_normal((B, T, N, H)), dtype)]
    scales = {}
    for which, shape, columns in zip(("key", "value"), SHAPES[name], (H, WIDTH), strict=True):
        numbers = rng.standard_normal((B, LONG, K, columns))
        if shape is None:
            arrays.append(jnp.asarray(numbers, dtype))
        else:
            arrays.append(jnp.asarray(numbers * 40, jnp.float32).astype(quantized))
            scales[f"{which}_scale"] = jnp.asarray(rng.uniform(0.01, 0.05, shape), jnp.float32)
    return (*arrays, scales)  # type: ignore[return-value]


def by_pairs(query: Any, key: Any, value: Any, **options: Any) -> Any:
    """Call the function with pairs of arrays and their scales."""
    return attention(**paired({"query": query, "key": key, "value": value, **options}, as_tuple))


def options_of(compute: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the arguments with a gradient, and the others."""
    rng = np.random.default_rng(3)
    numbers = {"bias": rng.standard_normal((B, N, T, LONG)), "sinks": rng.standard_normal((B, N))}
    others = {"key_value_seq_lengths": jnp.asarray([LONG, 150]), "softcap": 9.0}
    return {name: jnp.asarray(x, compute) for name, x in numbers.items()}, others


def check_pairs(name: str, dtype: str, quantized: Any) -> None:
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
    grad_out = np.random.default_rng(1).standard_normal((B, T, N, WIDTH)).astype(dtype)
    out, pull = jax.vjp(lambda q, w: by_pairs(q, key, value, **w, **scales, **others), query, wanted)
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
def test_pairs_have_the_bits_of_the_functions_for_numpy(name: str, quantized: Any, dtype: str) -> None:
    check_pairs(name, dtype, quantized)


@pytest.mark.parametrize("quantized", [jnp.int8, jnp.float8_e4m3fn], ids=["int8", "float8"])
@pytest.mark.parametrize("name", SHAPES)
def test_results_and_gradients_are_those_of_the_products(name: str, quantized: Any) -> None:
    """Whatever has a scale may be dequantized before."""
    query, key, value, scales = arrays_of(name, "float32", quantized)
    wide = [
        x.astype(jnp.float32) * scales[f"{n}_scale"] if f"{n}_scale" in scales else x
        for n, x in (("key", key), ("value", value))
    ]
    ours = jax.jit(jax.value_and_grad(lambda q: jnp.sin(by_pairs(q, key, value, **scales)).sum()))(query)
    right = jax.jit(jax.value_and_grad(lambda q: jnp.sin(by_pairs(q, *wide)).sum()))(query)
    assert bits(ours[1]) == bits(right[1])
    without_batch = {n: x[0] if x.ndim == 4 else x for n, x in scales.items()}
    out, residual = by_pairs(query[0], key[0], value[0], **without_batch, return_residual=True)
    right, their_residual = by_pairs(query, *wide, return_residual=True)
    assert bits(out) == bits(right[0])
    assert bits(residual) == bits(their_residual[0])


def test_other_arrays_than_the_quantized_ones_have_gradients() -> None:
    query, key, value, scales = arrays_of("keys alone", "float32")
    grads = jax.grad(lambda q, v: jnp.sin(by_pairs(q, key, v, **scales)).sum(), (0, 1))(query, value)
    wide = key.astype(jnp.float32) * scales["key_scale"]
    right = jax.grad(lambda q, v: jnp.sin(by_pairs(q, wide, v)).sum(), (0, 1))(query, value)
    assert list(map(bits, grads)) == list(map(bits, right))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_quantized_arrays_and_scales_are_constants(dtype: str) -> None:
    def loss(key: Any, scale: Any) -> Any:
        return by_pairs(query, key, value, key_scale=scale, value_scale=scales["value_scale"]).sum()

    query, key, value, scales = arrays_of("tokens", dtype, jnp.float8_e4m3fn)
    grads = jax.grad(loss, (0, 1))(key, scales["key_scale"])
    assert grads[0].dtype == key.dtype
    assert not grads[0].astype(jnp.float32).any()
    assert not grads[1].any()
    query, key, value, scales = arrays_of("tokens", dtype)
    assert jax.grad(loss, allow_int=True)(key, scales["key_scale"]).dtype == jax.dtypes.float0


@pytest.mark.parametrize("axes", [(0, 0, 0, 0, 0), (0, None, None, None, None), (None, None, None, 0, 0),
                                  (None, 0, None, None, 0)])  # fmt: skip
def test_vmap_of_pairs_is_a_loop_in_every_bit(axes: tuple[int | None, ...]) -> None:
    def attend(query: Any, key: Any, value: Any, key_scale: Any, value_scale: Any) -> Any:
        return by_pairs(query, key, value, key_scale=key_scale, value_scale=value_scale, is_causal=True)

    query, key, value, scales = arrays_of("tokens", "float32")
    arguments = [query, key, value, *scales.values()]
    full = [x if a is None else jnp.stack([x, x[:, ::-1], x[::-1]]) for x, a in zip(arguments, axes, strict=True)]
    ours = jax.jit(jax.vmap(attend, axes))(*full)
    for i in range(3):
        part = [x if a is None else x[i] for x, a in zip(full, axes, strict=True)]
        assert bits(ours[i]) == bits(attend(*part))
