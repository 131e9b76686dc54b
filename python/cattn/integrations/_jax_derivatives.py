"""The passes over attention that C computes for JAX: attention, its gradients, and the derivatives of both.

XLA calls cattn's C code directly, as foreign functions. Python takes no part in a compiled call, and copies no array.
"""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import numpy as np

import cattn
from cattn import _cattn
from cattn._input.objects import BlockMask, Quantized

from ._jax_inputs import Arrays, compute_dtype

# The operands of the foreign functions, in the order of csrc/xla/call.h. The attribute `present` says by its bits which
# of them a call has.
ARGUMENTS, RESULTS = _cattn._xla_operands()
BIT = {name: 1 << i for i, name in enumerate((*ARGUMENTS, *RESULTS))}

INPUTS = ("query", "key", "value", "bias", "sinks")  # each has a gradient and may have a tangent
TANGENTS = tuple(f"{name}_tangent" for name in INPUTS)

Pass = Literal["forward", "backward", "jvp", "jvp_backward"]


@dataclasses.dataclass(frozen=True)
class Options:
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


for _name, _target in _cattn._xla_targets().items():
    jax.ffi.register_ffi_target(f"cattn_attention_{_name}", _target, platform="cpu", api_version=1)


@functools.cache
def is_foreign() -> bool:
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


# ---- the calls -------------------------------------------------------------------------------------------------------
def call_pass(which: Pass, options: Options, operands: Arrays, results: Arrays) -> dict[str, Any]:
    """Call a pass with these operands. `results` has the shape and dtype of each result."""
    names = [name for name in ARGUMENTS if name in operands]
    shapes = {name: results[name] for name in RESULTS if name in results}
    arrays = [operands[name] for name in names]
    if is_foreign():
        call = jax.ffi.ffi_call(f"cattn_attention_{which}", tuple(shapes.values()), vmap_method="expand_dims")
        call = functools.partial(call, **options.attributes(sum(BIT[name] for name in (*names, *shapes))))
    else:
        python = functools.partial(_call_python, which, options, names, shapes)
        call = functools.partial(jax.pure_callback, python, tuple(shapes.values()), vmap_method="expand_dims")
    return dict(zip(shapes, call(*arrays), strict=True))


def _bias_gradient_shape(query: Any, key: Any, bias: Any) -> tuple[int, ...]:
    """Return the shape of the gradient that C computes: it sums over one of the last axes, then over no other."""
    batch, seqlen_q, heads = query.shape[:3]
    shape: tuple[int, ...] = bias.shape
    if shape[2] != seqlen_q:
        return batch, heads, 1, key.shape[1]
    if shape[3] != key.shape[1]:
        return batch, heads, seqlen_q, 1
    return shape


def gradient_shapes(at: Arrays, wanted: Sequence[str]) -> dict[str, Any]:
    """Return the shapes of the gradients of a pass from which these can be taken."""
    names = ("query", "key", "value", *(name for name in ("bias", "sinks") if name in wanted))
    shapes = {name: at[name].shape for name in names}
    if is_foreign() and "bias" in shapes:
        shapes["bias"] = _bias_gradient_shape(at["query"], at["key"], at["bias"])
    if is_foreign() and "sinks" in shapes:
        shapes["sinks"] = (at["query"].shape[0], at["query"].shape[2])
    dtype = compute_dtype(at["query"].dtype)
    return {f"grad_{name}": jax.ShapeDtypeStruct(shape, dtype) for name, shape in shapes.items()}


def _call_python(which: Pass, options: Options, names: list[str], shapes: Arrays, *arrays: Any) -> tuple[Any, ...]:
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


def _numpy_options(options: Options, operands: Arrays) -> dict[str, Any]:
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


def _forward_python(options: Options, operands: Arrays, shapes: Arrays) -> dict[str, Any]:
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


def _results_python(operands: Arrays) -> dict[str, Any]:
    lse = np.ascontiguousarray(operands["forward_lse"]).view(np.float64)[..., 0].swapaxes(1, 2)
    return {"out": operands["forward_out"].swapaxes(1, 2), "lse": lse}


def _grad_lse(operands: Arrays) -> Any:
    return operands["grad_residual"].swapaxes(1, 2) if "grad_residual" in operands else None


def _gradients(grads: cattn.AttentionGradients, shapes: Arrays) -> dict[str, Any]:
    """Return the gradients in JAX's layout, with bias and sinks where they are wanted."""
    found = {f"grad_{name}": getattr(grads, name).swapaxes(1, 2) for name in ("query", "key", "value")}
    return found | {f"grad_{name}": getattr(grads, name) for name in ("bias", "sinks") if f"grad_{name}" in shapes}


def _backward_python(options: Options, operands: Arrays, shapes: Arrays) -> dict[str, Any]:
    grad_out, query, key, value = _heads_first(operands, "grad_out", "query", "key", "value")
    grads = cattn.attention_backward(
        grad_out, query, key, value, **_results_python(operands), grad_lse=_grad_lse(operands),
        **_numpy_options(options, operands),
    )  # fmt: skip
    return _gradients(grads, shapes)


def _tangents_python(operands: Arrays) -> dict[str, Any]:
    inputs = {name: operands[name].swapaxes(1, 2) for name in TANGENTS[:3] if name in operands}
    return inputs | {name: operands[name] for name in TANGENTS[3:] if name in operands}


def _jvp_python(options: Options, operands: Arrays, shapes: Arrays) -> dict[str, Any]:
    query, key, value = _heads_first(operands, "query", "key", "value")
    result = cattn.attention_jvp(
        query, key, value, **_tangents_python(operands), **_results_python(operands),
        return_lse=True, **_numpy_options(options, operands),
    )  # fmt: skip
    return {"out_tangent": result.out_tangent.swapaxes(1, 2), "lse_tangent": result.lse_tangent.swapaxes(1, 2)}


def _jvp_backward_python(options: Options, operands: Arrays, shapes: Arrays) -> dict[str, Any]:
    grad_out, query, key, value, out_tangent = _heads_first(
        operands, "grad_out", "query", "key", "value", "forward_out_tangent"
    )
    grads = cattn.attention_jvp_backward(
        grad_out, query, key, value, **_results_python(operands), out_tangent=out_tangent,
        lse_tangent=operands["forward_lse_tangent"].swapaxes(1, 2), grad_lse_tangent=_grad_lse(operands),
        **_tangents_python(operands), **_numpy_options(options, operands),
    )  # fmt: skip
    return _gradients(grads, shapes)


_PASSES: dict[Pass, Callable[[Options, Arrays, Arrays], dict[str, Any]]] = {
    "forward": _forward_python,
    "backward": _backward_python,
    "jvp": _jvp_python,
    "jvp_backward": _jvp_backward_python,
}
