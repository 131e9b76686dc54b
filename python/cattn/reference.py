"""The functions of cattn once more, in plain NumPy: to read, to learn from, and to test the C kernels against.

Everything is computed in float64, whatever comes in, and nothing here is fast: score matrices are built in full, as a
textbook does. Names, arguments and meaning are the package's own, but results are float64 and ``rng`` is int or None.

For a query i at position p = i + query_offset and a key j::

    score  = scale * (query[i] . key[j]) + attn_mask[i, j] + bias[i, j]       (additive masks only)
    visible = attn_mask[i, j] is True, no term is -inf, and j <= p if causal
    weight = exp(score) / sum of exp(score) over the visible keys, and 0 where a key is not visible
    out[i] = sum over the visible keys of dropout(weight) * value[j]

References
----------
.. [1] Vaswani et al., "Attention is all you need", NeurIPS 2017: scaled dot-product attention.
.. [2] Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011: the generator Philox4x32-10.
.. [3] Srivastava et al., "Dropout: a simple way to prevent neural networks from overfitting", JMLR 15, 2014.
"""

import math
import os
import warnings
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from cattn._types import AttentionOutput, CausalAlignmentWarning

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
Causal = bool | np.bool_ | str
Axis = int | tuple[int, ...] | None
_Array = TypeVar("_Array", bound=NDArray[Any])

# NaN and infinity are answers here, not accidents: NumPy need not warn about them.
_quiet = np.errstate(all="ignore")


# ---- softmax -------------------------------------------------------------------------------------------------------
@_quiet
def softmax(
    x: ArrayLike, axis: Axis = -1, *, where: ArrayLike | None = None, scale: float = 1.0, out: Floats | None = None
) -> Floats:
    """Softmax of ``scale * x`` along `axis`: exp(z - max) / sum of exp(z - max).

    `axis` may be a tuple, or None for all axes together. Where `where` (bool, broadcastable to `x`) is False, an
    element gets 0 and has no influence, even if it is NaN. Slices where nothing takes part are 0; where all that takes
    part is -inf they are NaN.

    Examples
    --------
    >>> softmax([0.0, np.log(3.0)])
    array([0.25, 0.75])
    >>> softmax([1.0, np.nan, 1.0], where=[True, False, True])
    array([0.5, 0. , 0.5])
    """
    z = np.asarray(x, np.float64) * scale
    takes_part = np.broadcast_to(True if where is None else np.asarray(where, np.bool_), z.shape)
    z = np.where(takes_part, z, -np.inf)
    numerator = np.where(takes_part, np.exp(z - z.max(axis=axis, keepdims=True, initial=-np.inf)), 0.0)
    # An element that takes part divides by a sum > 0 (or NaN); the others are 0, not 0/0.
    weights = np.where(takes_part, numerator / numerator.sum(axis=axis, keepdims=True), 0.0)
    return _deliver(weights, out)


@_quiet
def masked_softmax(
    scores: ArrayLike,
    mask: ArrayLike | None = None,
    *,
    is_causal: Causal = False,
    query_offset: ArrayLike | None = None,
    scale: float = 1.0,
    method: str = "neg_inf",
    out: Floats | None = None,
) -> Floats:
    """Softmax over the last axis of `scores`, of the visible entries only, in one of two ways.

    ``"neg_inf"`` sets hidden scores to -inf and takes the softmax. ``"renormalize"`` takes the softmax of everything,
    sets hidden weights to 0 and divides each row by what is left. On paper both are the same, since the first
    denominator cancels; in floating point the second loses everything when a hidden score dwarfs the visible ones.
    Rows that keep less than 2**-100 of their mass, or whose kept mass is not finite, are therefore computed again
    from their visible scores. `textbook_masked_softmax` does without such precautions.

    `scores` is (..., T_q, T_k); `mask` is bool (True = keep) and broadcasts to it; `is_causal` and `query_offset` are
    explained at `causal_mask`, and the offset may be an array (...,). Rows without a visible entry are 0.

    Examples
    --------
    >>> masked_softmax(np.zeros((3, 3)), is_causal=True).round(4)
    array([[1.    , 0.    , 0.    ],
           [0.5   , 0.5   , 0.    ],
           [0.3333, 0.3333, 0.3333]])
    >>> masked_softmax([0.0, 2000.0], [True, False], method="renormalize")
    array([1., 0.])
    """
    scores = np.asarray(scores, np.float64)
    visible = np.array(np.broadcast_to(True if mask is None else _boolean(mask, "mask"), scores.shape))
    if is_causal:
        position = _positions(is_causal, query_offset, *scores.shape[-2:])
        visible &= np.arange(scores.shape[-1]) <= position[..., None]

    if method == "neg_inf":
        weights = softmax(scores, where=visible, scale=scale)
    elif method == "renormalize":
        everything = softmax(scores, scale=scale)
        kept = (everything * visible).sum(axis=-1, keepdims=True)
        weights = everything * visible / kept
        sound = kept >= 2.0**-100  # False for NaN too
        weights = np.where(sound, weights, softmax(scores, where=visible, scale=scale))
    else:
        raise ValueError(f'method must be "neg_inf" or "renormalize", got {method!r}')
    return _deliver(weights, out)


@_quiet
def textbook_masked_softmax(scores: ArrayLike, mask: ArrayLike, method: str = "neg_inf") -> Floats:
    """Mask and normalise as a first chapter on attention writes it: to see what can go wrong.

    Rows without a visible entry come out as NaN; so do, with ``"renormalize"``, rows in which a hidden score is so
    much larger than the visible ones that their weights vanish. `mask` is True where a score of (..., T_k) is kept.

    Examples
    --------
    >>> textbook_masked_softmax([1.0, 1.0, 5.0], [True, True, False])
    array([0.5, 0.5, 0. ])
    >>> textbook_masked_softmax([0.0, 2000.0], [True, False], method="renormalize")
    array([nan, nan])
    """
    if method == "neg_inf":
        return softmax(np.where(mask, scores, -np.inf))
    kept = softmax(scores) * np.asarray(mask, np.bool_)
    return np.asarray(kept / kept.sum(axis=-1, keepdims=True))


# ---- random bits and dropout ---------------------------------------------------------------------------------------
def philox4x32(counter: tuple[ArrayLike, ArrayLike, ArrayLike, ArrayLike], seed: int) -> NDArray[np.uint64]:
    """Philox4x32-10 of Random123: four random 32-bit words for each counter of four 32-bit words.

    `seed` is the 64-bit key. The parts of `counter` broadcast to a shape S; the result is uint64 of shape (4, *S).

    Examples
    --------
    >>> [hex(word) for word in philox4x32((0, 0, 0, 0), seed=0).tolist()]
    ['0x6627e8d5', '0xe169c58d', '0xbc57ac4c', '0x9b00dbd8']
    """
    low = np.uint64(0xFFFFFFFF)
    half = np.uint64(32)
    c0, c1, c2, c3 = (np.asarray(c).astype(np.uint64) & low for c in np.broadcast_arrays(*counter))
    k0, k1 = seed & 0xFFFFFFFF, seed >> 32
    for _ in range(10):
        a, b = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        c0, c1, c2, c3 = (b >> half) ^ c1 ^ np.uint64(k0), b & low, (a >> half) ^ c3 ^ np.uint64(k1), a & low
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return np.stack([c0, c1, c2, c3])


def dropout_keep(p: float, seed: int, batch: ArrayLike, head: ArrayLike, position: ArrayLike, T_k: int) -> Bools:
    """Which attention weights a dropout keeps: rows of `T_k` bits, each a function of seed and position alone.

    64 keys share eight counters: key j reads counter 8 (j // 64) + j % 8, and of its four words the 16-bit digit
    number (j // 8) % 8. A digit is compared with the upper half of round((1 - p) 2**32); where they are equal, a digit
    of a second draw is compared with the lower half, so that the probability is exact to 2**-32.

    `p` is the probability of being dropped, `seed` the 64-bit key. `batch`, `head` and `position` are the flat index of
    the leading dimensions, the query head and the absolute query position i + query_offset of each row. They broadcast
    to a shape S; the result is bool, (*S, T_k), True = kept.

    Examples
    --------
    >>> dropout_keep(0.5, seed=123, batch=0, head=0, position=[0, 1], T_k=6).astype(int)
    array([[1, 1, 1, 0, 0, 0],
           [0, 0, 1, 0, 0, 1]])
    """
    upper, lower = divmod(round((1.0 - p) * 2**32), 2**16)
    blocks = -(-T_k // 64)
    batch, head, position = (np.asarray(part, np.int64)[..., None] for part in (batch, head, position))

    def digits(draw: int) -> NDArray[np.uint64]:
        words = philox4x32((np.arange(8 * blocks), position, head, 2 * batch + draw), seed)
        halves = np.stack([words & np.uint64(0xFFFF), words >> np.uint64(16)], axis=1)  # word, half, *S, block * 8 + r
        by_block = halves.reshape(8, *halves.shape[2:-1], blocks, 8)  # digit, *S, block, r
        return np.moveaxis(by_block, 0, -2).reshape(*halves.shape[2:-1], 64 * blocks)[..., :T_k]

    first = digits(0)
    return np.asarray((first < upper) | ((first == upper) & (digits(1) < lower)))


@_quiet
def dropout(
    x: ArrayLike,
    p: float = 0.5,
    *,
    training: bool = True,
    rng: int | None = None,
    return_mask: bool = False,
    out: Floats | None = None,
) -> Floats | tuple[Floats, Bools]:
    """Set elements of `x` to 0 with probability `p` and multiply the others by 1 / (1 - p) [3]_.

    The factor keeps the expected value of each element, so that nothing needs to change once training is over:
    ``training=False`` returns a copy. `rng` is a 64-bit seed, or None for a fresh one; with ``return_mask=True`` the
    result is a pair, the second of which says what was kept.

    Examples
    --------
    >>> dropped, kept = dropout(np.ones(8), 0.5, rng=7, return_mask=True)
    >>> bool(np.all(dropped == 2.0 * kept))
    True
    """
    x = np.asarray(x, np.float64)
    p = _probability(p, "p") if training else 0.0
    # Element n of x in C order takes the place of key n; "head" 0xD0D0 keeps these bits apart from those of attention.
    kept = dropout_keep(p, _seed(rng), batch=0, head=0xD0D0, position=0, T_k=x.size).reshape(x.shape)
    result = _deliver(_apply_dropout(x, kept, p), out)
    return (result, kept) if return_mask else result


def _apply_dropout(x: Floats, kept: Bools, p: float) -> Floats:
    return np.where(kept, x * (1.0 / (1.0 - p)), 0.0) if p < 1 else np.zeros_like(x)


# ---- causal masks --------------------------------------------------------------------------------------------------
def causal_mask(
    T_q: int, T_k: int | None = None, *, is_causal: Causal = "lower_right", query_offset: int | None = None
) -> Bools:
    """Return which keys each query sees under a causal mask, True = keep.

    With T_q = T_k this is the lower triangle. Otherwise "upper_left" lines up the first query with the first key,
    "lower_right" (the default: queries are the newest tokens of a longer text) the last query with the last key, and
    `query_offset` puts the first query anywhere.

    Examples
    --------
    >>> causal_mask(2, 4).astype(int)
    array([[1, 1, 1, 0],
           [1, 1, 1, 1]])
    >>> causal_mask(2, 4, is_causal="upper_left").astype(int)
    array([[1, 0, 0, 0],
           [1, 1, 0, 0]])
    """
    T_k = T_q if T_k is None else T_k
    if not is_causal:
        return np.ones((T_q, T_k), np.bool_)
    is_causal = is_causal if query_offset is None else "upper_left"
    return np.asarray(np.arange(T_k) <= _positions(is_causal, query_offset, T_q, T_k)[..., None])


def _positions(is_causal: Causal, query_offset: ArrayLike | None, T_q: int, T_k: int) -> NDArray[np.int64]:
    """Absolute positions of the queries, (*shape of query_offset, T_q)."""
    is_causal = bool(is_causal) if isinstance(is_causal, np.bool_) else is_causal
    if is_causal not in (False, True, "upper_left", "lower_right"):
        raise ValueError(f'is_causal must be False, True, "upper_left" or "lower_right", got {is_causal!r}')
    if is_causal == "lower_right":
        if query_offset is not None:
            raise ValueError('is_causal="lower_right" sets the offset to T_k - T_q: give query_offset or it, not both')
        query_offset = T_k - T_q
    elif is_causal is True and query_offset is None and T_q != T_k:
        text = f'is_causal=True means "upper_left" here, T_q = {T_q} and T_k = {T_k}: say so, or say "lower_right"'
        warnings.warn(text, CausalAlignmentWarning, stacklevel=3)
    offset = np.asarray(0 if query_offset is None else query_offset)
    if offset.dtype.kind not in "iu":
        raise TypeError(f"query_offset must hold integers, got {offset.dtype}")
    return offset.astype(np.int64)[..., None] + np.arange(T_q)


# ---- attention -----------------------------------------------------------------------------------------------------
@_quiet
def scaled_dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    attn_mask: ArrayLike | None = None,
    dropout_p: float = 0.0,
    is_causal: Causal = False,
    *,
    scale: float | None = None,
    enable_gqa: bool | None = None,
    bias: ArrayLike | None = None,
    query_offset: ArrayLike | None = None,
    rng: int | None = None,
    need_weights: bool = False,
    return_lse: bool = False,
    return_dropout_mask: bool = False,
    out: Floats | AttentionOutput | None = None,
) -> Floats | AttentionOutput:
    """softmax(scale * query @ key.T) @ value, of the visible keys, for any number of leading dimensions [1]_.

    Parameters
    ----------
    query, key, value : array_like (..., T_q, D), (..., T_k, D), (..., T_k, D_v)
        Leading dimensions broadcast. From four dimensions on, axis -3 counts heads; where the query has a multiple of
        the heads of key and value, head h reads head ``h // (H_q // H_kv)`` of them. Two or three dimensions have one
        head, unless three come with ``enable_gqa=True``; ``enable_gqa=False`` forbids groups.
    attn_mask : array_like of bool (True = keep) or of floats (added to the scores), broadcastable to (..., T_q, T_k)
    dropout_p : float in [0, 1], with `rng` a 64-bit seed, or None for a fresh one; see `dropout_keep`
    is_causal, query_offset : see `causal_mask`
        The offset may be an array that broadcasts to the leading dimensions without the heads.
    scale : float, default 1 / sqrt(D)
    bias : array_like of floats, broadcastable to (..., T_q, T_k)
        Added to the scores; -inf hides a key.
    need_weights, return_lse, return_dropout_mask : bool
        Also return the weights before dropout (..., T_q, T_k), the natural logarithm of the sum of the exponentials of
        the visible scores (..., T_q), and which weights dropout kept (..., T_q, T_k).
    out : ndarray of float64 (..., T_q, D_v), or an AttentionOutput of arrays

    Returns
    -------
    ndarray (..., T_q, D_v), or an AttentionOutput if more than that was asked for
        A query that sees no key gets 0, weights 0 and LSE -inf. A key that is not visible has no influence, whatever
        it and its value hold; NaN or infinity in a visible one shows in the rows that see it.

    Examples
    --------
    >>> query = key = np.zeros((3, 2))
    >>> scaled_dot_product_attention(query, key, [[0.0], [2.0], [7.0]], is_causal=True)
    array([[0.],
           [1.],
           [3.]])
    """
    p = _probability(dropout_p, "dropout_p")
    scores, visible, position, values, one_head = _score(
        (query, key, value), (attn_mask, bias), (is_causal, query_offset), scale, enable_gqa
    )
    weights = softmax(scores, where=visible)

    row_max = np.max(scores, axis=-1, initial=-np.inf, where=visible)
    row_sum = np.where(visible, np.exp(scores - row_max[..., None]), 0.0).sum(axis=-1)
    lse = np.where(row_max == -np.inf, -np.inf, row_max + np.log(row_sum))

    seed, kept = _seed(rng), np.ones(scores.shape, np.bool_)
    if p > 0:
        *lead, num_heads, _, T_k = scores.shape
        batch = np.arange(math.prod(lead)).reshape(*lead, 1, 1)
        kept = dropout_keep(p, seed, batch, np.arange(num_heads)[:, None], position[..., None, :], T_k)
    result = _weighted_sum(_apply_dropout(weights, kept, p), values, visible)

    if one_head:
        result, weights, kept, lse = result[..., 0, :, :], weights[..., 0, :, :], kept[..., 0, :, :], lse[..., 0, :]
    given = out if isinstance(out, AttentionOutput) else AttentionOutput(out)
    result = _deliver(result, given.out)
    if not (need_weights or return_lse or return_dropout_mask or isinstance(out, AttentionOutput)):
        return result
    return AttentionOutput(
        result,
        _deliver(weights, given.weights) if need_weights else None,
        _deliver(lse, given.lse) if return_lse else None,
        _deliver(kept, given.dropout_mask) if return_dropout_mask else None,
        seed if p > 0 else None,
    )


def causal_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    attn_mask: ArrayLike | None = None,
    dropout_p: float = 0.0,
    *,
    query_offset: ArrayLike | None = None,
    **keywords: Any,
) -> Floats | AttentionOutput:
    """`scaled_dot_product_attention` in which a token sees itself and what came before it.

    Queries are the last ones of the sequence ("lower_right"), so that a few new queries against a longer cache of keys
    come out as they would in a full pass; with `query_offset` given, query 0 stands at that position.

    Examples
    --------
    >>> x = np.eye(4)
    >>> np.allclose(causal_attention(x[3:], x, x), causal_attention(x, x, x)[3:])
    True
    """
    keywords |= {"query_offset": query_offset, "is_causal": "lower_right" if query_offset is None else "upper_left"}
    return scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, **keywords)


@_quiet
def attention_weights(
    query: ArrayLike,
    key: ArrayLike,
    attn_mask: ArrayLike | None = None,
    is_causal: Causal = False,
    *,
    scale: float | None = None,
    enable_gqa: bool | None = None,
    bias: ArrayLike | None = None,
    query_offset: ArrayLike | None = None,
    stage: str = "softmax",
    out: Floats | None = None,
) -> Floats:
    """Return the weights (..., T_q, T_k) with which `scaled_dot_product_attention` adds up values, before dropout.

    Examples
    --------
    >>> attention_weights(np.zeros((2, 3)), np.zeros((2, 3)), is_causal=True)
    array([[1. , 0. ],
           [0.5, 0.5]])
    """
    if stage != "softmax":
        raise ValueError(f'stage must be "softmax", got {stage!r}')
    problem = _score((query, key, key), (attn_mask, bias), (is_causal, query_offset), scale, enable_gqa)
    weights = softmax(problem.scores, where=problem.visible)
    return _deliver(weights[..., 0, :, :] if problem.one_head else weights, out)


class _Problem(NamedTuple):
    scores: Floats  # (*lead, H, T_q, T_k)
    visible: Bools  # the same shape
    position: NDArray[np.int64]  # (*lead or shorter, T_q)
    value: Floats  # (*lead, H, T_k, D_v)
    one_head: bool  # the caller's arrays have no head axis


def _score(
    inputs: tuple[ArrayLike, ArrayLike, ArrayLike],
    masks: tuple[ArrayLike | None, ArrayLike | None],
    causal: tuple[Causal, ArrayLike | None],
    scale: float | None,
    enable_gqa: bool | None,
) -> _Problem:
    """Scores and visibility of every pair, with the heads on an axis of their own."""
    arrays = [np.asarray(a, np.float64) for a in inputs]
    rank = max(a.ndim for a in arrays)
    arrays = [a.reshape((1,) * (rank - a.ndim) + a.shape) for a in arrays]
    one_head = rank == 2 or (rank == 3 and not enable_gqa)
    if one_head:
        arrays = [np.expand_dims(a, -3) for a in arrays]
    q, k, v = _match_heads(arrays[0], arrays[1], arrays[2], enable_gqa)
    shape = (*np.broadcast_shapes(q.shape[:-2], k.shape[:-2], v.shape[:-2]), q.shape[-2], k.shape[-2])
    if v.shape[-2] != k.shape[-2]:
        raise ValueError(f"value has {v.shape[-2]} rows, key has {k.shape[-2]}")

    scale = 1.0 / math.sqrt(max(q.shape[-1], 1)) if scale is None else scale
    scores = np.array(np.broadcast_to((q * scale) @ np.swapaxes(k, -1, -2), shape))
    visible = np.ones(shape, np.bool_)
    for name, given in zip(("attn_mask", "bias"), masks, strict=True):
        if given is None:
            continue
        term = np.asarray(given)
        if one_head and term.ndim > 2:
            term = np.expand_dims(term, -3)
        if term.dtype.kind == "f":
            scores = scores + np.broadcast_to(term, shape)
            visible &= term != -np.inf
        elif name == "attn_mask":
            visible &= np.broadcast_to(_boolean(term, name), shape)
        else:
            raise TypeError(f"bias must hold floats, got {term.dtype}; a boolean mask goes to attn_mask")

    position = _positions(*causal, *shape[-2:])
    if causal[0]:
        visible &= np.arange(shape[-1]) <= position[..., None, :, None]
    return _Problem(scores, visible, position, np.broadcast_to(v, shape[:-2] + v.shape[-2:]), one_head)


def _match_heads(q: Floats, k: Floats, v: Floats, enable_gqa: bool | None) -> tuple[Floats, Floats, Floats]:
    """Repeat key and value heads for the groups of query heads that share them."""
    num_heads, (num_kv,) = q.shape[-3], np.broadcast_shapes(k.shape[-3:-2], v.shape[-3:-2])
    if num_heads == num_kv or 1 in (num_heads, num_kv):
        return q, k, v
    if num_kv == 0 or num_heads % num_kv or enable_gqa is False:
        raise ValueError(f"query has {num_heads} heads, key and value have {num_kv}")
    k, v = (a if a.shape[-3] == 1 else np.repeat(a, num_heads // num_kv, axis=-3) for a in (k, v))
    return q, k, v


def _weighted_sum(weights: Floats, value: Floats, visible: Bools) -> Floats:
    """Multiply weights @ value without the products 0 * NaN and 0 * inf of keys that are not visible."""
    finite = np.isfinite(value)
    total: Floats = weights @ np.where(finite, value, 0.0)
    for j in np.flatnonzero(~finite.all(axis=(*range(value.ndim - 2), -1))):  # one by one, added where they are seen
        row = np.where(finite, 0.0, value)[..., j, None, :]
        total += np.where(visible[..., j, None], weights[..., j, None] * row, 0.0)
    return total


def _boolean(mask: ArrayLike, name: str) -> Bools:
    array = np.asarray(mask)
    if array.dtype != np.bool_:
        raise TypeError(f"{name} has dtype {array.dtype}, expected bool (True = keep): pass mask.astype(bool)")
    return array


def _probability(p: float, name: str) -> float:
    if not 0 <= p <= 1:
        raise ValueError(f"{name} must be between 0 and 1, got {p}")
    return float(p)


def _seed(rng: int | None) -> int:
    return int.from_bytes(os.urandom(8), "little") if rng is None else int(rng)


def _deliver(result: _Array, out: _Array | None) -> _Array:
    if out is None:
        return result
    out[...] = result
    return out
