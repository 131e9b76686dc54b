"""Attention by cattn in Keras 3 on its NumPy backend (extra "keras")."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

import cattn
from cattn._input.arrays import cast, is_bfloat16, load_ml_dtype
from cattn._input.contexts import block
from cattn._input.names import no_name, public_names

try:
    import keras
    from keras.src import backend
except ImportError as error:
    raise ImportError(
        f"cattn.integrations.keras needs Keras with KERAS_BACKEND=numpy, and jax, which that backend imports: "
        f"pip install 'cattn[keras]' ({error})"
    ) from error

__all__ = ["use_cattn"]
__dir__ = public_names(globals())
__getattr__ = no_name(globals())


class _Swap:
    """Counts the active contexts of `use_cattn`, which may overlap: the last one to end restores Keras's function."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.uses = 0
        self.before: Any = None


_swap = _Swap()


def _dtype(arrays: tuple[Any, ...], bias: Any, mask: Any, flash_attention: Any, softcap: Any) -> Any:
    """Return the dtype that Keras computes in, or None if the call must go to Keras."""
    if flash_attention or softcap is not None or not all(type(x) is np.ndarray and x.ndim == 4 for x in arrays):
        return None
    if (mask is not None and getattr(mask, "dtype", None) != np.bool_) or not (bias is None or _is_real(bias)):
        return None
    if not all(map(_is_real, arrays)):
        return None
    name = keras.backend.result_type(*(x.dtype for x in arrays))
    return load_ml_dtype("bfloat16", "Keras computes in bfloat16") if name == "bfloat16" else np.dtype(name)


def _is_real(array: Any) -> bool:
    return type(array) is np.ndarray and (
        array.dtype.type in (np.float16, np.float32, np.float64) or is_bfloat16(array.dtype)
    )


def _attention(
    query: Any, key: Any, value: Any, bias: Any = None, mask: Any = None, scale: Any = None, is_causal: Any = False,
    flash_attention: Any = None, attn_logits_soft_cap: Any = None,
) -> Any:  # fmt: skip
    """Compute the backend's ``dot_product_attention``, whose arrays are (B, T, N, H)."""
    dtype = _dtype((query, key, value), bias, mask, flash_attention, attn_logits_soft_cap)
    if dtype is None:
        return _swap.before(query, key, value, bias, mask, scale, is_causal, flash_attention, attn_logits_soft_cap)
    arrays = zip(("query", "key", "value"), (query, key, value), strict=True)
    query, key, value = (_cast(x, name, dtype).swapaxes(1, 2) for name, x in arrays)
    batch, heads, seqlen_q, _ = query.shape
    out = np.empty((batch, seqlen_q, heads, value.shape[-1]), dtype)
    cattn.scaled_dot_product_attention(
        query, key, value, mask, is_causal="upper_left" if is_causal else False,
        scale=None if scale is None else float(scale), bias=None if bias is None else _cast(bias, "bias", dtype),
        out=out.swapaxes(1, 2),
    )  # fmt: skip
    return out


def _cast(array: NDArray[Any], name: str, dtype: Any) -> NDArray[Any]:
    return array if array.dtype == dtype else cast(array, name, dtype)


@block
def use_cattn() -> Iterator[None]:
    """Compute ``keras.ops.dot_product_attention`` and the layers that call it by cattn, on Keras's NumPy backend.

    Inside the context, ``keras.layers.MultiHeadAttention`` and ``GroupQueryAttention`` run cattn wherever they call the
    operator: with four-dimensional projections, without dropout in the layer and without returned scores. Grouped heads
    work in the operator, too. Calls that cattn does not take go to Keras as before: arrays of integers or of other
    libraries, masks that are not boolean, and ``flash_attention``. Keras chooses the dtype, which is float32 for
    float64. The context acts on the whole process, so all threads share it; Keras's function returns when the last of
    several contexts ends.

    Yields
    ------
    None

    Raises
    ------
    RuntimeError
        Keras runs on another backend.

    Notes
    -----
    A query that sees no key gets 0. Keras gives it the mean of all values.

    Examples
    --------
    >>> import keras
    >>> import numpy as np
    >>> from cattn.integrations.keras import use_cattn
    >>> query = np.zeros((1, 5, 4, 8), "float32")
    >>> key = value = np.zeros((1, 5, 2, 8), "float32")  # two query heads share a head of keys and values
    >>> with use_cattn():
    ...     out = keras.ops.dot_product_attention(query, key, value, is_causal=True)
    >>> out.shape
    (1, 5, 4, 8)
    """
    if keras.backend.backend() != "numpy":
        raise RuntimeError(
            f"use_cattn needs Keras's NumPy backend, got {keras.backend.backend()!r}: set KERAS_BACKEND=numpy before "
            f"keras is imported"
        )
    # The operator and the layers look the function up here at each call. Keras has no public hook for it.
    namespace: Any = backend.nn
    with _swap.lock:
        if _swap.uses == 0:
            _swap.before = namespace.dot_product_attention
        namespace.dot_product_attention = _attention
        _swap.uses += 1
    try:
        yield
    finally:
        with _swap.lock:
            _swap.uses -= 1
            if _swap.uses == 0:
                namespace.dot_product_attention = _swap.before
