"""Merging attention over disjoint sets of keys."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .._input.arrays import PART, as_array, common_dtype, parts_of
from .._input.contexts import in_default_mode
from .._input.types import AttentionOutput

__all__ = ["merge_attention"]


@overload
def merge_attention(outs: Iterable[AttentionOutput], lses: None = ...) -> AttentionOutput: ...
@overload
def merge_attention(outs: Iterable[ArrayLike], lses: Iterable[ArrayLike]) -> tuple[NDArray[Any], NDArray[Any]]: ...
@in_default_mode
def merge_attention(outs: Iterable[Any], lses: Iterable[ArrayLike] | None = None) -> Any:
    r"""Combine attention over parts of the keys into attention over all of them.

    If keys and values arrive in pieces or are on several machines, attend to each piece with ``return_lse=True`` first.

    Parameters
    ----------
    outs : sequence of AttentionOutput, or of array_like, shape (..., T_q, d_v)
        The result over each part with its lse; or the output alone, and then lses.
    lses : sequence of array_like, shape (..., T_q), optional
        The log-sum-exp over each part, if outs has the outputs alone. It must come from the same call as its output:
        nothing here tells whether it does.

    Returns
    -------
    AttentionOutput
        ``out`` and ``lse``, so that results of merges can be merged again. With lses, the tuple (out, lse).
    out : ndarray, shape (..., T_q, d_v)
        The output over all parts, equal to rounding, in the dtype that outs and lses share (halves stay halves). A part
        in which a query saw no key (lse -inf) changes no bit of its result. If all parts have lse -inf, the output is
        NaN where a part has NaN, which then saw keys with scores of -inf, and else 0: as in one call.
    lse : ndarray, shape (..., T_q)
        The log-sum-exp over all parts.

    Raises
    ------
    TypeError
        A part is not an array of numbers.
    ValueError
        There are no parts, a result has no lse, the numbers of outs and lses differ, or shapes differ.

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

    Gradients: with merged results O and L, their gradients dO and dL, and ``w = exp(lse - L)`` of a part, the gradients
    of that part's results are ``w * dO`` and ``w * (dL + sum(dO * (out - O)))``. `attention_backward` takes them as
    grad_out and grad_lse. The gradients of query, key and value are the same, to rounding, if it gets O, L, dO and dL
    in place of the part's own out, lse, grad_out and grad_lse, with ``merged=True``: ring attention needs the merged
    results only.

    Examples
    --------
    >>> import numpy as np
    >>> import cattn
    >>> query, key, value = np.random.default_rng(0).standard_normal((3, 6, 4))
    >>> parts = [
    ...     cattn.scaled_dot_product_attention(query, key[part], value[part], return_lse=True)
    ...     for part in (slice(0, 2), slice(2, 6))]
    >>> both = cattn.merge_attention(parts)
    >>> bool(np.allclose(both.out, cattn.scaled_dot_product_attention(query, key, value)))
    True

    The gradient of the query, for a loss whose gradients are 1 for the output and lse for the log-sum-exp:

    >>> grad_out, grad_lse, grad_query = np.ones((6, 4)), both.lse, np.zeros((6, 4))
    >>> for part, keys in zip(parts, (slice(0, 2), slice(2, 6)), strict=True):
    ...     w = np.exp(part.lse - both.lse)
    ...     of_lse = w * (grad_lse + (grad_out * (part.out - both.out)).sum(axis=-1))
    ...     grad_query += cattn.attention_backward(
    ...         w[:, None] * grad_out, query, key[keys], value[keys], part.out, part.lse, grad_lse=of_lse).query
    >>> whole = cattn.attention_backward(grad_out, query, key, value, both.out, both.lse, grad_lse=grad_lse)
    >>> bool(np.allclose(grad_query, whole.query))
    True
    """
    if lses is not None:
        all_outs = _parts(outs, "outs")
        return _merge(all_outs, _parts(lses, "lses", len(all_outs) + 1))  # an iterator may have no end
    if not isinstance(outs, Iterable):
        raise TypeError(f"outs must be a sequence of AttentionOutput, got {type(outs).__name__}")
    results = []
    for n, result in enumerate(_items(outs, "outs")):
        if not isinstance(result, AttentionOutput):
            kind = type(result).__name__
            raise TypeError(f"outs[{n}] must be an AttentionOutput if lses is not given, got {kind}")
        if result.out is None or result.lse is None:
            field = "out" if result.out is None else "lse"
            raise ValueError(f"outs[{n}] has no {field}: attend with return_lse=True")
        results.append(result)
    out, lse = _merge(_parts([r.out for r in results], "outs"), _parts([r.lse for r in results], "lses"))
    return AttentionOutput(out, lse=lse)


def _merge(
    all_outs: NDArray[Any] | list[NDArray[Any]], all_lses: NDArray[Any] | list[NDArray[Any]]
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return the merged output and log-sum-exp."""
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
    merged, lse = np.empty(shape, dtype if stored.itemsize > 2 else stored), np.empty(shape[:-1], dtype)
    with np.errstate(all="ignore"):
        # an axis of size 0 leaves lse to compute
        for part in parts_of((*shape[:-1], max(1, shape[-1])), max(1, PART // (4 * len(all_outs)))):
            rows = (*part[:-1][: len(shape) - 1], ...)
            merged[part], lse[rows] = _merge_part(_cut(all_outs, part), _cut(all_lses, rows), dtype)
    return merged, lse[()]


def _cut(parts: NDArray[Any] | list[NDArray[Any]], index: tuple[Any, ...]) -> NDArray[Any] | list[NDArray[Any]]:
    """Return this piece of each of the parts."""
    return [part[index] for part in parts] if isinstance(parts, list) else parts[:, *index]


def _merge_part(
    all_outs: NDArray[Any] | list[NDArray[Any]],
    all_lses: NDArray[Any] | list[NDArray[Any]],
    dtype: np.dtype[Any],
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return the merged output and log-sum-exp in dtype."""
    shape = all_outs[0].shape
    merged, product, shares = np.zeros(shape, dtype), np.empty(shape, dtype), np.array(all_lses, dtype)
    top = shares.max(axis=0)
    shares -= np.where(np.isneginf(top), dtype.type(0), top)
    np.exp(shares, out=shares)
    total = shares.sum(axis=0)
    empty = total == 0
    divisor = np.where(empty, dtype.type(1), total)[..., None]
    _average(shares, all_outs, divisor, merged, product)
    if merged.size and not np.isfinite(merged.max() / 2 - merged.min() / 4):  # without an array of truth values
        _average_again(shares, all_outs, divisor, merged, product)
    if empty.any():
        for out in all_outs:
            np.copyto(merged, np.nan, where=empty[..., None] & np.isnan(out))
    return merged, top + np.log(divisor[..., 0])


def _average(
    shares: NDArray[Any],
    all_outs: NDArray[Any] | list[NDArray[Any]],
    divisor: NDArray[Any],
    merged: NDArray[Any],
    product: NDArray[Any],
) -> None:
    """Add the products of shares and outputs to merged, and divide it. The array product is overwritten."""
    for share, out in zip(shares, all_outs, strict=True):
        factor = share[..., None]  # one part at a time: all parts with one more axis may exceed 64 dimensions
        np.multiply(factor, out, out=product)
        np.add(merged, product, out=merged, where=factor != 0)  # the output of an empty part has no influence
    merged /= divisor


def _average_again(
    shares: NDArray[Any],
    all_outs: NDArray[Any] | list[NDArray[Any]],
    divisor: NDArray[Any],
    merged: NDArray[Any],
    product: NDArray[Any],
) -> None:
    """Replace the elements of merged whose sums overflowed, as the kernels do it: with shares times 2**-64.

    A share that is not 0 stays so, and the mean of finite numbers is finite.
    """
    limits = np.finfo(merged.dtype)
    small = np.where(shares > 0, np.maximum(shares * merged.dtype.type(2.0**-64), limits.smallest_subnormal), shares)
    again = np.zeros_like(merged)
    _average(small, all_outs, divisor, again, product)
    finite = np.isfinite(again)
    again *= merged.dtype.type(2.0**64)
    np.clip(again, limits.min, limits.max, out=again, where=finite)
    np.copyto(merged, again, where=~np.isfinite(merged))


def _items(parts: Iterable[Any], name: str) -> Iterator[Any]:
    """Yield the parts. They are looked at one by one, because an iterator may have no end."""
    try:
        yield from parts
    except (MemoryError, RecursionError):
        raise
    except Exception as error:  # of the object's own methods
        raise TypeError(f"{name} must be a sequence of arrays, got {type(parts).__name__}") from error


def _parts(parts: object, name: str, most: int | None = None) -> NDArray[Any] | list[NDArray[Any]]:
    """Return at most `most` parts: an array if the caller passed one stacked array, else a list."""
    if not isinstance(parts, Iterable) or getattr(parts, "ndim", 1) == 0:
        raise TypeError(f"{name} must be a sequence of arrays, got {type(parts).__name__}")
    if hasattr(parts, "ndim"):
        return as_array(parts, name)
    arrays = []
    for n, part in enumerate(itertools.islice(_items(parts, name), most)):
        arrays.append(as_array(part, f"{name}[{n}]"))
        if arrays[0].shape == () and name == "outs":
            raise ValueError("outs[0] must have at least 1 dimension, got 0")
    return arrays


def _unlike(parts: NDArray[Any] | list[NDArray[Any]]) -> NDArray[Any] | list[NDArray[Any]]:
    """Return the parts whose shape and dtype must be checked: of one array the first is enough."""
    return parts if isinstance(parts, list) else parts[:1]
