"""Attention by cattn on JAX's arrays on the CPU: under ``jit``, ``vmap`` and ``grad``.

XLA calls cattn's C code directly, as foreign functions: see _jax_derivatives.py.
"""

from __future__ import annotations

import operator
from typing import Any, NoReturn, TypedDict, Unpack

import numpy as np

import cattn
from cattn import _cattn
from cattn._input.arrays import check_tensors
from cattn._input.names import public_names, with_hints
from cattn._input.objects import BlockMask, Quantized, scale_error, split_blocks, split_scale
from cattn.functional._options import documented, spelled_out

try:
    import jax
    import jax.numpy as jnp
except ImportError as error:
    raise ImportError(f"cattn.integrations.jax needs JAX: pip install 'cattn[jax]' ({error})") from error

from ._jax_derivatives import Options, compute, compute_dtype, quantized_names
from ._jax_linear import Arrays

__all__ = ["dot_product_attention"]
__dir__ = public_names(globals())


def __getattr__(name: str) -> NoReturn:
    where = (
        ": call cattn.linear_attention on arrays, under jit by jax.pure_callback" if name == "linear_attention" else ""
    )
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}{where}")


jax.tree_util.register_pytree_node(
    Quantized, lambda pair: (tuple(pair), None), lambda _, leaves: Quantized._of_leaves(*leaves)
)
jax.tree_util.register_pytree_node(
    BlockMask, lambda pair: ((pair.blocks,), pair.size), lambda size, leaves: BlockMask._of_leaves(leaves[0], size)
)

_OPERANDS = _cattn._operands()
_REALS = ("REAL", "BOUND", "PROBABILITY")
# The numbers that csrc/xla has attributes for.
_NUMBERS = {name: kind for name, kind in _cattn._numbers() if kind in (*_REALS, "ALIGNMENT", "WINDOW", "COUNT")}
_CORNERS = ("upper_left", "lower_right")

# One compiled function for each set of options and shapes also serves calls outside of jit.
_compiled = jax.jit(compute, static_argnums=0)


# ---- arguments -------------------------------------------------------------------------------------------------------
def _read_options(inputs: Arrays, given: dict[str, Any], return_residual: Any) -> Options:
    """Return the options of a call, whose numbers have their names in the table."""
    is_causal, block_size = given["is_causal"], given["block_size"]
    static = {"return_residual": return_residual, "block_mask.size": block_size}
    check_static(**static, **{name: given[name] for name, kind in _NUMBERS.items() if kind not in ("WINDOW", "COUNT")})
    if not isinstance(return_residual, (bool, np.bool_)):
        raise TypeError(f"return_residual must be True or False, got {return_residual!r}")
    if not isinstance(is_causal, (bool, np.bool_)) and is_causal not in _CORNERS:
        raise ValueError(f"is_causal must be False, True, 'upper_left' or 'lower_right', got {is_causal!r}")
    head_dim, dtype = inputs["query"].shape[3], compute_dtype(inputs["query"].dtype)
    reals: dict[str, Any] = {name: given.get(name) for name, kind in _NUMBERS.items() if kind in _REALS}
    for name, number in reals.items():
        if isinstance(number, (jax.Array, np.ndarray)) and number.ndim == 0:
            reals[name] = number.item()
    # cattn checks the numbers, with its own messages
    rows = np.empty((1, head_dim), dtype)
    blocks = None if block_size is None else BlockMask._of_argument(True, block_size)
    cattn.explain(rows, rows, rows, block_mask=blocks, **reals)
    if reals["scale"] is None:
        reals["scale"] = _cattn._default_scale(head_dim)
    given = given | reals
    numbers = [part for name, kind in _NUMBERS.items() for part in _write_number(name, kind, given.get(name))]
    return Options(tuple(numbers), bool(return_residual))


def _write_number(name: str, kind: str, number: Any) -> list[tuple[str, float | int]]:
    """Return the attributes that csrc/xla/call.h has for a number."""
    if kind == "WINDOW":
        return list(zip((f"{name}_left", f"{name}_right"), read_window(number), strict=True))
    if kind == "ALIGNMENT":
        return [(name, _CORNERS.index(number) + 1 if number in _CORNERS else int(number))]
    if kind == "COUNT":
        return [(name, 0 if number is None else min(operator.index(number), 2**62))]
    return [(name, float(number or 0.0))]


class _Options(TypedDict, total=False):
    """Up to return_residual those of ``jax.nn.dot_product_attention``."""

    scale: float | None
    is_causal: bool | str
    query_seq_lengths: Any
    key_value_seq_lengths: Any
    local_window_size: int | tuple[int | None, int | None] | None
    return_residual: bool
    query_offset: Any
    key_value_seq_starts: Any
    softcap: float | None
    alibi_slopes: Any
    sinks: Any
    block_mask: Any
    gate: Any
    dropout_p: float
    dropout_key: Any


@with_hints
@documented
@spelled_out(order=(), is_causal=False, return_residual=False)
def dot_product_attention(
    query: Any, key: Any, value: Any, bias: Any = None, mask: Any = None, **options: Unpack[_Options]
) -> Any:
    """Compute attention of JAX's arrays on the CPU, with the arguments of ``jax.nn.dot_product_attention``.

    Parameters
    ----------
    query : array, shape (B, T, N, H) or (T, N, H)
        Queries of float16, bfloat16, float32 or float64. Key and value have the same dtype. Halves are computed in
        float32.
    key : array, shape (B, S, K, H) or (S, K, H), Quantized, or (array, array)
        Keys. N is a multiple of K: query head n reads the key-value head ``n // (N // K)``. A `cattn.Quantized`, which
        is a pytree, or a pair of arrays of JAX ``(values, scale)``: values of int8 or float8_e4m3fn, whose elements
        are the products with their scales, in float32. A scale broadcasts to the values: (B, S, K, 1) has one for each
        token and head, (1, 1, K, H) one for each column. They are constants: their gradient is 0. Halves of the other
        arrays are then computed in float32, and the output is rounded.
    value : array, shape (B, S, K, D) or (S, K, D), Quantized, or (array, array)
        Values. D may differ from H. They may be quantized, too.
    bias : array, optional
        Added to the scaled scores. Broadcasts to (B, N, T, S).
    mask : array of bool, optional
        True where a key is visible. Broadcasts to (B, N, T, S).
    scale : float, optional
        Default 1 / sqrt(H).
    is_causal : bool or {"upper_left", "lower_right"}
        Query i sees the keys j <= i; with "lower_right" the last query sees all keys.
    query_seq_lengths, key_value_seq_lengths : int or array of int, shape (B,), optional
        Numbers of valid queries and keys.
    local_window_size : int or (int, int), optional
        Numbers of keys that a query sees before and after its own position. None as one of the two sets no bound.
    return_residual : bool
        Also return the log-sum-exp of the scores, which is differentiable.

    Returns
    -------
    array, shape (B, T, N, D) or (T, N, D)
        The output, in the dtype of query. A query that sees no key has the output 0.
    residual : array, shape (B, T, N) or (T, N)
        Only with `return_residual`. In the dtype of query; -inf for a query that sees no key, whose gradient is 0.

    Other Parameters
    ----------------
    query_offset : int or array of int, shape (B,), optional
        Position of the first query among the keys, for causality, windows and slopes. Default 0.
    key_value_seq_starts : int or array of int, shape (B,), optional
        Index of the first valid key: padding on the left. Lengths and positions still count from key 0.
    softcap : float, optional
        Bounds the scaled scores: ``softcap * tanh(score / softcap)``.
    alibi_slopes : array, shape (N,) or (B, N), optional
        Slopes of ALiBi. They are constants: their gradient is 0.
    sinks : array, shape (N,) or (B, N), optional
        One extra logit for each query head, which enters the denominator only.
    block_mask : BlockMask or (array of bool, int), optional
        True where all pairs of a block of queries and keys are visible; hidden blocks take no time. The blocks
        broadcast to (B, N, ceil(T / size), ceil(S / size)). The size must be known when the call is traced.
    gate : array, optional
        Multiplies the output by its sigmoid. Broadcasts to (B, T, N, D), and is read in the dtype of query.
    dropout_key : key of jax.random, optional
        Draws the dropout mask. Required if dropout_p is above 0, else ignored.

    Raises
    ------
    TypeError, ValueError
        For arguments of another kind, shape or dtype. scale, softcap, dropout_p, is_causal, local_window_size and
        return_residual must be known when the call is traced.

    Notes
    -----
    The results have the bits of `cattn.scaled_dot_product_attention` and `cattn.attention_backward`, for any number of
    threads, under ``jit`` and ``vmap``, and in any batch. JAX itself does the rest of a sum where a gradient of bias
    or sinks is summed over broadcast axes. The seed of a dropout mask is ``words[0] + words[1] * 2**32`` with
    ``words = jax.random.bits(dropout_key, (2,), "uint32")``.

    The output and the residual are differentiable twice in query, key, value, bias and sinks, in reverse mode, in
    forward mode (``jax.jvp``), and in one over the other (``jax.hessian``). With quantized arrays, or with a gate, they
    are so once, by ``grad``, in the gate too. JAX's own function stops the gradient of its residual.
    `cattn.set_num_threads` sets the number of threads. The context `cattn.num_threads` has no effect, because JAX
    computes on threads of its own.

    Examples
    --------
    >>> import jax
    >>> import jax.numpy as jnp
    >>> from cattn.integrations.jax import dot_product_attention
    >>> x = jnp.eye(3).reshape(1, 3, 1, 3)
    >>> out = jax.jit(dot_product_attention, static_argnames="is_causal")(x, x, x, is_causal=True)
    >>> out.shape
    (1, 3, 1, 3)
    >>> jax.grad(lambda x: dot_product_attention(x, x, x).sum())(x).shape
    (1, 3, 1, 3)
    """
    operands = read_inputs(query, key, value)
    is_quantized = any(isinstance(given, (Quantized, tuple)) for given in (key, value))
    given: dict[str, Any] = {**options, "attn_mask": mask, "bias": bias}
    given["window_size"], dropout_key = given.pop("local_window_size"), given.pop("dropout_key")
    _, given["block_size"] = split_blocks(given["block_mask"])
    compiled = _read_options(operands, given, given.pop("return_residual"))
    if given["is_causal"] == "lower_right" and given["query_offset"] is not None:
        raise ValueError("is_causal='lower_right' sets the offset itself; with query_offset use is_causal='upper_left'")
    sizes = sizes_of(operands, given["block_size"])
    for name, axes, kind, _, _ in _OPERANDS:
        if given.get(name) is not None:
            wanted = tuple(sizes[letter] for letter in ("B", *axes))
            operands[name] = READERS[kind](given[name], name, wanted, operands["query"].dtype)
    if given["dropout_p"] > 0:
        operands["dropout_seed"] = read_seed(dropout_key, float(given["dropout_p"]))
    found = _compiled(compiled, operands)
    out = found["out"]
    if is_quantized:
        out = out.astype(as_array(query, "query").dtype)
    residual = found["residual"].astype(out.dtype) if compiled.return_residual else None
    if jnp.ndim(query) == 3:
        out, residual = out[0], None if residual is None else residual[0]
    return out if residual is None else (out, residual)


_FLOATS = (np.float16, jnp.bfloat16, np.float32, np.float64)
_QUANTIZED = (np.int8, jnp.float8_e4m3fn)


def shape_error(name: str, wanted: str, shape: tuple[int, ...]) -> ValueError:
    return ValueError(f"{name} must have shape {wanted}, got {shape}")


def as_array(obj: Any, name: str) -> Any:
    check_tensors(obj, name)
    try:
        return jnp.asarray(obj)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{name} must be an array, got {type(obj).__name__}: {error}") from error


def _check_dtype(array: Any, name: str, scale: Any) -> None:
    if scale is not None:
        if array.dtype not in _QUANTIZED:
            raise scale_error(name, array.dtype)
    elif array.dtype not in _FLOATS:
        hint = "multiply quantized numbers by their scale"
        if name != "query":
            hint = f"a cattn.Quantized has int8 or float8_e4m3fn, and a scale: pass it or the pair ({name}, scale)"
        raise TypeError(f"{name} must be float16, bfloat16, float32 or float64, got {array.dtype}; {hint}")


def _read_scale(obj: Any, name: str, quantized: Any) -> Any:
    """Return the scales of key or value in float32, with four axes."""
    array = as_array(obj, name)
    own = _broadcast(array, name, quantized.shape, f"the shape of {name.removesuffix('.scale')} {quantized.shape}")
    if not (jnp.issubdtype(array.dtype, jnp.floating) or jnp.issubdtype(array.dtype, jnp.integer)):
        raise TypeError(f"{name} must be numbers, got {array.dtype}")
    return own.astype(np.float32)


def _widen(arrays: dict[str, Any]) -> None:
    """Compute halves in float32 beside quantized arrays. Beside float64, those become float64 themselves."""
    wide = arrays["query"].dtype == np.float64
    for name in ("query", "key", "value"):
        scale = arrays.get(f"{name}_scale")
        if scale is None:
            arrays[name] = arrays[name].astype(compute_dtype(arrays[name].dtype))
        elif wide:
            product = arrays[name].astype(np.float32) * arrays.pop(f"{name}_scale")
            arrays[name] = jax.lax.stop_gradient(product.astype(np.float64))


def read_inputs(query: Any, key: Any, value: Any) -> dict[str, Any]:
    """Return the arrays with four axes each: query, key, value and the scales that there are."""
    arrays = {}
    for name, obj in (("query", query), ("key", key), ("value", value)):
        values, scale = (obj, None) if name == "query" else split_scale(obj, name)
        array = as_array(values, name)
        if array.ndim not in (3, 4):
            axes = "T, N, H" if name == "query" else "S, K, H"
            raise shape_error(name, f"(B, {axes}) or ({axes})", array.shape)
        _check_dtype(array, name, scale)
        arrays[name] = array if array.ndim == 4 else array[None]
        if scale is not None:
            arrays[name] = jax.lax.stop_gradient(arrays[name])
            arrays[f"{name}_scale"] = _read_scale(scale, f"{name}.scale", arrays[name])
    wanted = arrays["query"]
    for name in ("key", "value"):
        if f"{name}_scale" not in arrays and arrays[name].dtype != wanted.dtype:
            raise TypeError(f"{name} must have the dtype of query, {wanted.dtype}, got {arrays[name].dtype}")
        if arrays[name].shape[0] != wanted.shape[0]:
            raise ValueError(
                f"{name} must have the batch size of query, {wanted.shape[0]}, got {arrays[name].shape[0]}"
            )
    heads, (_, seqlen_k, kv_heads, head_dim) = wanted.shape[2], arrays["key"].shape
    if head_dim != wanted.shape[3]:
        raise ValueError(f"key must have the head_dim of query, {wanted.shape[3]}, got {head_dim}")
    if arrays["value"].shape[1:3] != (seqlen_k, kv_heads):
        raise ValueError(
            f"value must have the tokens and heads of key, {(seqlen_k, kv_heads)}, got {arrays['value'].shape[1:3]}"
        )
    if heads % kv_heads if kv_heads else heads:
        raise ValueError(f"query must have a multiple of the {kv_heads} heads of key, got {heads}")
    if quantized_names(arrays):
        _widen(arrays)
    return arrays


def sizes_of(inputs: Arrays, block_size: Any) -> dict[str, int]:
    """Return the sizes of the call by the letters of csrc/call/operands.h, and B for the batch."""
    batch, seqlen_q, heads = inputs["query"].shape[:3]
    sizes = {"B": batch, "N": heads, "T": seqlen_q, "S": inputs["key"].shape[1], "D": inputs["value"].shape[3]}
    if block_size is not None:
        sizes |= {"X": -(-sizes["T"] // block_size), "Y": -(-sizes["S"] // block_size)}
    return sizes


def _broadcast(array: Any, name: str, full: tuple[int, ...], meaning: str) -> Any:
    """Return the array with as many axes as it is broadcast to."""
    shape = (1,) * (len(full) - array.ndim) + array.shape
    if len(shape) > len(full) or any(own not in (1, size) for own, size in zip(shape, full, strict=True)):
        raise ValueError(f"{name} has shape {array.shape}, which does not broadcast to {meaning}")
    return array.reshape(shape)


def _read_scores(obj: Any, name: str, full: tuple[int, ...], dtype: Any) -> Any:
    """Return mask or bias with four axes."""
    name = "mask" if name == "attn_mask" else name
    array = as_array(obj, name)
    own = _broadcast(array, name, full, f"(B, N, T, S) = {full}")
    if name == "mask" and array.dtype != bool:
        raise TypeError(
            f"mask must be bool (True = visible), got {array.dtype}: for a mask of zeros and ones, as flax makes them, "
            "pass mask.astype(bool); pass numbers that are to be added to the scores as bias"
        )
    if name == "bias" and array.dtype in _QUANTIZED:
        raise TypeError(f"bias has dtype {array.dtype} and no scale: multiply it by its scale")
    if name == "bias" and array.dtype == bool:
        raise TypeError("bias must be numbers, which are added to the scores, got bool; pass a boolean mask as mask")
    return own.astype(bool if name == "mask" else compute_dtype(dtype))


def _read_blocks(obj: Any, name: str, full: tuple[int, ...], dtype: Any) -> Any:
    """Return block_mask with four axes."""
    blocks, size = split_blocks(obj)
    array = as_array(blocks, name)
    own = _broadcast(array, name, full, f"the blocks of size={size}, {full}")
    if array.dtype != bool:
        raise TypeError(
            f"block_mask must be bool (True = visible), got {array.dtype}: for zeros and ones pass "
            "block_mask.astype(bool)"
        )
    return own


def _read_integers(obj: Any, name: str, full: tuple[int, ...], dtype: Any) -> Any:
    """Return a number for each batch entry, or one for all, as int32."""
    array, (batch,) = as_array(obj, name), full
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise TypeError(f"{name} must be integers, got {array.dtype}")
    if array.shape not in ((), (1,), (batch,)):
        raise shape_error(name, f"(B,) = ({batch},) or ()", array.shape)
    given, wanted = jnp.iinfo(array.dtype), np.iinfo(np.int32)
    if given.max > wanted.max:
        array = jnp.clip(array, max(given.min, wanted.min), wanted.max)
    return array.reshape(-1).astype(np.int32)


def _read_heads(obj: Any, name: str, full: tuple[int, ...], dtype: Any) -> Any:
    """Return a number for each query head, with or without the batch, as two axes."""
    array, (_, heads) = as_array(obj, name), full
    if array.shape not in ((heads,), (1, heads), full):
        raise shape_error(name, f"(N,) = ({heads},) or (B, N) = {full}", array.shape)
    if not (jnp.issubdtype(array.dtype, jnp.floating) or jnp.issubdtype(array.dtype, jnp.integer)):
        raise TypeError(f"{name} must be numbers, got {array.dtype}")
    return array.reshape(-1, heads).astype(compute_dtype(dtype))


def _read_gate(obj: Any, name: str, full: tuple[int, ...], dtype: Any) -> Any:
    """Return numbers that broadcast to the output, with four axes."""
    array, (batch, heads, tokens, width) = as_array(obj, name), full
    own = _broadcast(array, name, (batch, tokens, heads, width), f"(B, T, N, D) = {(batch, tokens, heads, width)}")
    if array.dtype not in _FLOATS:
        raise TypeError(f"{name} must be float16, bfloat16, float32 or float64, got {array.dtype}")
    return own.astype(dtype)


# What reads an array of a kind of csrc/call/operands.h, given its whole shape and the dtype of query.
READERS = {
    "MASK": _read_scores, "COMPUTED": _read_scores, "OFFSETS": _read_integers, "QUERY_COUNTS": _read_integers,
    "KEY_COUNTS": _read_integers, "SLOPES": _read_heads, "LOGITS": _read_heads, "BLOCKS": _read_blocks,
    "GATES": _read_gate,
}  # fmt: skip


def read_seed(dropout_key: Any, dropout_p: float) -> Any:
    """Return the two words of a seed."""
    if dropout_key is None:
        raise ValueError(f"dropout_p is {dropout_p}: pass dropout_key, for example jax.random.key(0)")
    try:
        return jax.random.bits(dropout_key, (2,), np.uint32)
    except (TypeError, ValueError) as error:
        raise TypeError(f"dropout_key must be one key of jax.random: {error}") from error


def read_side(obj: Any) -> int:
    """Return one side of a window: a number of keys, or -1 for no bound."""
    if obj is None:
        return -1
    try:
        side = operator.index(obj)
    except Exception:  # a tracer raises an error of JAX's own
        side = -1
    if isinstance(obj, (bool, np.bool_)) or side < 0:
        raise ValueError(
            f"local_window_size must be an int or (left, right), numbers of keys that are not negative and known when "
            f"the call is traced, got {obj!r}"
        )
    return min(side, 2**62)


def read_window(local_window_size: Any) -> tuple[int, int]:
    """Return both sides of a window."""
    if isinstance(local_window_size, (tuple, list)):
        if len(local_window_size) != 2:
            raise ValueError(f"local_window_size must be an int or (left, right), got {local_window_size!r}")
        left, right = map(read_side, local_window_size)
    else:
        left = right = read_side(local_window_size)
    return left, right


def check_static(**arguments: Any) -> None:
    for name, value in arguments.items():
        if isinstance(value, jax.core.Tracer):
            raise TypeError(f"{name} must be known when the call is traced, got a tracer: make it a static argument")
