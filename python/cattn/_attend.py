"""The way through the attention classes: projections, cache, the fused functions, and back to the caller's shape."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from ._arrays import as_array
from ._checks import as_dtype, as_size
from ._module import Dropout, Module
from ._types import AttentionOutput
from .cache import KVCache
from .functional import causal_attention, scaled_dot_product_attention

Array = NDArray[Any]


def _as_batch(x: ArrayLike, d_in: int) -> tuple[Array, bool]:
    """Return x as (B, T, d_in), and whether it had a batch."""
    array = as_array(x, "x")
    if array.ndim not in (2, 3) or array.shape[-1] != d_in:
        raise ValueError(f"x has shape {array.shape}, wanted (T, {d_in}) or (B, T, {d_in})")
    return (array, True) if array.ndim == 3 else (array[None], False)


def _attend(
    q: Array, k: Array, v: Array, offset: Any, dropouts: Sequence[Dropout], need_weights: bool
) -> tuple[Array, Array | None]:
    """Return context (B, T, H * d_v) and weights (B, H, T, T_k) of q, k, v (B, H, T, d); causal if there is an offset.

    One of `dropouts` for all heads, or one for each: these draw one after the other.
    """
    batch, heads, tokens, _ = q.shape
    dtype = np.result_type(q, k, v)
    context = np.empty((batch, tokens, heads, v.shape[-1]), dtype)  # the heads side by side, as the output has them
    weights = np.empty((batch, heads, tokens, k.shape[-2]), dtype) if need_weights else None
    parts = [(slice(None), dropouts[0] if dropouts else None)]
    if len(dropouts) > 1 and any(dropout.active_p > 0 for dropout in dropouts):
        parts = [(slice(head, head + 1), dropout) for head, dropout in enumerate(dropouts)]
    for part, dropout in parts:
        out = context.swapaxes(1, 2)[:, part]
        keywords: dict[str, Any] = {"out": out}
        if weights is not None:
            keywords = {"need_weights": True, "out": AttentionOutput(out, weights[:, part])}
        if dropout is not None:
            keywords |= {"dropout_p": dropout.active_p, "rng": dropout.draw_from()}
        if offset is None:
            scaled_dot_product_attention(q[:, part], k[:, part], v[:, part], **keywords)
        else:
            causal_attention(q[:, part], k[:, part], v[:, part], query_offset=offset, **keywords)
    return context.reshape(batch, tokens, heads * v.shape[-1]), weights


def _result(context: Array, weights: Array | None, batched: bool, one_head: bool) -> Any:
    """Take away the axes that the caller did not give."""
    if weights is not None and one_head:
        weights = weights[:, 0]
    if not batched:
        context, weights = context[0], None if weights is None else weights[0]
    return context if weights is None else (context, weights)


def _check_cache(cache: KVCache, x: Array, dtype: np.dtype[Any], batched: bool, heads: int, head_dim: int) -> None:
    """Refuse a cache that belongs to something else, before anything is computed."""
    if not isinstance(cache, KVCache):
        raise TypeError(f"cache must be a cattn.KVCache, got {type(cache).__name__}")
    wanted = {
        "batch_shape": (x.shape[0],) if batched else (),
        "num_kv_heads": heads,
        "head_dim": head_dim,
        "v_head_dim": head_dim,
    }
    for name, value in wanted.items():
        if getattr(cache, name) != value:
            raise ValueError(f"cache has {name} {getattr(cache, name)}, wanted {value}")
    if not np.can_cast(dtype, cache.dtype, "safe"):
        raise TypeError(f"keys would be {dtype} as x is {x.dtype}, the cache holds {cache.dtype}: convert x, or use "
                        f"KVCache(..., dtype={str(dtype)!r})")  # fmt: skip
    cache._check_room(x.shape[1])


class SelfAttention(Module):
    """What the two classes without a mask have in common."""

    d_in: int
    d_out: int

    def _project(self, x: Array) -> tuple[Array, Array, Array]:
        raise NotImplementedError

    def __call__(self, x: ArrayLike, *, return_weights: bool = False) -> Any:
        """Return a context vector for each token, which sees every other.

        Parameters
        ----------
        x : array_like, shape (T, d_in) or (B, T, d_in)
            Tokens.
        return_weights : bool
            Return (context, weights).

        Returns
        -------
        ndarray, shape (T, d_out) or (B, T, d_out), or (ndarray, ndarray)
            In the dtype that x and the weights share; the weights are (..., T, T).
        """
        batch, batched = _as_batch(x, self.d_in)
        q, k, v = (a[:, None] for a in self._project(batch))
        return _result(*_attend(q, k, v, None, (), return_weights), batched, one_head=True)


class Causal(Module):
    """What the classes with a causal mask have in common; they differ in projections and heads."""

    d_in: int
    d_out: int
    context_length: int
    dtype: np.dtype[Any]
    _kv_heads: int
    _head_dim: int
    _one_head = False  # weights without an axis for heads

    def _set_sizes(self, d_in: int, d_out: int, context_length: int, dtype: DTypeLike) -> None:
        self.d_in, self.d_out = as_size(d_in, "d_in"), as_size(d_out, "d_out")
        self.context_length = as_size(context_length, "context_length")
        self.dtype = as_dtype(dtype)

    def _project(self, x: Array) -> tuple[Array, Array, Array]:
        """Return queries, keys and values, (B, heads, T, head_dim)."""
        raise NotImplementedError

    def _dropouts(self) -> Sequence[Dropout]:
        raise NotImplementedError

    def _finish(self, context: Array) -> Array:
        return context

    def __call__(self, x: ArrayLike, *, return_weights: bool = False, cache: KVCache | None = None) -> Any:
        """Return a context vector for each token, which sees itself and those before it.

        Parameters
        ----------
        x : array_like, shape (T, d_in) or (B, T, d_in)
            Tokens; with a cache, those that follow the ones in it.
        return_weights : bool
            Return (context, weights).
        cache : KVCache, optional
            Takes the keys and values of x, behind those of the tokens before. Its batch_shape is () for x (T, d_in).

        Returns
        -------
        ndarray, shape (T, width) or (B, T, width), or (ndarray, ndarray)
            In the dtype that x and the weights share. The weights are those before dropout, one matrix of
            (T, tokens so far) for each sequence, and for each head where there may be several.

        Raises
        ------
        TypeError
            x does not hold real numbers, or the cache is none, or of a dtype that cannot hold the keys.
        ValueError
            x has another shape, there are more tokens than context_length, or the cache does not fit or is full. The
            cache is unchanged then.
        """
        batch, batched = _as_batch(x, self.d_in)
        tokens, before = batch.shape[1], 0
        if cache is not None:
            dtype = np.result_type(batch, self.dtype)
            _check_cache(cache, batch, dtype, batched, self._kv_heads, self._head_dim)
            before = cache.k.shape[-2]
        if before + tokens > self.context_length:
            behind = f" behind {before} in the cache" if before else ""
            raise ValueError(f"x has {tokens} tokens{behind}, context_length is {self.context_length}")
        q, k, v = self._project(batch)
        if cache is None:
            context, weights = _attend(q, k, v, 0, self._dropouts(), return_weights)
        else:
            context, weights = self._attend_cached(q, k, v, cache, return_weights)
        return _result(self._finish(context), weights, batched, self._one_head)

    def _attend_cached(
        self, q: Array, k: Array, v: Array, cache: KVCache, need_weights: bool
    ) -> tuple[Array, Array | None]:
        """Append, then attend to everything in the cache; whatever fails, the cache is as it was."""
        before, offset = (cache.lengths, cache.k.shape[-2]), cache.query_offset()
        single = cache.batch_shape == ()
        try:
            cache.append(*(k[0], v[0]) if single else (k, v))
            all_k, all_v = (cache.k[None], cache.v[None]) if single else (cache.k, cache.v)
            return _attend(q, all_k, all_v, offset, self._dropouts(), need_weights)
        except BaseException:
            cache._set_lengths(*before)
            raise
