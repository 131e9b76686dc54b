"""The forward and backward pass of the attention classes, from the projections to the caller's shape."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, overload

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from .._input.arrays import as_array
from .._input.checks import as_dtype, as_size
from .._input.names import with_hints
from .._input.objects import Quantized
from .._input.types import AttentionOutput, Window
from ..cache import KVCache
from ..functional import causal_attention, causal_mask, scaled_dot_product_attention
from ..functional._derivatives import attention_backward
from ..random import TorchGenerator, to_replay
from ._layers import Dropout, Module, show_dtype

Array = NDArray[Any]


def _as_batch(x: ArrayLike, d_in: int) -> tuple[Array, bool]:
    """Return x as (B, T, d_in), and whether it has a batch axis."""
    array = as_array(x, "x")
    if array.ndim not in (2, 3) or array.shape[-1] != d_in:
        raise ValueError(f"x has shape {array.shape}, wanted (T, {d_in}) or (B, T, {d_in})")
    return (array, True) if array.ndim == 3 else (array[None], False)


class _HeadDropout(NamedTuple):
    """The dropout of some heads: the heads, the probability, and the rng that draws their mask again."""

    heads: slice
    p: float
    rng: Any


class _Pass(NamedTuple):
    """The arrays and options of a forward pass that the backward pass needs."""

    q: Array
    k: Array
    v: Array
    out: Array  # (B, T, H, d_v)
    lse: Array
    causal: bool
    window_size: Window
    dropouts: list[_HeadDropout]

    def backward(self, grad: Array) -> tuple[Array, Array, Array]:
        """Return the gradients of q, k and v, given the gradient of the context (B, T, H * d_v)."""
        grad, out = grad.reshape(self.out.shape).swapaxes(1, 2), self.out.swapaxes(1, 2)
        parts = [
            attention_backward(
                grad[:, heads], self.q[:, heads], self.k[:, heads], self.v[:, heads], out[:, heads],
                self.lse[:, heads], is_causal=self.causal, window_size=self.window_size, dropout_p=p,
                rng=to_replay(rng) if isinstance(rng, TorchGenerator) else rng,
            )
            for heads, p, rng in self.dropouts
        ]  # fmt: skip
        if len(parts) == 1:
            return parts[0].query, parts[0].key, parts[0].value
        d_q, d_k, d_v = (np.concatenate(grads, axis=1) for grads in zip(*(part[:3] for part in parts), strict=True))
        return d_q, d_k, d_v


class _Kept(NamedTuple):
    """The part of a forward pass that a class keeps for `backward`."""

    shape: tuple[int, ...]  # of the output, as the caller got it
    dtype: np.dtype[Any]
    x: Array  # (B, T, d_in)
    attended: _Pass
    batched: bool


def _at(stored: Array | Quantized, index: Any) -> Any:
    """Return ``stored[index]``, where an index of a quantized cache is one of the axes before the tokens."""
    return Quantized._of_checked(*(a[index] for a in stored)) if isinstance(stored, Quantized) else stored[index]


def _attend(
    q: Array,
    k: Any,
    v: Any,
    offset: Any,
    dropouts: Sequence[Dropout],
    return_weights: bool,
    keep: bool = False,
    window_size: Window = (-1, -1),
) -> tuple[Array, Array | None, _Pass | None]:
    """Return context (B, T, H * d_v) and weights (B, H, T, T_k) of q, k, v (B, H, T, d); causal if there is an offset.

    `dropouts` has one layer for all heads, or one for each; these draw one after the other. If `keep`, also return
    the `_Pass` for the backward pass; its `out` shares memory with the context. k and v of a cache
    may be Quantized.
    """
    batch, heads, tokens, _ = q.shape
    dtype = np.result_type(q, k.dtype, v.dtype)
    context = np.empty((batch, tokens, heads, v.shape[-1]), dtype)  # in the memory order of the output
    weights = np.empty((batch, heads, tokens, k.shape[-2]), dtype) if return_weights else None
    lse = np.empty((batch, heads, tokens), np.float64) if keep else None  # for the gradients
    replays = []
    parts = [(slice(None), dropouts[0] if dropouts else None)]
    if len(dropouts) > 1 and any(dropout.active_p > 0 for dropout in dropouts):
        parts = [(slice(head, head + 1), dropout) for head, dropout in enumerate(dropouts)]
    for part, dropout in parts:
        out = context.swapaxes(1, 2)[:, part]
        fields = AttentionOutput(
            out, None if weights is None else weights[:, part], None if lse is None else lse[:, part]
        )
        p, rng = (0.0, None) if dropout is None else (dropout.active_p, dropout.draw_from())
        keywords: Any = {
            "return_weights": return_weights,
            "return_lse": keep,
            "out": fields,
            "dropout_p": p,
            "rng": rng,
        }
        replay: Any = to_replay(rng) if keep and p > 0 and isinstance(rng, TorchGenerator) else None
        parted = q[:, part], _at(k, np.s_[:, part]), _at(v, np.s_[:, part])
        if offset is None:
            result = scaled_dot_product_attention(*parted, **keywords)
        else:
            result = causal_attention(*parted, query_offset=offset, window_size=window_size, **keywords)
        if keep and p > 0 and replay is None:
            replay = result.dropout_seed
        replays.append(_HeadDropout(part, p, replay))
    attended = None if lse is None else _Pass(q, k, v, context, lse, offset is not None, window_size, replays)
    return context.reshape(batch, tokens, heads * v.shape[-1]), weights, attended


def _result(context: Array, weights: Array | None, batched: bool, one_head: bool) -> Any:
    """Remove the axes that the caller's x does not have."""
    if weights is not None and one_head:
        weights = weights[:, 0]
    if not batched:
        context, weights = context[0], None if weights is None else weights[0]
    return context if weights is None else (context, weights)


def _check_cache(cache: KVCache, x: Array, dtype: np.dtype[Any], batched: bool, heads: int, head_dim: int) -> None:
    """Refuse a cache of other sizes or dtypes, before anything is computed."""
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
    if not cache._takes(dtype):
        raise TypeError(f"keys would be {dtype} as x is {x.dtype}, the cache holds {cache.dtype}: convert x, or use "
                        f"KVCache(..., dtype={str(dtype)!r})")  # fmt: skip
    cache._check_room(x.shape[1])


class _Attention(Module, ABC):
    """Base of all attention classes: the backward pass."""

    d_in: int
    d_out: int

    @abstractmethod
    def _project(self, x: Array) -> tuple[Array, Array, Array]:
        """Return queries, keys and values, (B, heads, T, head_dim)."""

    @abstractmethod
    def _project_backward(self, x: Array, d_q: Array, d_k: Array, d_v: Array) -> Array:
        """Return the gradient of x from the gradients of q, k and v. Add to the gradients of the parameters."""

    def _finish(self, context: Array) -> Array:
        return context

    def _finish_backward(self, context: Array, grad: Array) -> Array:
        """Return the gradient of the context, given the gradient of the output. Add to the parameters' gradients."""
        return grad

    def _keep(self, x: Array, attended: _Pass | None, output: Array, batched: bool) -> None:
        """Keep the arrays that `backward` needs. Copy those that the caller may change: ``x += layer(x)`` is common."""
        if attended is None:
            return
        if np.may_share_memory(attended.out, output):
            attended = attended._replace(out=attended.out.copy())
        shape = output.shape if batched else output.shape[1:]
        self._kept = _Kept(shape, attended.out.dtype, x.copy(), attended, batched)

    def _propagate(self, kept: _Kept, grad: Array) -> Array:
        grad = grad if kept.batched else grad[None]
        *tokens, heads, width = kept.attended.out.shape
        context = kept.attended.out.reshape(*tokens, heads * width)
        gradients = kept.attended.backward(self._finish_backward(context, grad))
        grad_x = self._project_backward(kept.x, *gradients)
        return grad_x if kept.batched else grad_x[0]


class SelfAttention(_Attention):
    """Base of the two classes without a mask."""

    @overload
    def __call__(self, x: ArrayLike, *, return_weights: Literal[False] = ...) -> Array: ...
    @overload
    def __call__(self, x: ArrayLike, *, return_weights: Literal[True]) -> tuple[Array, Array]: ...
    @overload
    def __call__(self, x: ArrayLike, *, return_weights: bool) -> Array | tuple[Array, Array]: ...
    @with_hints
    def __call__(self, x: ArrayLike, *, return_weights: bool = False) -> Any:
        """Return a context vector for each token. Every token sees all tokens.

        Parameters
        ----------
        x : array_like, shape (T, d_in) or (B, T, d_in)
            The tokens.
        return_weights : bool
            Return (context, weights).

        Returns
        -------
        ndarray, shape (T, d_out) or (B, T, d_out), or (ndarray, ndarray)
            The dtype is the common one of x and the parameters. The weights are (..., T, T).
        """
        self._kept = None
        batch, batched = _as_batch(x, self.d_in)
        context, weights, attended = _attend(*self._project(batch), None, (), return_weights, self.training)
        self._keep(batch, attended, context, batched)
        return _result(context, weights, batched, one_head=True)


class Causal(_Attention):
    """Base of the classes with a causal mask, which differ in projections and heads."""

    context_length: int
    window_size: Window = (-1, -1)
    dtype: np.dtype[Any]
    dropout: Dropout
    _kv_heads: int
    _head_dim: int
    _one_head = False  # weights without an axis for heads

    def __init__(self, d_in: int, d_out: int, context_length: int, window_size: Window, dtype: DTypeLike) -> None:
        super().__init__()
        causal_mask(1, window_size=window_size)  # raises what the functions would raise later
        self.d_in, self.d_out = as_size(d_in, "d_in"), as_size(d_out, "d_out")
        self.context_length = as_size(context_length, "context_length")
        self.window_size = window_size
        self.dtype = as_dtype(dtype)

    def _dropouts(self) -> Sequence[Dropout]:
        """Return the layers that drop weights: one for all heads, or one for each."""
        return (self.dropout,)

    def _show(self, name: str, layer: Any, heads: str = "", options: str = "") -> str:
        """Return the call that makes such a module. `layer` is the module with the dropout and W_query."""
        if self.window_size != (-1, -1):
            options += f", window_size={self.window_size}"
        return (
            f"{name}({self.d_in}, {self.d_out}, context_length={self.context_length}, dropout={layer.dropout.p}, "
            f"{heads}qkv_bias={layer.W_query.bias is not None}{options}{show_dtype(self.dtype)})"
        )

    @overload
    def __call__(self, x: ArrayLike, *, return_weights: Literal[False] = ..., cache: KVCache | None = ...) -> Array: ...
    @overload
    def __call__(
        self, x: ArrayLike, *, return_weights: Literal[True], cache: KVCache | None = ...
    ) -> tuple[Array, Array]: ...
    @overload
    def __call__(
        self, x: ArrayLike, *, return_weights: bool, cache: KVCache | None = ...
    ) -> Array | tuple[Array, Array]: ...
    @with_hints
    def __call__(self, x: ArrayLike, *, return_weights: bool = False, cache: KVCache | None = None) -> Any:
        """Return a context vector for each token. A token sees itself and those before it within window_size.

        Parameters
        ----------
        x : array_like, shape (T, d_in) or (B, T, d_in)
            The tokens. With a cache, they follow the tokens in it.
        return_weights : bool
            Return (context, weights).
        cache : KVCache, optional
            Receives the keys and values of x, after the ones of earlier tokens. Its batch_shape is () for x (T, d_in).

        Returns
        -------
        ndarray, shape (T, width) or (B, T, width), or (ndarray, ndarray)
            The dtype is the common one of x and the parameters, or the dtype of a wider cache. The weights are from
            before the dropout: one matrix (T, tokens so far) for each sequence, and for each head if the class has
            several.

        Raises
        ------
        TypeError
            x does not hold real numbers, the cache is not a KVCache, or its dtype cannot hold the keys.
        ValueError
            x has another shape, there are more tokens than context_length, or the cache has other sizes or is full. The
            cache is unchanged then.
        """
        self._kept = None
        batch, batched = _as_batch(x, self.d_in)
        tokens, before = batch.shape[1], 0
        if cache is not None:
            dtype = np.result_type(batch, self.dtype)
            _check_cache(cache, batch, dtype, batched, self._kv_heads, self._head_dim)
            before = cache.k.shape[-2]
        if before + tokens > self.context_length:
            cached = f" behind {before} in the cache" if before else ""
            raise ValueError(f"x has {tokens} tokens{cached}, context_length is {self.context_length}")
        q, k, v = self._project(batch)
        if cache is None:
            context, weights, attended = _attend(
                q, k, v, 0, self._dropouts(), return_weights, self.training, self.window_size
            )
            output = self._finish(context)
            self._keep(batch, attended, output, batched)
        else:
            output, weights = self._attend_cached(q, k, v, cache, return_weights)
            if self.training:
                self._kept = "backward does not go through a cache: call the module without one first"
        return _result(output, weights, batched, self._one_head)

    def _attend_cached(
        self, q: Array, k: Array, v: Array, cache: KVCache, return_weights: bool
    ) -> tuple[Array, Array | None]:
        """Append, attend to the whole cache, and finish. After an error the cache is as it was."""
        before, offset = (cache.lengths, cache.k.shape[-2]), cache.query_offset()
        single = cache.batch_shape == ()
        try:
            cache.append(*(k[0], v[0]) if single else (k, v))
            all_k, all_v = (_at(cache.k, None), _at(cache.v, None)) if single else (cache.k, cache.v)
            context, weights, _ = _attend(
                q, all_k, all_v, offset, self._dropouts(), return_weights, window_size=self.window_size
            )  # fmt: skip
            return self._finish(context), weights
        except BaseException:
            cache._set_lengths(*before)
            raise
