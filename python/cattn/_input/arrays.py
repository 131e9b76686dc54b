"""Conversion of arguments that the C code cannot read directly: array-likes, other dtypes, subclasses, masks, offsets.

The C code calls these functions with the object, the argument's name (for error messages) and "f" or "d", the dtype it
computes in. They return exact ndarrays: native byte order, aligned, with strides in whole elements.
"""

from __future__ import annotations

import itertools
import math
import operator
import os
import sys
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from .. import _cattn
from .contexts import in_default_mode

Array = NDArray[Any]

_MASKS = ("attn_mask", "mask", "where", "bias")
_MAY_BE_QUANTIZED = ("key", "value", "weight")
_MASK_ADVICE = {  # the argument that can take the mask of a numpy.ma array
    # a key is hidden as a whole, with all its elements
    **{
        x: f" and attn_mask=~np.ma.getmaskarray({x}).any(axis=-1)[..., None, :] (True = keep), where a mask hides keys"
        for x in ("key", "value")
    },
    "query": ", and leave out the rows of the result that belong to masked queries",
    "scores": " and mask=~scores.mask (True = keep)",
    "x": ", and to softmax where=~x.mask (True = keep)",
}


def refuse_masked(obj: object, name: str) -> None:
    """Raise TypeError for a ``numpy.ma`` array: its mask would be lost."""
    masked = sys.modules.get("numpy.ma")  # not imported: there are no such arrays
    if masked is None or not isinstance(obj, masked.MaskedArray):
        return
    if name in _MASKS:
        cure = f"{name}.filled({'-np.inf' if obj.dtype.kind == 'f' else False}), which hides what it masks"
    else:
        cure = f"{name}.data{_MASK_ADVICE.get(name, '')}"
    raise TypeError(f"{name} is a masked array (numpy.ma): pass {cure}")


def refuse_objects(obj: object, name: str) -> None:
    """Raise TypeError for an object of cattn that is no array, and say where it goes."""
    if hasattr(type(obj), "_instead"):
        cure = type(obj)._instead  # type: ignore[attr-defined]
        raise TypeError(f"{name} must be an array of real numbers, got {type(obj).__name__}: {cure}")


def _is_of_ml_dtypes(dtype: np.dtype[Any], name: str) -> bool:
    """Return whether dtype is this one of ml_dtypes, without importing that package."""
    ml_dtypes = sys.modules.get("ml_dtypes")
    return ml_dtypes is not None and dtype == getattr(ml_dtypes, name)


def is_bfloat16(dtype: np.dtype[Any]) -> bool:
    """Return whether dtype is the bfloat16 of ml_dtypes."""
    return _is_of_ml_dtypes(dtype, "bfloat16")


def load_ml_dtype(name: str, reason: str) -> Any:
    """Return this type of ml_dtypes. The error message starts with the reason for the import."""
    try:
        import ml_dtypes
    except ImportError:
        raise TypeError(f"{reason}, which NumPy does not have: install ml_dtypes (pip install 'cattn[bf16]')") from None
    return getattr(ml_dtypes, name)


def check_storage(tensor: Any, name: str) -> None:
    """Raise RuntimeError for a PyTorch tensor with elements that its storage does not have: freed, or shortened."""
    elements = tensor.numel()
    if elements and not tensor.is_contiguous():
        elements = 1 + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    wanted = (tensor.storage_offset() + elements) * tensor.element_size() if elements else 0
    if wanted > (found := tensor.untyped_storage().nbytes()):
        state = "freed" if found == 0 else "shortened"
        raise RuntimeError(
            f"{name} has a storage of {found} bytes, which was {state}: its shape and strides need {wanted}"
        )


def check_tensors(obj: Any, name: str, outer: tuple[int, ...] = ()) -> None:
    """Do `check_storage` for a tensor of the CPU, and for each of a list; for what some other function reads.

    `outer` has the lists around this one, by their ids: a list may contain itself, and NumPy takes 64 of them at most.
    """
    torch = sys.modules.get("torch")  # not imported: there are no tensors
    if torch is None:
        return
    if isinstance(obj, (list, tuple)):
        if len(outer) < 64 and id(obj) not in outer and obj and isinstance(obj[0], (list, tuple, torch.Tensor)):
            for part in obj:
                check_tensors(part, name, (*outer, id(obj)))
    elif isinstance(obj, torch.Tensor) and obj.is_cpu and obj.layout is torch.strided and not obj.is_nested:
        check_storage(obj, name)


def _from_torch(tensor: Any, name: str) -> Array:
    """Return a PyTorch tensor as an array on the same memory."""
    torch = sys.modules["torch"]
    if tensor.requires_grad and torch.is_grad_enabled():
        raise TypeError(
            f"{name} is a tensor that requires grad, which would be lost: pass {name}.detach(); "
            f"cattn.integrations.torch has attention with gradients"
        )
    # NumPy has none of these of its own
    dtypes = {torch.bfloat16: (torch.int16, "bfloat16"), torch.float8_e4m3fn: (torch.int8, "float8_e4m3fn")}
    bits, dtype = dtypes.get(tensor.dtype, (None, ""))
    foreign = None if bits is None else load_ml_dtype(dtype, f"{name} is a tensor of {dtype}")
    try:
        array = np.asarray(tensor) if foreign is None else np.asarray(tensor.view(bits)).view(foreign)
    except (TypeError, RuntimeError) as error:
        raise TypeError(f"{name} cannot be read as an array: {error}") from error
    check_storage(tensor, name)
    return array


def memory_of_machine() -> int:
    """Return the bytes of memory of this machine."""
    if sys.platform == "win32":
        import ctypes  # only needed here

        kilobytes = ctypes.c_ulonglong()
        ctypes.windll.kernel32.GetPhysicallyInstalledSystemMemory(ctypes.byref(kilobytes))
        return kilobytes.value * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def warn_of_memory(size: float) -> None:
    """Warn if the weights of a call take more than half of the memory of this machine."""
    if 2 * size > (memory := memory_of_machine()):
        text = (
            f"the weights take {size / 2**30:,.1f} GiB, more than half of the {memory / 2**30:,.1f} GiB of this machine"
        )
        way = "attention_statistics tells what each query looks at without them"
        warnings.warn(f"{text}: {way}", UserWarning, stacklevel=2)


def read_array(obj: Any, name: str) -> Array:
    """Return obj as an exact ndarray of any dtype, without a copy if possible."""
    refuse_masked(obj, name)
    if isinstance(obj, np.ndarray):
        return np.asarray(obj)
    refuse_objects(obj, name)
    if type(obj).__module__.startswith("dask."):
        warnings.warn(
            f"{name} is a dask array and is loaded as a whole: cattn.integrations.dask.attention and linear_attention "
            f"compute chunk by chunk. Pass {name}.compute() to silence this warning",
            UserWarning, stacklevel=3,
        )  # fmt: skip
    torch = sys.modules.get("torch")  # not imported: there are no tensors
    if torch is not None and isinstance(obj, torch.Tensor):
        return _from_torch(obj, name)
    check_tensors(obj, name)
    try:
        dlpack_only = hasattr(obj, "__dlpack__") and not any(
            hasattr(obj, protocol)
            for protocol in ("__array__", "__array_interface__", "__array_struct__", "__buffer__")
        )
        if dlpack_only and not isinstance(obj, (bytes, bytearray, memoryview)):
            return np.from_dlpack(obj)
        return np.asarray(obj)
    except (MemoryError, RecursionError):
        raise
    except ValueError as error:  # nested lists of unequal lengths
        raise ValueError(f"{name} cannot be read as an array: {error}") from error
    except Exception as error:  # of the object's own methods
        if type(obj).__module__.startswith("jax."):  # a tracer
            raise TypeError(
                f"{name} is traced by JAX, in jit, grad or vmap, where it has no numbers: "
                "use cattn.integrations.jax.dot_product_attention"
            ) from error
        how = "by DLPack" if dlpack_only else "as an array"
        raise TypeError(f"{name} cannot be read {how}: {error}") from error


def shape_of(obj: Any, name: str) -> tuple[int, ...]:
    """Return the shape of an argument, () if it is None."""
    return () if obj is None else read_array(obj, name).shape


def broadcast_shapes(*shapes: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape that all shapes broadcast to: ``numpy.broadcast_shapes`` ends at 32 dimensions."""
    result: list[int] = []  # from the last dimension to the first
    for sizes in itertools.zip_longest(*(shape[::-1] for shape in shapes), fillvalue=1):
        others = {size for size in sizes if size != 1} or {1}
        if len(others) > 1:
            raise ValueError(f"shapes {', '.join(map(str, shapes))} do not broadcast")
        result.extend(others)
    return tuple(result[::-1])


# Elements that NumPy may work on before Python looks for signals: some milliseconds.
PART = 2**20


def parts_of(shape: tuple[int, ...], most: int = PART) -> Iterator[tuple[Any, ...]]:
    """Yield indices that cut an array of this shape in parts of at most `most` elements: slices, then an ellipsis.

    Between two parts Python handles signals, which NumPy does not do within a call.
    """
    size = math.prod(shape)
    if size <= most or not shape:
        if size > 0:
            yield (...,)
        return
    inner = size // shape[0]  # elements of one index of the first axis
    if inner > most:
        for i in range(shape[0]):
            yield from ((slice(i, i + 1), *rest) for rest in parts_of(shape[1:], most))
        return
    step = most // inner
    for start in range(0, shape[0], step):
        yield (slice(start, start + step), ...)


def converted(array: Array, dtype: DTypeLike) -> Array:
    """Return ``array.astype(dtype)``, part by part."""
    if array.size <= PART:
        return array.astype(dtype)
    result = np.empty_like(array, dtype)
    for part in parts_of(array.shape):
        np.copyto(result[part], array[part], casting="unsafe")
    return result


@np.errstate(all="ignore")
def rounded(array: Array, dtype: DTypeLike) -> Array:
    """Return results that were computed in a wider dtype."""
    return converted(array, dtype)


def _without_repetition(array: Array) -> Array:
    """Return array with size 1 along the axes of stride 0, so that each element of memory is converted once."""
    if 0 not in array.strides:
        return array
    sizes = zip(array.shape, array.strides, strict=True)
    return array[tuple(slice(0, 1) if stride == 0 and size > 1 else slice(None) for size, stride in sizes)]


def _broadcast(array: Array, shape: tuple[int, ...]) -> Array:
    """Undo `_without_repetition`."""
    return array if array.shape == shape else np.broadcast_to(array, shape)


# NaN, overflow and underflow are results here, so the caller's settings must not make errors of them.
_quiet = np.errstate(all="ignore")


@in_default_mode
@_quiet
def cast(array: Array, name: str, dtype: DTypeLike) -> Array:
    """Convert to dtype. Axes of stride 0 keep it."""
    return _broadcast(converted(_without_repetition(array), dtype), array.shape)


def _as_readable(array: Array, name: str) -> Array:
    """Return array if C can read it, else a copy that is native, aligned and has strides in whole elements."""
    whole = all(
        size <= 1 or stride % array.itemsize == 0 for size, stride in zip(array.shape, array.strides, strict=True)
    )
    if whole and array.flags.aligned and array.dtype.isnative:
        return array
    return cast(array, name, array.dtype.newbyteorder("="))


def _dtype_error(array: Array, name: str) -> TypeError:
    """Return the error that names the dtype and how to convert it."""
    dtype = array.dtype
    if dtype.kind == "O" and array.ndim == 0:  # None, a dict or a generator, but not an array
        return TypeError(f"{name} must be an array of real numbers, got {type(array.item()).__name__}")
    if dtype.name.startswith("float") and dtype.itemsize < 4:  # the 8-bit dtypes of ml_dtypes, of any kind
        cure = f"pass {name}.astype(np.float32)"
    elif dtype.kind == "f":
        cure = f"pass {name}.astype(np.float64)"
    elif dtype.kind == "c":
        cure = f"pass {name}.real or abs({name})"
    else:
        cure = "it must hold real numbers"
    return TypeError(f"{name} has dtype {dtype}; cattn takes float16, bfloat16, float32 and float64: {cure}")


def is_quantized(dtype: np.dtype[Any]) -> bool:
    """Return whether numbers of this dtype may have scales: int8, or the float8_e4m3fn of ml_dtypes."""
    return dtype.type is np.int8 or _is_of_ml_dtypes(dtype, "float8_e4m3fn")


def refuse_without_scale(array: Array, name: str) -> None:
    """Raise TypeError for a quantized array: its numbers without the scale are others."""
    if is_quantized(array.dtype):
        cure = f"pass cattn.{'Quantized' if name in _MAY_BE_QUANTIZED else 'dequantize'}({name}, scale)"
        raise TypeError(
            f"{name} has dtype {array.dtype} and no scale: {cure}, or {name}.astype(np.float32) if its elements are "
            f"the numbers"
        )


def as_array(obj: object, name: str, dtype: str = "d") -> Array:
    """Return obj in one of the dtypes that attention takes. Booleans, integers and lists of them become float64.

    Numbers of int8 and float8_e4m3fn are no plain ones, but quantized.
    """
    if type(obj) is np.ndarray and obj.dtype.char in "efd" and obj.dtype.isnative and obj.flags.carray:
        return obj  # what the checks below return, in a third of their time
    array = read_array(obj, name)
    if array.dtype.itemsize == 1:
        refuse_without_scale(array, name)
    if array.dtype.kind in "biu":
        return cast(array, name, "d")
    if array.dtype.type not in (np.float16, np.float32, np.float64) and not is_bfloat16(array.dtype):
        raise _dtype_error(array, name)
    return _as_readable(array, name)


def common_dtype(arrays: Iterable[Array], names: str) -> np.dtype[Any]:
    """Return the dtype of a result that is computed from all arrays."""
    dtypes = {array.dtype for array in arrays}
    wide = {dtype for dtype in dtypes if dtype.itemsize > 2}
    if len(dtypes) > 1 and not wide:
        raise TypeError(
            f"{names} mix float16 and bfloat16, which have no common dtype in NumPy: convert them to one, or to float32"
        )
    return np.result_type(*(wide or dtypes))


@_quiet
def _as_float_mask(array: Array, name: str, dtype: str) -> Array:
    """Convert an additive mask. Finite numbers stay finite, so that finfo(float64).min does not become -inf."""
    if array.dtype.type not in (np.float16, np.float32, np.float64) and not is_bfloat16(array.dtype):
        refuse_without_scale(array, name)
        cure = f": pass {name}.astype(np.float64)" if array.dtype.kind in "iuf" else ""
        raise TypeError(
            f"{name} has dtype {array.dtype}; additive masks are float16, bfloat16, float32 or float64{cure}"
        )
    if array.dtype == np.dtype(dtype):
        return _as_readable(array, name)
    once = _without_repetition(array)
    result = converted(once, dtype)
    if once.itemsize > result.itemsize:
        limit = np.finfo(result.dtype).max
        for part in parts_of(once.shape):
            if np.isinf(result[part]).any():
                np.clip(result[part], -limit, limit, out=result[part], where=np.isfinite(once[part]))
    return _broadcast(result, array.shape)


def refuse_scalar(obj: object, name: str, of_scores: bool) -> None:
    """Raise TypeError for a single number as a mask: a flag or a probability in the wrong place.

    A mask of scores stands where many expect is_causal. NumPy's ``where=True`` is no mistake, and its floats are arrays
    without axes.
    """
    if name == "where" or isinstance(obj, np.floating):
        return
    if isinstance(obj, (int, float, np.bool_, str)):
        causal = obj.lower().startswith("caus") if isinstance(obj, str) else isinstance(obj, (bool, np.bool_)) and obj
        meant = ": is_causal=True?" if of_scores and causal else ""
        short = isinstance(obj, (bool, np.bool_)) or (causal and isinstance(obj, str))
        shown = repr(obj)[:20] if short else type(obj).__name__  # an int may have many digits
        raise TypeError(f"{name} must be an array, got {shown}{meant}")


def as_mask(obj: object, name: str, dtype: str) -> Array:
    """Return a boolean mask, True where the key is visible, or a float mask in dtype."""
    refuse_scalar(obj, name, True)
    array = read_array(obj, name)
    if array.dtype.kind == "b":
        return _as_readable(array, name)
    if array.dtype.kind in "iu":
        raise TypeError(
            f"{name} has dtype {array.dtype}; masks are boolean (True = keep) or float (added to the scores): "
            f"pass mask.astype(bool)"
        )
    return _as_float_mask(array, name, dtype)


def as_bias(obj: object, name: str, dtype: str) -> Array:
    """Return an additive bias in dtype."""
    array = read_array(obj, name)
    if array.dtype.kind == "b":
        raise TypeError(
            f"{name} is boolean; boolean masks go to attn_mask (True = keep), {name} is added to the scores"
        )
    return _as_float_mask(array, name, dtype)


def as_bool(obj: object, name: str, dtype: str) -> Array:
    """Return a boolean mask."""
    if dtype and name != "block_mask":  # in dropout_backward and BlockMask one number is a mask of everything
        refuse_scalar(obj, name, True)
    array = read_array(obj, name)
    if array.dtype.kind == "b":
        return _as_readable(array, name)
    cure = f"pass {name}.astype(bool)" if array.dtype.kind in "iu" else "it must be boolean"
    raise TypeError(f"{name} has dtype {array.dtype}; True = keep: {cure}")


def read_integers(obj: Any, name: str) -> int | Array:
    """Return an int, or an array of integers of any dtype, whose elements are not looked at."""
    if isinstance(obj, (bool, np.bool_)):
        raise TypeError(f"{name} must be an int or an integer array, got bool")
    try:
        return operator.index(obj)
    except TypeError:  # arrays have the method, and use it only where they hold one integer
        pass
    except Exception:
        raise TypeError(f"{name} must be an int or an integer array, got {type(obj).__name__}") from None
    numbers = read_array(obj, name)
    if numbers.dtype.kind not in "iu" and numbers.size > 0:
        whole = f"int({name})" if numbers.ndim == 0 else f"np.asarray({name}).astype(int)"
        cure = f": pass {whole}" if numbers.dtype.kind == "f" else ""
        raise TypeError(f"{name} must be an int or an integer array, got dtype {numbers.dtype}{cure}") from None
    return numbers


def as_integers(obj: Any, name: str, least: int, most: int) -> int | Array:
    """Return an int, or an int64 array of the caller's shape (that nobody else changes), within bounds."""
    numbers = read_integers(obj, name)
    result: int | Array = numbers
    if isinstance(numbers, int):
        low, high = numbers, numbers
    elif numbers.size == 0:
        return np.array(numbers, dtype=np.int64)
    else:
        once = _without_repetition(numbers)
        own = np.empty(once.shape, np.int64)
        low = high = int(once.flat[0])
        for part in parts_of(once.shape):  # a signal is handled after each part
            low, high = min(low, int(once[part].min())), max(high, int(once[part].max()))
            np.copyto(own[part], once[part], casting="unsafe")
        result = _broadcast(own, numbers.shape)
    if low < least or high > most:
        raise ValueError(
            f"{name} must be between {least} and {most}, got {_cattn._shown(low if low < least else high)}"
        )
    return result


def read_key_indices(obj: Any) -> Array:
    """Return key_indices as an array of integers, whose elements are not looked at."""
    given = read_array(obj, "key_indices")
    if given.dtype.kind not in "iu" and given.size > 0:
        raise TypeError(f"key_indices must be integers, -1 for no key, got dtype {given.dtype}")
    if given.ndim == 0:
        raise ValueError("key_indices must have an axis for the keys of a query, (..., T_q, n), got a single number")
    return given


def shares_memory(a: Array, b: Array) -> bool:
    """Return whether two arrays have a byte in common, or True if the answer would take too long."""
    limit: Any = 10_000  # NumPy's type stubs allow only -1 and 0
    try:
        return np.shares_memory(a, b, max_work=limit)
    except np.exceptions.TooHardError:
        return True
