"""The keys and values of the tokens so far, for decoding token by token."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from ._input.arrays import as_array, as_integers, converted, is_quantized, parts_of, read_array
from ._input.checks import QUANTIZED, as_dtype, as_size
from ._input.contexts import in_default_mode
from ._input.names import public_names, with_hints
from ._input.objects import LARGEST_SCALE, LEAST_SCALE, NoArray, Quantized
from ._input.types import CausalAlignmentWarning, html_table

__all__ = ["KVCache"]
__dir__ = public_names(globals())

Array = NDArray[Any]

_PIECE = 2**18  # elements that are moved before Python looks for signals
_DTYPES = ("float16", "bfloat16", "float32", "float64", *QUANTIZED)


def _indices(obj: Any, name: str, most: int, least: int = 0) -> Array:
    """Return an int64 array of at least one axis, with numbers within bounds, that nobody else changes."""
    numbers = as_integers(read_array(obj, name), name, least, most)
    if isinstance(numbers, int):
        raise ValueError(f"{name} must be an array or a list of integers, got one integer")
    return numbers


def _gather(source: Array, rows: Array, target: Array | None = None) -> Array:
    """Return ``source[rows]``, in target if that is given."""
    result = np.empty((len(rows), *source.shape[1:]), source.dtype) if target is None else target
    for part in parts_of(result.shape, _PIECE):
        result[part] = source[(rows[part[0]], *part[1:])]
    return result


def _scatter(target: Array, rows: Array, new: Array) -> None:
    """Do ``target[rows] = new``."""
    for part in parts_of(new.shape, _PIECE):
        target[(rows[part[0]], *part[1:])] = new[part]


def _rows(nested: Any, sizes: tuple[int, ...]) -> list[Any]:
    """Return the lists that are the innermost of nested ones, one for each sequence of the batch."""
    if not sizes:
        return [nested]
    if not isinstance(nested, Sequence) or len(nested) != sizes[0]:
        got = f"{len(nested)} parts" if isinstance(nested, Sequence) else type(nested).__name__
        raise ValueError(f"indices must have a list of {sizes[0]} parts for an axis of the batch, got {got}")
    return [row for part in nested for row in _rows(part, sizes[1:])]


class KVCache(NoArray):
    """Keys and values in two arrays of fixed size, filled in place.

    The cache owns the length: `append` writes after the last token, `k` and `v` are views of the tokens so far.
    Attention of the next queries over the whole cache has the bits of one pass over all tokens.

    Parameters
    ----------
    batch_shape : int or tuple of int
        The leading dimensions before the heads; ``()`` for a single sequence.
    num_kv_heads : int
        Heads of keys and values.
    max_len : int
        Number of keys that fit.
    head_dim : int
        Length of a key.
    v_head_dim : int, optional
        Length of a value. Default head_dim.
    dtype : dtype
        float16, bfloat16 (of ``ml_dtypes``), float32 or float64; int8 or float8_e4m3fn (of ``ml_dtypes``) to quantize
        what is appended, with one scale for each token and head, as `quantize` does.

    Attributes
    ----------
    batch_shape, num_kv_heads, max_len, head_dim, v_head_dim, dtype
        The arguments; batch_shape is a tuple.

    Raises
    ------
    TypeError, ValueError
        A size is not an int, or negative, or dtype is none of these six.

    See Also
    --------
    causal_attention : Attends with new queries to all keys of the cache.
    MultiHeadAttention : Takes a cache as ``cache``.
    merge_attention : Merges attention over several caches.
    quantize : The scales, and how far quantized numbers are from the given ones.

    Notes
    -----
    After `truncate` with one length per sequence the lengths differ. `append` then writes after the end of each
    sequence, and `k` and `v` reach to the end of the longest. Shorter sequences hold old data after their end, which
    `causal_attention` of a query and the cache does not read; with `k` and `v` alone
    ``query_offset=cache.lengths - T_q`` hides it from the ``T_q`` queries appended last.

    With int8 or float8_e4m3fn `k` and `v` are `Quantized`: attention computes with the dequantized numbers.

    `keep` and `reorder` move tokens: take `k` and `v` again afterwards. Ctrl-C while they write leaves the cache empty.

    One thread at a time may use a cache: two calls of `append` at once write to the same places.

    Copies are independent of the original, also copies by ``copy.copy``, and a pickle holds only the tokens so far.

    Examples
    --------
    >>> import numpy as np
    >>> import cattn
    >>> x = np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])[None]  # one head, three tokens
    >>> cache = cattn.KVCache((), num_kv_heads=1, max_len=8, head_dim=2, dtype="float64")
    >>> steps = []
    >>> for t in range(3):
    ...     token = x[:, t : t + 1]
    ...     cache.append(token, token)
    ...     steps.append(cattn.causal_attention(token, cache, enable_gqa=True))
    >>> cache
    KVCache((), num_kv_heads=1, max_len=8, head_dim=2, dtype=float64, lengths=3)
    >>> full = cattn.causal_attention(x, x, x, enable_gqa=True)
    >>> bool((np.concatenate(steps, axis=-2) == full).all())
    True

    A quarter of the memory, with one scale for each token and head:

    >>> small = cattn.KVCache((), num_kv_heads=1, max_len=8, head_dim=2, dtype="int8")
    >>> small.append(x, x)
    >>> step = cattn.causal_attention(x[:, 2:], small, enable_gqa=True)
    >>> bool(abs(step - steps[2]).max() < 1e-7)
    True
    """

    _instead = (
        "call causal_attention(query, cache), without value; other functions take cache.k and cache.v, and "
        "key_value_seq_lengths=cache.lengths"
    )

    @with_hints
    def __init__(
        self,
        batch_shape: int | tuple[int, ...] | list[int],
        num_kv_heads: int,
        max_len: int,
        head_dim: int,
        v_head_dim: int | None = None,
        dtype: DTypeLike = "float32",
    ) -> None:
        batch = batch_shape if isinstance(batch_shape, (tuple, list)) else (batch_shape,)
        self.batch_shape = tuple(as_size(size, "batch_shape", 0) for size in batch)
        self.num_kv_heads = as_size(num_kv_heads, "num_kv_heads")
        self.max_len = as_size(max_len, "max_len", 0)
        self.head_dim = as_size(head_dim, "head_dim", 0)
        self.v_head_dim = self.head_dim if v_head_dim is None else as_size(v_head_dim, "v_head_dim", 0)
        self.dtype = as_dtype(dtype, _DTYPES)
        self._allocate()

    def _allocate(self) -> None:
        # numpy.zeros gets pages from the operating system that cost nothing until they are written.
        rows = (*self.batch_shape, self.num_kv_heads, self.max_len)
        try:
            self._k = np.zeros((*rows, self.head_dim), self.dtype)
            self._v = np.zeros((*rows, self.v_head_dim), self.dtype)
            # Attention refuses scales of 0, also of places that it does not read.
            self._k_scale = np.ones((*rows, 1), np.float32) if self._quantizes else None
            self._v_scale = np.ones((*rows, 1), np.float32) if self._quantizes else None
        except ValueError as error:  # too many dimensions, or more bytes than can be addressed
            raise ValueError(
                f"batch_shape, num_kv_heads, max_len and head_dim give an array of shape "
                f"{(*rows, max(self.head_dim, self.v_head_dim))}: {error}"
            ) from error
        self._set_lengths(np.zeros(self.batch_shape, np.int64), 0)

    def _set_lengths(self, lengths: ArrayLike, longest: int) -> None:
        self._lengths = np.asarray(lengths, np.int64)  # arithmetic on an array of shape () gives a scalar
        self._longest = longest  # also if the batch is empty
        self._ragged = self._lengths.size > 0 and int(self._lengths.min()) != longest

    @property
    def _quantizes(self) -> bool:
        return self.dtype.itemsize == 1

    def _stores(self) -> Iterator[Array]:
        """Yield the arrays of keys, values and their scales."""
        return (a for a in (self._k, self._v, self._k_scale, self._v_scale) if a is not None)

    @property
    def k(self) -> Array | Quantized:
        """The keys so far: a view of shape ``(*batch_shape, num_kv_heads, longest length, head_dim)``.

        Of a cache that quantizes it is a `Quantized`, whose scale has the shape ``(..., longest length, 1)``. After the
        end of a shorter sequence its scales are old ones or 1.
        """
        return self._filled(self._k, self._k_scale)

    @property
    def v(self) -> Array | Quantized:
        """The values so far, as `k`, with v_head_dim."""
        return self._filled(self._v, self._v_scale)

    def _filled(self, store: Array, scale: NDArray[np.float32] | None) -> Array | Quantized:
        filled = store[..., : self._longest, :]
        if scale is None:
            return filled
        filled_scale = scale[..., : self._longest, :]
        filled.setflags(write=False)
        filled_scale.setflags(write=False)
        return Quantized._of_views(filled, filled_scale)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """The number of keys of each sequence: a copy, of shape batch_shape."""
        return self._lengths.copy()

    @property
    def nbytes(self) -> int:
        """The bytes of all arrays; most operating systems provide them as they are filled."""
        return sum(store.nbytes for store in self._stores())

    def query_offset(self) -> int | NDArray[np.int64]:
        """Return the position of the next token: an int if all sequences are equally long, else an array.

        Called before `append`, it is the `query_offset` of the queries that belong to the appended keys.
        """
        return self.lengths if self._ragged else self._longest

    def _attended_by(self, query: ArrayLike, warns: bool) -> tuple[Any, Any, NDArray[np.int64] | None]:
        """Return what causal_attention reads for queries of the last tokens: keys, values and a query_offset."""
        shape = read_array(query, "query").shape if self._ragged else ()
        if len(shape) < 2:
            return self.k, self.v, None
        offsets = self._lengths - shape[-2]
        if warns and offsets.min() < 0:
            warnings.warn(
                f"with {shape[-2]} queries and the lengths {self._show_lengths()} the first queries of a sequence see "
                f"no key: their rows are 0. Append the keys and values of the queries to the cache first; give "
                f"query_offset=cache.lengths - {shape[-2]} to silence this warning",
                CausalAlignmentWarning, stacklevel=2,
            )  # fmt: skip
        return self.k, self.v, offsets

    def append(self, key: ArrayLike, value: ArrayLike) -> None:
        """Write keys and values after the last token of each sequence.

        Parameters
        ----------
        key, value : array_like, shape ``(*batch_shape, num_kv_heads, T, head_dim)``, or v_head_dim for value
            In the cache's dtype or a narrower one. A cache of float16 or bfloat16 rounds wider floats, and one of int8
            or float8_e4m3fn quantizes any.

        Raises
        ------
        TypeError
            The dtype of the cache cannot hold the dtype of the arguments.
        ValueError
            The shape is wrong, there are more tokens than fit, a number to quantize is not finite, or one to round is
            beyond the range of the cache's dtype. The cache is unchanged then.
        """
        key, value = self._checked(key, "key", self.head_dim), self._checked(value, "value", self.v_head_dim)
        count = key.shape[-2]
        if value.shape[-2] != count:
            raise ValueError(f"value has {value.shape[-2]} tokens, key has {count}")
        self._check_room(count)
        news = [key, value]
        if self._quantizes:
            from .functional._quantize import quantized  # imported here, because few caches need it

            pairs = [quantized(a, name, (a.ndim - 1,), self.dtype) for a, name in ((key, "key"), (value, "value"))]
            news = [values for values, _ in pairs] + [scale for _, scale in pairs]
        # What is appended may be views of this cache. NumPy reads all of one array before it writes it, but values are
        # written after keys, and in a ragged cache one sequence after another.
        if np.may_share_memory(news[1], self._k) or self._ragged:
            news = [a.copy() if any(np.may_share_memory(a, b) for b in (self._k, self._v)) else a for a in news]
        for store, new in zip(self._stores(), news, strict=True):
            if not self._ragged:
                store[..., self._longest : self._longest + count, :] = new
                continue
            for row in np.ndindex(self.batch_shape):
                start = int(self._lengths[row])
                store[(*row, slice(None), slice(start, start + count))] = new[row]
        self._set_lengths(self._lengths + count, self._longest + count)

    def _check_room(self, count: int) -> None:
        """Raise ValueError unless `count` more tokens fit."""
        if self._longest + count > self.max_len:
            raise ValueError(
                f"the cache is full: it has {self._longest} of max_len={self.max_len} tokens, {count} more do not fit"
            )

    def _takes(self, dtype: np.dtype[Any]) -> bool:
        """Return whether floats of this dtype can be appended: halves take wider floats, as int8 does."""
        rounds = self.dtype.itemsize == 2 < dtype.itemsize
        return self._quantizes or rounds or np.can_cast(dtype, self.dtype, "safe")

    def _checked(self, array: ArrayLike, name: str, width: int) -> Array:
        given = read_array(array, name)[...]  # a view: reading the other argument may set the shape of this array
        if is_quantized(given.dtype) or (given.dtype.kind in "iu" and self._quantizes):
            takes = "quantizes floats" if self._quantizes else f"holds {self.dtype}"
            raise TypeError(f"{name} has dtype {given.dtype}, which has no scales; the cache {takes}: "
                            f"pass cattn.dequantize({name}, scale), or {name}.astype(np.float32)")  # fmt: skip
        result = as_array(given, name)
        wanted = (*self.batch_shape, self.num_kv_heads, "T", width)
        fits = result.ndim == len(wanted) and all(
            want in (size, "T") for want, size in zip(wanted, result.shape, strict=True)
        )
        if not fits:
            text = "(" + ", ".join(map(str, wanted)) + ")"
            raise ValueError(f"{name} has shape {result.shape}, the cache takes {text}")
        if not self._takes(result.dtype):
            read = "" if given.dtype.kind == "f" or given.dtype == result.dtype else f", read as {result.dtype}"
            raise TypeError(
                f"{name} has dtype {given.dtype}{read}, the cache holds {self.dtype}: pass {name}.astype(cache.dtype), "
                f"or make the cache with dtype={str(result.dtype)!r}"
            )
        exact = self._quantizes or result.dtype.itemsize <= self.dtype.itemsize
        return result if exact else self._rounded(result, name)

    @in_default_mode
    def _rounded(self, array: Array, name: str) -> Array:
        """Round once to the halves that the cache holds."""
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            result = converted(array, self.dtype)
        if not all(
            np.array_equal(np.isfinite(result[part]), np.isfinite(array[part])) for part in parts_of(array.shape)
        ):
            raise ValueError(f"{name} holds numbers beyond the range of {self.dtype}, which the cache holds")
        return result

    def truncate(self, n: int | ArrayLike) -> None:
        """Forget all but the first n tokens.

        Parameters
        ----------
        n : int or array_like of int, broadcasting to batch_shape
            With an int, no sequence keeps more tokens. An array holds the new lengths, for instance of prompts that
            were padded on the right to one length.

        Raises
        ------
        TypeError
            n does not hold integers.
        ValueError
            n is negative, or larger than a length.
        """
        wanted = read_array(max(-1, min(n, np.iinfo(np.int64).max)) if type(n) is int else n, "n")  # n may exceed int64
        if wanted.dtype.kind not in "iu" and wanted.size > 0:
            raise TypeError(f"n must be an int or an integer array, got dtype {wanted.dtype}")
        try:
            given = np.broadcast_to(wanted, self.batch_shape)
        except ValueError:
            raise ValueError(
                f"n has shape {wanted.shape}, which does not broadcast to batch_shape {self.batch_shape}"
            ) from None
        limit = self._longest if wanted.ndim == 0 else self._lengths
        if np.any(wanted < 0) or np.any((wanted if wanted.ndim == 0 else given) > limit):
            got = n if type(n) is int else wanted.tolist()
            raise ValueError(f"n must be between 0 and the lengths, {self._show_lengths()}; got {got}")
        new = np.minimum(given.astype(np.int64), self._lengths)
        self._set_lengths(new, int(new.max(initial=0)) if new.size else min(self._longest, int(wanted.max(initial=0))))

    def keep(self, indices: ArrayLike | Sequence[Any]) -> None:
        """Forget all tokens but these, and put them in this order.

        Speculative decoding keeps the accepted path of a tree of drafts, and eviction keeps the keys of the largest
        weights. The cache is then as one to which only these tokens were appended, and attention has the bits that it
        has with that one. The numbers of the keys are not changed: a rotated key keeps the rotation of the position
        that it had.

        Parameters
        ----------
        indices : array_like of int, broadcasting to ``(*batch_shape, n)``, or nested lists of different lengths
            Positions in the cache, counted from 0. With one dimension the same ones of every sequence. -1 is no token,
            so that sequences may keep different numbers of them. A position may come more than once.

        Raises
        ------
        TypeError
            indices does not hold integers.
        ValueError
            There is no token at a position, the shape does not broadcast, or more tokens than fit are kept. The cache
            is unchanged then.

        See Also
        --------
        truncate : Keeps the first tokens, without moving any.

        Examples
        --------
        Two sequences of five tokens. Both keep the first two, then each keeps tokens of its own:

        >>> import numpy as np
        >>> import cattn
        >>> cache = cattn.KVCache(2, num_kv_heads=1, max_len=8, head_dim=1)
        >>> tokens = np.arange(10.0, dtype=np.float32).reshape(2, 1, 5, 1)
        >>> cache.append(tokens, tokens)
        >>> cache.keep([0, 1, 4])
        >>> cache.k[..., 0].tolist()
        [[[0.0, 1.0, 4.0]], [[5.0, 6.0, 9.0]]]
        >>> cache.keep([[2, 0], [1]])
        >>> cache.lengths.tolist(), cache.k[0, 0, :, 0].tolist(), cache.k[1, 0, :1, 0].tolist()
        ([2, 1], [4.0, 0.0], [6.0])
        """
        positions = self._positions(indices)
        counts = (positions >= 0).sum(-1)
        longest = int(counts.max()) if counts.size else positions.shape[-1]
        if longest > self.max_len:
            raise ValueError(f"indices keeps {longest} tokens of a sequence, max_len is {self.max_len}")
        positions = np.broadcast_to(positions, (*self.batch_shape, positions.shape[-1]))
        absent = positions >= self._lengths[..., None]
        if absent.any():
            raise ValueError(
                f"indices must be smaller than the lengths, {self._show_lengths()}; got {positions[absent][0]}"
                + (f" for the sequence {tuple(map(int, np.argwhere(absent)[0][:-1]))}" if self._ragged else "")
            )
        # All tokens that move are read before one is written.
        moves = []
        for row in np.ndindex(self.batch_shape):
            old = positions[row][positions[row] >= 0]
            start = int(np.argmax(np.append(old, -1) != np.arange(old.size + 1)))  # the tokens before stay
            for store in self._stores():
                moves.append((store[row][:, start : old.size], store[row][:, old[start:]]))
        with self._emptied_by_signals():
            for place, moved in moves:
                place[...] = moved
        self._set_lengths(np.broadcast_to(counts, self.batch_shape).copy(), longest)

    def _positions(self, indices: ArrayLike | Sequence[Any]) -> Array:
        """Return positions as an array that broadcasts to ``(*batch_shape, n)``, with -1 for none."""
        most = self._longest - 1
        try:
            found = read_array(indices, "indices")
        except ValueError:  # lists of different lengths
            found = None
        if found is None:
            rows = [_indices(row, "indices", most, -1) for row in _rows(indices, self.batch_shape)]
            if any(row.ndim != 1 for row in rows):
                raise ValueError("indices must have one list of integers for each sequence, got deeper ones")
            padded = np.full((len(rows), max(row.size for row in rows)), -1, np.int64)
            for whole, row in zip(padded, rows, strict=True):
                whole[: row.size] = row
            return padded.reshape(*self.batch_shape, -1)
        positions = _indices(found, "indices", most, -1)
        try:
            np.broadcast_to(positions[..., 0] if positions.shape[-1] else positions.sum(-1), self.batch_shape)
        except ValueError:
            raise ValueError(
                f"indices has shape {positions.shape}, which does not broadcast to batch_shape {self.batch_shape} and "
                f"any number of positions"
            ) from None
        return positions

    def reorder(self, entries: ArrayLike) -> None:
        """Let entry i of the batch be the entry that was at ``entries[i]``.

        Beam search continues the best beams, some of them more than once, and drops the others.

        Parameters
        ----------
        entries : array_like of int, shape ``(n,)``
            Indices of the first axis of the batch, which has size n afterwards. They may repeat, and other entries are
            dropped.

        Raises
        ------
        TypeError
            entries does not hold integers.
        ValueError
            There is no such entry, the shape is wrong, or batch_shape is (). The cache is unchanged then.

        Notes
        -----
        If n is the size that the axis has, the numbers move within the memory of the cache, and entries that stay are
        not touched. Otherwise the cache gets new memory.

        Examples
        --------
        >>> import numpy as np
        >>> import cattn
        >>> cache = cattn.KVCache(3, num_kv_heads=1, max_len=4, head_dim=1)
        >>> tokens = np.arange(3.0, dtype=np.float32).reshape(3, 1, 1, 1)
        >>> cache.append(tokens, tokens)
        >>> cache.reorder([2, 2, 0])
        >>> cache.k.ravel().tolist()
        [2.0, 2.0, 0.0]
        >>> cache.reorder([1])
        >>> cache
        KVCache((1,), num_kv_heads=1, max_len=4, head_dim=1, dtype=float32, lengths=1)
        """
        if not self.batch_shape:
            raise ValueError("entries needs an axis of the batch, but batch_shape is ()")
        size, *others = self.batch_shape
        chosen = _indices(entries, "entries", size - 1)
        if chosen.ndim != 1:
            raise ValueError(f"entries must have one dimension, got shape {chosen.shape}")
        filled = [store[..., : self._longest, :] for store in self._stores()]
        if chosen.size == size:
            starts = range(0, size, _PIECE)
            pieces = ((start, chosen[start : start + _PIECE]) for start in starts)
            moving = [start + np.flatnonzero(piece != np.arange(start, start + piece.size)) for start, piece in pieces]
            places = np.concatenate(moving) if moving else chosen
            moved = [_gather(part, _gather(chosen, places)) for part in filled]  # all are read before one is written
            with self._emptied_by_signals():
                for part, new in zip(filled, moved, strict=True):
                    _scatter(part, places, new)
        else:
            new_shape = (chosen.size, *others)
            other = KVCache(new_shape, self.num_kv_heads, self.max_len, self.head_dim, self.v_head_dim, self.dtype)
            for store, part in zip(other._stores(), filled, strict=True):
                _gather(part, chosen, store[..., : self._longest, :])
            self._k, self._v, self._k_scale, self._v_scale = other._k, other._v, other._k_scale, other._v_scale
            self.batch_shape = new_shape
        lengths = _gather(self._lengths, chosen)
        self._set_lengths(lengths, int(lengths.max()) if lengths.size else self._longest)

    @contextmanager
    def _emptied_by_signals(self) -> Iterator[None]:
        """Forget all tokens if an exception comes while tokens move: some of them would be in the wrong place."""
        try:
            yield
        except BaseException:
            self.reset()
            raise

    @with_hints
    def fork(self) -> KVCache:
        """Return an independent copy with the same tokens and the same room for more.

        Several continuations of one prompt start from forks, and a draft model may run ahead in one. Only the tokens so
        far are copied.

        Returns
        -------
        KVCache
            The copy, as of ``copy.copy``.

        Examples
        --------
        >>> import numpy as np
        >>> import cattn
        >>> cache = cattn.KVCache((), num_kv_heads=1, max_len=8, head_dim=2)
        >>> cache.append(np.ones((1, 3, 2), np.float32), np.ones((1, 3, 2), np.float32))
        >>> draft = cache.fork()
        >>> draft.append(np.zeros((1, 2, 2), np.float32), np.zeros((1, 2, 2), np.float32))
        >>> int(cache.lengths), int(draft.lengths)
        (3, 5)
        """
        return copy.copy(self)

    def reset(self) -> None:
        """Forget all tokens. The memory stays allocated."""
        self._set_lengths(np.zeros(self.batch_shape, np.int64), 0)

    def _show_lengths(self) -> str:
        return str(self._lengths.tolist() if self._ragged else self._longest)

    def __repr__(self) -> str:
        v_head_dim = "" if self.v_head_dim == self.head_dim else f", v_head_dim={self.v_head_dim}"
        return (
            f"KVCache({self.batch_shape}, num_kv_heads={self.num_kv_heads}, max_len={self.max_len}, "
            f"head_dim={self.head_dim}{v_head_dim}, dtype={self.dtype}, lengths={self._show_lengths()})"
        )

    def _repr_html_(self) -> str:
        rows = {
            "lengths": f"{self._show_lengths()} of max_len={self.max_len}",
            "batch_shape": self.batch_shape,
            "num_kv_heads": self.num_kv_heads,
            "head_dim": self.head_dim if self.v_head_dim == self.head_dim else (self.head_dim, self.v_head_dim),
            "dtype": self.dtype,
            "nbytes": f"{self.nbytes:,}",
        }
        return html_table("KVCache", rows.items())

    def __getstate__(self) -> dict[str, Any]:
        public = {name: value for name, value in vars(self).items() if not name.startswith("_")}
        names = ("k", "v", "k_scale", "v_scale") if self._quantizes else ("k", "v")
        filled = (store[..., : self._longest, :] for store in self._stores())
        return public | dict(zip(names, filled, strict=True)) | {"lengths": self._lengths}

    def __setstate__(self, state: dict[str, Any]) -> None:
        filled = ("k", "v", "k_scale", "v_scale")
        vars(self).update((name, value) for name, value in state.items() if name not in (*filled, "lengths"))
        self._allocate()
        parts, lengths = [state[name] for name in filled if name in state], state["lengths"]
        k = parts[0]
        rows, longest = (*self.batch_shape, self.num_kv_heads), k.shape[-2] if k.ndim > 1 else -1
        wanted = [((*rows, longest, store.shape[-1]), store.dtype) for store in self._stores()]
        if (
            [(part.shape, part.dtype) for part in parts] != wanted
            or not all(((scale >= LEAST_SCALE) & (scale <= LARGEST_SCALE)).all() for scale in parts[2:])
            or lengths.shape != self.batch_shape
            or longest > self.max_len
            or lengths.dtype.kind not in "iu"
            or np.any((lengths < 0) | (lengths > longest))
        ):
            raise ValueError(
                f"the pickle of a KVCache is damaged: keys {k.shape}, values {parts[1].shape}, lengths {lengths}"
            )
        self._set_lengths(lengths.copy(), longest)
        for store, part in zip(self._stores(), parts, strict=True):
            store[..., :longest, :] = part
