"""Arrays of a call of attention in JAX: checked, with four axes each, in the dtype that is computed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cattn._input.objects import scale_error, split_scale

_FLOATS = (np.float16, jnp.bfloat16, np.float32, np.float64)
_QUANTIZED = (np.int8, jnp.float8_e4m3fn)

Arrays = Mapping[str, Any]


def compute_dtype(dtype: Any) -> np.dtype[Any]:
    return np.dtype(np.float64 if dtype == np.float64 else np.float32)


def quantized_names(operands: Arrays) -> list[str]:
    """Return which of key and value have scales."""
    return [name for name in ("key", "value") if f"{name}_scale" in operands]


def shape_error(name: str, wanted: str, shape: tuple[int, ...]) -> ValueError:
    return ValueError(f"{name} must have shape {wanted}, got {shape}")


def as_array(obj: Any, name: str) -> Any:
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
    shape = (1,) * (4 - array.ndim) + array.shape
    if len(shape) > 4 or any(own not in (1, size) for own, size in zip(shape, quantized.shape, strict=True)):
        raise ValueError(
            f"{name} has shape {array.shape}, which does not broadcast to the shape of {name.removesuffix('.scale')} "
            f"{quantized.shape}"
        )
    if not (jnp.issubdtype(array.dtype, jnp.floating) or jnp.issubdtype(array.dtype, jnp.integer)):
        raise TypeError(f"{name} must be numbers, got {array.dtype}")
    return array.reshape(shape).astype(np.float32)


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


def _read_scores(obj: Any, name: str, inputs: Arrays) -> Any:
    """Return mask or bias with four axes."""
    name = "mask" if name == "attn_mask" else name
    array = as_array(obj, name)
    batch, seqlen_q, heads = inputs["query"].shape[:3]
    full = (batch, heads, seqlen_q, inputs["key"].shape[1])
    shape = (1,) * (4 - array.ndim) + array.shape
    if len(shape) > 4 or any(own not in (1, size) for own, size in zip(shape, full, strict=True)):
        raise ValueError(f"{name} has shape {array.shape}, which does not broadcast to (B, N, T, S) = {full}")
    if name == "mask" and array.dtype != bool:
        raise TypeError(
            f"mask must be bool (True = visible), got {array.dtype}: for a mask of zeros and ones, as flax makes them, "
            "pass mask.astype(bool); pass numbers that are to be added to the scores as bias"
        )
    if name == "bias" and array.dtype in _QUANTIZED:
        raise TypeError(f"bias has dtype {array.dtype} and no scale: multiply it by its scale")
    if name == "bias" and array.dtype == bool:
        raise TypeError("bias must be numbers, which are added to the scores, got bool; pass a boolean mask as mask")
    dtype = bool if name == "mask" else compute_dtype(inputs["query"].dtype)
    return array.reshape(shape).astype(dtype)


def read_blocks(obj: Any, size: int, inputs: Arrays) -> Any:
    """Return block_mask with four axes."""
    array = as_array(obj, "block_mask")
    batch, seqlen_q, heads = inputs["query"].shape[:3]
    full = (batch, heads, -(-seqlen_q // size), -(-inputs["key"].shape[1] // size))
    shape = (1,) * (4 - array.ndim) + array.shape
    if len(shape) > 4 or any(own not in (1, number) for own, number in zip(shape, full, strict=True)):
        raise ValueError(
            f"block_mask has shape {array.shape}, which does not broadcast to the blocks of size={size}, {full}"
        )
    if array.dtype != bool:
        raise TypeError(
            f"block_mask must be bool (True = visible), got {array.dtype}: for zeros and ones pass "
            "block_mask.astype(bool)"
        )
    return array.reshape(shape)


def _read_integers(obj: Any, name: str, inputs: Arrays) -> Any:
    """Return a number for each batch entry, or one for all, as int32."""
    array, batch = as_array(obj, name), inputs["query"].shape[0]
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise TypeError(f"{name} must be integers, got {array.dtype}")
    if array.shape not in ((), (1,), (batch,)):
        raise shape_error(name, f"(B,) = ({batch},) or ()", array.shape)
    given, wanted = jnp.iinfo(array.dtype), np.iinfo(np.int32)
    if given.max > wanted.max:
        array = jnp.clip(array, max(given.min, wanted.min), wanted.max)
    return array.reshape(-1).astype(np.int32)


def _read_heads(obj: Any, name: str, inputs: Arrays) -> Any:
    """Return a number for each query head, with or without the batch, as two axes."""
    array = as_array(obj, name)
    batch, _, heads, _ = inputs["query"].shape
    if array.shape not in ((heads,), (1, heads), (batch, heads)):
        raise shape_error(name, f"(N,) = ({heads},) or (B, N) = {(batch, heads)}", array.shape)
    if not (jnp.issubdtype(array.dtype, jnp.floating) or jnp.issubdtype(array.dtype, jnp.integer)):
        raise TypeError(f"{name} must be numbers, got {array.dtype}")
    return array.reshape(-1, heads).astype(compute_dtype(inputs["query"].dtype))


# What reads an array of a kind of csrc/call/operands.h.
READERS = {
    "MASK": _read_scores, "COMPUTED": _read_scores, "OFFSETS": _read_integers, "QUERY_COUNTS": _read_integers,
    "KEY_COUNTS": _read_integers, "SLOPES": _read_heads, "LOGITS": _read_heads,
}  # fmt: skip
