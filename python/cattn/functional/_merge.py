"""Merging attention over disjoint sets of keys."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .._input.arrays import as_array, common_dtype
from .._input.fp_mode import in_default_mode


@in_default_mode
def merge_attention(outs: Iterable[ArrayLike], lses: Iterable[ArrayLike]) -> tuple[NDArray[Any], NDArray[Any]]:
    r"""Combine attention over parts of the keys into attention over all of them.

    If keys and values arrive in pieces or are on several machines, attend to each piece with ``return_lse=True`` first.

    Parameters
    ----------
    outs : sequence of array_like, shape (..., T_q, d_v)
        The output over each part.
    lses : sequence of array_like, shape (..., T_q)
        The log-sum-exp over each part.

    Returns
    -------
    out : ndarray, shape (..., T_q, d_v)
        The output over all parts, equal to rounding, in the dtype that outs and lses share (halves stay halves). A part
        in which a query saw no key (lse -inf) changes no bit of its result.
    lse : ndarray, shape (..., T_q)
        The log-sum-exp over all parts.

    Raises
    ------
    TypeError
        A part is not an array of numbers.
    ValueError
        There are no parts, the numbers of outs and lses differ, or shapes differ.

    See Also
    --------
    scaled_dot_product_attention : Returns the log-sum-exp with ``return_lse=True``.
    KVCache : Keys that arrive one after another.

    Notes
    -----
    For parts with outputs :math:`o_n` and log-sum-exps :math:`\ell_n`:

    .. math::

       \text{lse} = \log \sum_n e^{\ell_n}, \qquad \text{out} = \sum_n e^{\ell_n - \text{lse}} \, o_n

    Parts must not share keys. With sinks, give them to one part only. Merge outputs without dropout: the dropout
    mask of a key depends on its position in the whole call.

    Examples
    --------
    >>> import numpy as np
    >>> import cattn
    >>> query, key, value = np.random.default_rng(0).standard_normal((3, 6, 4))
    >>> parts = [
    ...     cattn.scaled_dot_product_attention(query, key[part], value[part], return_lse=True)
    ...     for part in (slice(0, 2), slice(2, 6))]
    >>> out, lse = cattn.merge_attention([p.out for p in parts], [p.lse for p in parts])
    >>> bool(np.allclose(out, cattn.scaled_dot_product_attention(query, key, value)))
    True
    """
    all_outs, all_lses = _parts(outs, "outs"), _parts(lses, "lses")
    if len(all_outs) == 0 or len(all_outs) != len(all_lses):
        raise ValueError(f"outs and lses must be as many, at least 1, got {len(all_outs)} and {len(all_lses)}")
    shape = all_outs[0].shape
    if shape == ():
        raise ValueError("outs[0] must have at least 1 dimension, got 0")
    for n, out in enumerate(_unlike(all_outs)):
        if out.shape != shape:
            raise ValueError(f"outs[{n}] has shape {out.shape}, outs[0] has {shape}")
    for n, lse in enumerate(_unlike(all_lses)):
        if lse.shape != shape[:-1]:
            raise ValueError(f"lses[{n}] has shape {lse.shape}, its output wants {shape[:-1]}")

    stored = common_dtype(_unlike(all_outs), "outs")
    dtype = np.result_type(stored, common_dtype(_unlike(all_lses), "lses"), np.float32)
    with np.errstate(all="ignore"):
        # allocate all large arrays before any work, so that a MemoryError comes early
        merged, product, shares = np.zeros(shape, dtype), np.empty(shape, dtype), np.array(all_lses, dtype)
        top = shares.max(axis=0)
        shares -= np.where(np.isneginf(top), dtype.type(0), top)
        np.exp(shares, out=shares)
        total = shares.sum(axis=0)
        for share, out in zip(shares, all_outs, strict=True):
            factor = share[..., None]  # one part at a time: all parts with one more axis may exceed 64 dimensions
            np.multiply(factor, out, out=product)
            np.add(merged, product, out=merged, where=factor != 0)  # the output of an empty part has no influence
        merged /= np.where(total == 0, dtype.type(1), total)[..., None]
        if stored.itemsize < np.dtype(np.float32).itemsize:
            merged = merged.astype(stored)
        return merged, top + np.log(np.where(total == 0, dtype.type(1), total))


def _parts(parts: object, name: str) -> NDArray[Any] | list[NDArray[Any]]:
    """Return the parts: one array if they were passed as one, else a list of arrays."""
    if not isinstance(parts, Iterable) or getattr(parts, "ndim", 1) == 0:
        raise TypeError(f"{name} must be a sequence of arrays, got {type(parts).__name__}")
    if hasattr(parts, "ndim"):
        return as_array(parts, name)
    return [as_array(part, f"{name}[{n}]") for n, part in enumerate(parts)]


def _unlike(parts: NDArray[Any] | list[NDArray[Any]]) -> NDArray[Any] | list[NDArray[Any]]:
    """Return the parts whose shape and dtype must be checked: of one array the first is enough."""
    return parts if isinstance(parts, list) else parts[:1]
