"""Attention by cattn on JAX's arrays on the CPU: under ``jit``, ``vmap`` and ``grad``.

XLA calls cattn's C code directly, as two foreign functions: attention and its gradients. Python takes no part in a
compiled call, and no array is copied.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
import warnings
from collections.abc import Callable, Mapping
from typing import Any, Literal

import numpy as np

import cattn
from cattn import _cattn
from cattn._input.names import with_hints
from cattn._input.pairs import BlockMask, Quantized, split_blocks

try:
    import jax
    import jax.numpy as jnp
except ImportError as error:
    raise ImportError(f"cattn.integrations.jax needs JAX: pip install 'cattn[jax]' ({error})") from error

from ._jax_inputs import READERS, Arrays, as_array, compute_dtype, quantized_names, read_blocks, read_inputs
from ._jax_static import check_static, read_seed, read_window, refuse_derivatives

__all__ = ["dot_product_attention"]

# The operands of the foreign functions, in the order of csrc/xla/call.h. The attribute `present` says by its bits which
# of them a call has.
_ARGUMENTS, _RESULTS = _cattn._xla_operands()
_BIT = {name: 1 << i for i, name in enumerate((*_ARGUMENTS, *_RESULTS))}

_Pass = Literal["forward", "backward"]


@dataclasses.dataclass(frozen=True)
class _Options:
    """What is known when a call is compiled. A window without a bound has -1."""

    scale: float
    softcap: float
    dropout_p: float
    left: int
    right: int  # 0 with causality
    lower_right: bool
    block_size: int  # or 0
    return_residual: bool

    def attributes(self, present: int) -> dict[str, np.generic]:
        """Return the attributes of the foreign functions: XLA_OPTIONS of csrc/xla/call.h."""
        real = {name: np.float64(getattr(self, name)) for name in ("scale", "softcap", "dropout_p")}
        return real | {
            "left": np.int64(self.left),
            "right": np.int64(self.right),
            "lower_right": np.int64(self.lower_right),
            "block_size": np.int64(self.block_size),
            "present": np.int64(present),
        }


jax.tree_util.register_pytree_node(
    Quantized, lambda pair: (tuple(pair), None), lambda _, leaves: Quantized._of_leaves(*leaves)
)
jax.tree_util.register_pytree_node(
    BlockMask, lambda pair: ((pair.blocks,), pair.size), lambda size, leaves: BlockMask._of_leaves(leaves[0], size)
)

for _name, _target in _cattn._xla_targets().items():
    jax.ffi.register_ffi_target(f"cattn_attention_{_name}", _target, platform="cpu", api_version=1)


@functools.cache
def _is_foreign() -> bool:
    """Return whether XLA passes the structs that cattn knows. If not, warn: the calls go by way of Python."""
    # XLA shows its structs when JAX starts the CPU. An import must not do that: JAX could not be configured any more.
    jax.local_devices(backend="cpu")
    if _cattn._xla_is_known():
        return True
    warnings.warn(
        f"cattn does not know the foreign functions of jaxlib {jax.lib.__version__}: JAX calls it by "
        f"jax.pure_callback, which is slower and has the same results",
        RuntimeWarning,
        stacklevel=2,
    )
    return False


# ---- the calls of the two passes -------------------------------------------------------------------------------------
def _call(which: _Pass, options: _Options, operands: Arrays, results: Arrays) -> dict[str, Any]:
    """Call a pass with these operands. `results` has the shape and dtype of each result."""
    names = [name for name in _ARGUMENTS if name in operands]
    shapes = {name: results[name] for name in _RESULTS if name in results}
    arrays = [operands[name] for name in names]
    if _is_foreign():
        call = jax.ffi.ffi_call(f"cattn_attention_{which}", tuple(shapes.values()), vmap_method="expand_dims")
        call = functools.partial(call, **options.attributes(sum(_BIT[name] for name in (*names, *shapes))))
    else:
        python = functools.partial(_call_python, which, options, names, shapes)
        call = functools.partial(jax.pure_callback, python, tuple(shapes.values()), vmap_method="expand_dims")
    return dict(zip(shapes, refuse_derivatives(call)(*arrays), strict=True))


def _call_python(which: _Pass, options: _Options, names: list[str], shapes: Arrays, *arrays: Any) -> tuple[Any, ...]:
    """Do the same by cattn's functions for NumPy."""
    operands = dict(zip(names, map(np.asarray, arrays), strict=True))
    n_leading = operands["query"].ndim - 4
    leading = np.broadcast_shapes(*(array.shape[:n_leading] for array in operands.values()))
    # Gradients have the leading axes of the call, not of an argument that all entries share.
    for name, array in operands.items():
        operands[name] = np.broadcast_to(array, leading + array.shape[n_leading:])
    results = {name: np.empty(leading + shape.shape, shape.dtype) for name, shape in shapes.items()}
    for index in np.ndindex(leading):  # a dropout counts from the batch entry, so each index is a call of its own
        part = {name: array[index] for name, array in operands.items()}
        for name, result in _PASSES[which](options, part, shapes).items():
            results[name][index] = result
    return tuple(results.values())


def _numpy_options(options: _Options, operands: Arrays) -> dict[str, Any]:
    """Return the keyword arguments of cattn's functions."""
    tokens = {"query_seq_lengths": "query", "key_value_seq_lengths": "key", "key_value_seq_starts": "key"}
    counts = {
        name: np.clip(operands[name], 0, operands[array].shape[1]) for name, array in tokens.items() if name in operands
    }
    numbers = {name: operands.get(name) for name in ("bias", "alibi_slopes", "sinks", "query_offset")}
    if numbers["query_offset"] is None and not options.lower_right:
        numbers["query_offset"] = 0
    words = operands.get("dropout_seed")
    return {
        **counts,
        **numbers,
        "attn_mask": operands.get("attn_mask"),
        "block_mask": BlockMask(operands["block_mask"], options.block_size) if "block_mask" in operands else None,
        "is_causal": "lower_right" if options.lower_right else False,
        "window_size": (options.left, options.right),
        "scale": options.scale,
        "softcap": options.softcap,
        "dropout_p": options.dropout_p,
        "rng": None if words is None else int(words[0]) | int(words[1]) << 32,
        "enable_gqa": True,
    }


def _heads_first(operands: Arrays, *names: str) -> list[Any]:
    """Return NumPy's arrays as cattn takes them, those with a scale as Quantized."""
    found = [operands[name].swapaxes(1, 2) for name in names]
    scales = [operands.get(f"{name}_scale") for name in names]
    return [
        a if scale is None else Quantized._of_argument(a, scale.swapaxes(1, 2), name)
        for name, a, scale in zip(names, found, scales, strict=True)
    ]


def _forward_python(options: _Options, operands: Arrays, shapes: Arrays) -> dict[str, Any]:
    inputs = _heads_first(operands, "query", "key", "value")
    batch, seqlen_q, heads = operands["query"].shape[:3]
    dtype = np.float64 if "lse" in shapes else shapes["residual"].dtype if "residual" in shapes else np.float32
    lse = np.empty((batch, heads, seqlen_q), np.promote_types(dtype, compute_dtype(inputs[0].dtype)))
    result = cattn.scaled_dot_product_attention(
        *inputs, return_lse=True, out=cattn.AttentionOutput(lse=lse), **_numpy_options(options, operands)
    )
    assert result.out is not None
    rows = np.ascontiguousarray(lse.swapaxes(1, 2))
    found = {"out": result.out.swapaxes(1, 2)}
    if "residual" in shapes:
        found["residual"] = rows
    if "lse" in shapes:
        found["lse"] = rows.view(np.uint32).reshape(*rows.shape, 2)
    return found


def _backward_python(options: _Options, operands: Arrays, shapes: Arrays) -> dict[str, Any]:
    grad_out, query, key, value, out = _heads_first(operands, "grad_out", "query", "key", "value", "forward_out")
    lse = np.ascontiguousarray(operands["forward_lse"]).view(np.float64)[..., 0].swapaxes(1, 2)
    grad_lse = operands["grad_residual"].swapaxes(1, 2) if "grad_residual" in operands else None
    grads = cattn.attention_backward(
        grad_out, query, key, value, out, lse, grad_lse=grad_lse, **_numpy_options(options, operands)
    )
    found = {f"grad_{name}": getattr(grads, name).swapaxes(1, 2) for name in ("query", "key", "value")}
    return found | {f"grad_{name}": getattr(grads, name) for name in ("bias", "sinks") if f"grad_{name}" in shapes}


_PASSES: dict[_Pass, Callable[[_Options, Arrays, Arrays], dict[str, Any]]] = {
    "forward": _forward_python,
    "backward": _backward_python,
}


# ---- differentiation -------------------------------------------------------------------------------------------------
def _forward(options: _Options, operands: Arrays, results: tuple[str, ...]) -> dict[str, Any]:
    """Return the results of these names."""
    query, value = operands["query"], operands["value"]
    rows = query.shape[:3]
    shapes = {
        "out": jax.ShapeDtypeStruct((*rows, value.shape[3]), query.dtype),
        "residual": jax.ShapeDtypeStruct(rows, compute_dtype(query.dtype)),
        # Each is a float64, as two words: without jax_enable_x64 JAX has no float64.
        "lse": jax.ShapeDtypeStruct((*rows, 2), np.uint32),
    }
    return _call("forward", options, operands, {name: shapes[name] for name in results})


def _results(options: _Options) -> tuple[str, ...]:
    return ("out", "residual") if options.return_residual else ("out",)


def _attend(options: _Options, operands: Arrays) -> dict[str, Any]:
    return _forward(options, operands, _results(options))


def _attend_and_save(options: _Options, primals: Mapping[str, Any]) -> tuple[dict[str, Any], Any]:
    """Return the results, and what the gradients need. The names of the last dict have a gradient."""
    operands = {name: primal.value for name, primal in primals.items()}
    found = _forward(options, operands, (*_results(options), "lse"))
    lse = found.pop("lse")
    wanted: dict[str, tuple[()]] = {
        name: () for name in ("bias", "sinks") if name in primals and primals[name].perturbed
    }
    return found, (operands, found["out"], lse, wanted)


def _bias_gradient_shape(query: Any, key: Any, bias: Any) -> tuple[int, ...]:
    """Return the shape of the gradient that C computes: it sums over one of the last axes, then over no other."""
    batch, seqlen_q, heads = query.shape[:3]
    shape: tuple[int, ...] = bias.shape
    if shape[2] != seqlen_q:
        return batch, heads, 1, key.shape[1]
    if shape[3] != key.shape[1]:
        return batch, heads, seqlen_q, 1
    return shape


def _sum_to(gradient: Any, shape: tuple[int, ...]) -> Any:
    """Sum over the axes along which an argument of this shape was broadcast."""
    axes = tuple(i for i, (full, own) in enumerate(zip(gradient.shape, shape, strict=True)) if full != own)
    return gradient.sum(axis=axes, keepdims=True) if axes else gradient


def _differentiate(options: _Options, saved: Any, cotangents: Arrays) -> tuple[dict[str, Any]]:
    """Return the gradients."""
    operands, out, lse, wanted = saved
    query, key = operands["query"], operands["key"]
    dtype = compute_dtype(query.dtype)
    shapes = {name: operands[name].shape for name in ("query", "key", "value", *wanted)}
    if _is_foreign() and "bias" in wanted:
        shapes["bias"] = _bias_gradient_shape(query, key, operands["bias"])
    if _is_foreign() and "sinks" in wanted:
        shapes["sinks"] = (query.shape[0], query.shape[2])
    results = {f"grad_{name}": jax.ShapeDtypeStruct(shape, dtype) for name, shape in shapes.items()}
    given = {**operands, "forward_out": out, "forward_lse": lse}
    for name in _results(options):
        gradient = cotangents[name]
        if not isinstance(gradient, jax.custom_derivatives.SymbolicZero):
            given[f"grad_{name}"] = gradient
    given.setdefault("grad_out", jnp.zeros(out.shape, out.dtype))
    grads = _call("backward", options, given, results)
    differentiable = set(shapes).difference(quantized_names(operands))
    return (
        {
            name: _sum_to(grads[f"grad_{name}"], array.shape).astype(array.dtype) if name in differentiable else None
            for name, array in operands.items()
        },
    )


_differentiable = jax.custom_vjp(_attend, nondiff_argnums=(0,))
# With symbolic zeros, the gradient of a constant bias is not computed.
_differentiable.defvjp(_attend_and_save, _differentiate, symbolic_zeros=True)
# One compiled function for each set of options and shapes also serves calls outside of jit.
_compiled = jax.jit(_differentiable, static_argnums=0)


# ---- arguments -------------------------------------------------------------------------------------------------------
def _read_options(
    inputs: Arrays, scale: Any, softcap: Any, dropout_p: Any, is_causal: Any, window: Any, return_residual: Any,
    block_size: Any,
) -> _Options:  # fmt: skip
    check_static(
        scale=scale, softcap=softcap, dropout_p=dropout_p, is_causal=is_causal, return_residual=return_residual,
        **{"block_mask.size": block_size},
    )  # fmt: skip
    if not isinstance(return_residual, (bool, np.bool_)):
        raise TypeError(f"return_residual must be True or False, got {return_residual!r}")
    if not isinstance(is_causal, (bool, np.bool_)) and is_causal not in ("upper_left", "lower_right"):
        raise ValueError(f"is_causal must be False, True, 'upper_left' or 'lower_right', got {is_causal!r}")
    query = inputs["query"]
    numbers = {"scale": scale, "softcap": softcap, "dropout_p": dropout_p}
    for name, number in numbers.items():
        if isinstance(number, (jax.Array, np.ndarray)) and number.ndim == 0:
            numbers[name] = number.item()
    # cattn checks the numbers, with its own messages, on a call of no rows
    rows = np.empty((1, query.shape[3]), compute_dtype(query.dtype))
    blocks = None if block_size is None else BlockMask._of_argument(True, block_size)
    cattn.scaled_dot_product_attention(rows[:0], rows, rows, block_mask=blocks, **numbers)
    left, right = read_window(window, causal=bool(is_causal))
    return _Options(
        scale=float(1 / math.sqrt(query.shape[3] or 1) if scale is None else numbers["scale"]),
        softcap=float(numbers["softcap"] or 0.0),
        dropout_p=float(numbers["dropout_p"]),
        left=left,
        right=right,
        lower_right=is_causal == "lower_right",
        block_size=0 if block_size is None else min(operator.index(block_size), 2**62),
        return_residual=bool(return_residual),
    )


@with_hints
def dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    mask: Any = None,
    *,
    scale: float | None = None,
    is_causal: bool | str = False,
    query_seq_lengths: Any = None,
    key_value_seq_lengths: Any = None,
    local_window_size: int | tuple[int | None, int | None] | None = None,
    return_residual: bool = False,
    query_offset: Any = None,
    key_value_seq_starts: Any = None,
    softcap: float | None = None,
    alibi_slopes: Any = None,
    sinks: Any = None,
    block_mask: Any = None,
    dropout_p: float = 0.0,
    dropout_key: Any = None,
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
    dropout_p : float
        Probability that a weight is dropped.
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

    The output and the residual are differentiable once, in reverse mode, in query, key, value, bias and sinks. JAX's
    own function stops the gradient of its residual. `cattn.set_num_threads` sets the number of threads. The context
    `cattn.num_threads` has no effect, because JAX computes on threads of its own.

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
    blocks, block_size = split_blocks(block_mask)
    options = _read_options(operands, scale, softcap, dropout_p, is_causal, local_window_size, return_residual,
                            block_size)  # fmt: skip
    if options.lower_right and query_offset is not None:
        raise ValueError("is_causal='lower_right' sets the offset itself; with query_offset use is_causal='upper_left'")
    given: dict[str, Any] = {
        "attn_mask": mask, "bias": bias, "query_offset": query_offset, "query_seq_lengths": query_seq_lengths,
        "key_value_seq_lengths": key_value_seq_lengths, "key_value_seq_starts": key_value_seq_starts,
        "alibi_slopes": alibi_slopes, "sinks": sinks,
    }  # fmt: skip
    for name, _, kind, _, _ in _cattn._operands():
        if given.get(name) is not None:
            operands[name] = READERS[kind](given[name], name, operands)
    if block_mask is not None:
        operands["block_mask"] = read_blocks(blocks, options.block_size, operands)
    if options.dropout_p > 0:
        operands["dropout_seed"] = read_seed(dropout_key, options.dropout_p)
    found = _compiled(options, operands)
    out = found["out"]
    if is_quantized:
        out = out.astype(as_array(query, "query").dtype)
    residual = found["residual"].astype(out.dtype) if options.return_residual else None
    if jnp.ndim(query) == 3:
        out, residual = out[0], None if residual is None else residual[0]
    return out if residual is None else (out, residual)
