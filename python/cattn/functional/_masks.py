"""Causal masks, windows, ALiBi slopes, and masks shown as text."""

from __future__ import annotations

from typing import Any, Unpack

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .._input.arrays import as_mask, broadcast_shapes, shape_of
from .._input.checks import as_size, is_word
from .._input.contexts import in_default_mode
from .._input.names import with_hints
from .._input.types import Alignment, Text, Window
from ._attention import attention_weights
from ._explain import explain
from ._options import RangeOptions, documented, implemented_in_c, spelled_out

__all__ = ["causal_mask", "get_alibi_slopes", "show_mask", "sliding_window"]

GRID = 64  # masks with more keys are written as ranges
MOST_ROWS = 64  # the largest number of queries of one mask that are written
MOST_DIMS = 64  # of an array of NumPy
MOST_HEADS = 1 << 16  # hundreds of times the heads of any model: more are a mistake that would fill the memory


@implemented_in_c
def causal_mask(  # type: ignore[empty-body]
    T_q: int,
    T_k: int | None = None,
    *,
    is_causal: Alignment = "lower_right",
    query_offset: int | None = None,
    window_size: Window = (-1, -1),
) -> NDArray[np.bool_]:
    """Return a boolean mask of the keys that each query sees.

    Parameters
    ----------
    T_q : int
        Number of queries.
    T_k : int, optional
        Number of keys. Default T_q.
    is_causal : bool or {"upper_left", "lower_right"}
        Query i sees the keys j <= i ("upper_left", the meaning of True), j <= i + T_k - T_q ("lower_right") or every
        key (False).
    query_offset : int, optional
        Position of the first query: query i sees the keys j <= i + query_offset; takes the place of "lower_right".
    window_size : (int, int)
        The query at position p sees the keys from p - left to p + right only; -1 or None sets no bound there.

    Returns
    -------
    ndarray of bool, shape (T_q, T_k)
        True where the key is visible.

    Raises
    ------
    TypeError, ValueError
        A length is not an int, or negative; is_causal has another value.

    See Also
    --------
    sliding_window : The window of a number of tokens.
    show_mask : The mask as text.
    causal_attention : Causal attention, which needs no mask.
    cattn.reference.causal_mask : The same in plain NumPy.

    Examples
    --------
    >>> import cattn
    >>> cattn.causal_mask(2, 3)
    array([[ True,  True, False],
           [ True,  True,  True]])
    >>> cattn.causal_mask(4, window_size=(1, 0)).astype(int)
    array([[1, 0, 0, 0],
           [1, 1, 0, 0],
           [0, 1, 1, 0],
           [0, 0, 1, 1]])
    """


@with_hints
def sliding_window(total: int) -> tuple[int, int]:
    """Return the window_size of a causal window that counts the token itself.

    Model cards and configurations count all visible tokens; ``window_size`` counts those before the query's own.

    Parameters
    ----------
    total : int
        Tokens in the window, the query's own among them; at least 1.

    Returns
    -------
    (int, int)
        ``(total - 1, 0)``, for ``window_size=``.

    Raises
    ------
    TypeError, ValueError
        total is not an int, or below 1.

    See Also
    --------
    causal_mask : The mask as an array.
    show_mask : The mask as text.
    scaled_dot_product_attention : Takes the window as ``window_size``.

    Examples
    --------
    >>> import cattn
    >>> cattn.sliding_window(4096)
    (4095, 0)
    """
    return as_size(total, "total") - 1, 0


@in_default_mode
def get_alibi_slopes(num_heads: int) -> NDArray[np.float64]:
    r"""Return the slopes of ALiBi for each head.

    Parameters
    ----------
    num_heads : int
        Number of query heads, at least 1 and at most 65536.

    Returns
    -------
    ndarray of float64, shape (num_heads,)
        Pass them as ``alibi_slopes=``. If n is a power of two, they are 2**(-8 h / n), h = 1 .. n. Other numbers of
        heads take the slopes of the next lower power of two, and every other slope of the next higher one.

    Raises
    ------
    TypeError, ValueError
        num_heads is not an int, or out of range.

    See Also
    --------
    scaled_dot_product_attention : Takes the slopes as ``alibi_slopes``.

    Notes
    -----
    For n heads, n a power of two, head h = 1 ... n has the slope

    .. math::

       m_h = 2^{-8 h / n}

    Press, Smith and Lewis, "Train short, test long: attention with linear biases enables input length extrapolation",
    ICLR 2022.

    Examples
    --------
    >>> import cattn
    >>> cattn.get_alibi_slopes(4)
    array([0.25      , 0.0625    , 0.015625  , 0.00390625])
    """
    num_heads = as_size(num_heads, "num_heads", maximum=MOST_HEADS)
    below = 1 << (num_heads.bit_length() - 1)

    def powers(n: int) -> NDArray[np.float64]:
        return np.exp2(-8.0 * np.arange(1, n + 1) / n)

    return np.concatenate([powers(below), powers(2 * below)[::2][: num_heads - below]])


_OF_THE_BATCH = tuple(RangeOptions.__annotations__)


class _MaskOptions(RangeOptions, total=False):
    window_size: Window


@with_hints
@documented
@spelled_out()
def show_mask(
    T_q: int,
    T_k: int | None = None,
    *,
    attn_mask: ArrayLike | None = None,
    is_causal: Alignment = False,
    **options: Unpack[_MaskOptions],
) -> str:
    """Describe as text which keys each query sees under the masks of `scaled_dot_product_attention`.

    Parameters
    ----------
    T_q : int
        Number of queries.
    T_k : int, optional
        Number of keys. Default T_q.
    attn_mask : array_like, optional
        Boolean (True where the key is visible) or float (-inf hides).

    Returns
    -------
    str
        A line for each query. Up to 64 keys are drawn, "x" for visible and "." for hidden; more are written as ranges.
        A batch gives a block for each of its masks. An interpreter and a notebook show the text as ``print`` does.

    Raises
    ------
    TypeError, ValueError
        As for `scaled_dot_product_attention`.

    See Also
    --------
    causal_mask : The mask as an array.
    plot_attention : Weights as heat maps.
    explain : How a call would be computed.

    Examples
    --------
    >>> import cattn
    >>> cattn.show_mask(3, 5, is_causal="lower_right", window_size=(2, 0))
    key      01234
    query 0  xxx..
    query 1  .xxx.
    query 2  ..xxx
    """
    given: dict[str, Any] = {"attn_mask": attn_mask, "is_causal": is_causal, **options}
    T_q, T_k = as_size(T_q, "T_q", 0), as_size(T_q if T_k is None else T_k, "T_k", 0)
    batches = {name: shape_of(given[name], name) for name in _OF_THE_BATCH}
    batch_dims = _batch_dims(shape_of(attn_mask, "attn_mask")[:-2], **batches)
    if len(batch_dims) > MOST_DIMS - 2:
        names = "attn_mask, query_offset, query_seq_lengths, key_value_seq_lengths and key_value_seq_starts"
        raise ValueError(f"{names} broadcast to {len(batch_dims)} leading dimensions, more than {MOST_DIMS - 2}")
    query, key = (np.broadcast_to(np.zeros(1, np.float32), (*batch_dims, T, 1)) for T in (T_q, T_k))
    if T_q > MOST_ROWS:  # the matrix of all queries may be too large
        explain(query, key, key, **given)  # checks the arguments
        query, given = query[..., :MOST_ROWS, :], _first_queries(T_q, T_k, given)
    visible = ~np.isneginf(attention_weights(query, key, **given, stage="mask"))
    if not batch_dims:
        return Text(_show(visible, T_q))
    blocks = (f"{list(index)}:\n{_show(visible[index], T_q)}" for index in np.ndindex(*batch_dims))
    return Text("\n\n".join(blocks))


def _first_queries(T_q: int, T_k: int, options: dict[str, Any]) -> dict[str, Any]:
    """Return arguments for a call of the first MOST_ROWS queries, which then have the same masks."""
    queries, keys = (
        np.asarray(default if options[name] is None else options[name], np.int64)
        for name, default in (("query_seq_lengths", T_q), ("key_value_seq_lengths", T_k))
    )
    changed = {"query_offset": 0 if options["query_offset"] is None else options["query_offset"]}
    if is_word(options["is_causal"], "lower_right"):
        changed = {"is_causal": "upper_left", "query_offset": keys - queries}
    if options["query_seq_lengths"] is not None:
        changed["query_seq_lengths"] = np.minimum(queries, MOST_ROWS)
    if options["attn_mask"] is not None:
        mask = as_mask(options["attn_mask"], "attn_mask", "f")
        changed["attn_mask"] = mask if mask.ndim < 2 or mask.shape[-2] == 1 else mask[..., :MOST_ROWS, :]
    return options | changed


def _batch_dims(mask_batch_dims: tuple[int, ...], **batches: tuple[int, ...]) -> tuple[int, ...]:
    """Return the batch dimensions of the scores, given the batch dimensions of the mask, which may end with heads."""
    try:
        batch = broadcast_shapes(*batches.values())
        n = len(mask_batch_dims) - 1 if len(mask_batch_dims) > max(len(batch), 1) else len(mask_batch_dims)
        return (*broadcast_shapes(mask_batch_dims[:n], batch), *mask_batch_dims[n:])
    except ValueError:
        shapes = ", ".join(f"{name} has shape {shape}" for name, shape in batches.items() if shape)
        mask = f", attn_mask leading dimensions {mask_batch_dims}" if mask_batch_dims else ""
        raise ValueError(f"{shapes}{mask}: they do not broadcast to one batch") from None


def _show(visible: NDArray[np.bool_], T_q: int) -> str:
    """Draw one mask, or write ranges if it has many keys."""
    T_k = visible.shape[-1]
    digits = len(str(max(T_q - 1, 0)))
    lines = []
    if T_k <= GRID:
        ruler = "".join(str(j % 10) for j in range(T_k))
        lines.append(f"{'key':<{6 + digits}}  {ruler}")
    for i, row in enumerate(visible):
        seen = "".join(".x"[see] for see in row.astype(int)) if T_k <= GRID else _ranges(row)
        lines.append(f"query {i:>{digits}}  {seen}")
    if T_q > MOST_ROWS:
        lines.append(f"and {T_q - MOST_ROWS} more queries")
    return "\n".join(lines)


def _ranges(row: NDArray[np.bool_]) -> str:
    """Return the keys of a row as ranges: "0-35, 40"."""
    edges = np.flatnonzero(np.diff(np.r_[0, row.astype(np.int8), 0]))
    pairs: list[Any] = edges.reshape(-1, 2).tolist()
    return ", ".join(str(a) if b == a + 1 else f"{a}-{b - 1}" for a, b in pairs) or "none"
