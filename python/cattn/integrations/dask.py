"""Attention on dask arrays that are chunked along batch, heads, queries and keys (extra "dask").

One task attends from a chunk of queries to a chunk of keys and returns the output and its log-sum-exp. A tree of
`cattn.merge_attention` combines the tasks of a row of chunks, in the order of the keys. Tasks are pure functions of
their chunks, so that a scheduler may run them anywhere, in any order, and again.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias, TypedDict, Unpack, overload

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

import cattn
from cattn import _cattn
from cattn._input.arrays import as_bias, as_integers, as_mask, cast, is_quantized, read_array
from cattn._input.checks import as_size
from cattn._input.doors import DOORS
from cattn._input.names import no_name, public_names, with_hints
from cattn._input.objects import (
    BlockMask,
    Quantized,
    as_scale,
    check_scale_fits,
    scale_error,
    split_blocks,
    split_scale,
)
from cattn._input.types import RNG, Alignment, AttentionOutput, ComputeDType, LinearAttentionOutput, Window
from cattn.functional._options import documented, spelled_out
from cattn.random import draw_seed

try:
    import dask.array
    from dask.base import tokenize
    from dask.highlevelgraph import HighLevelGraph
except ImportError as error:
    raise ImportError("cattn.integrations.dask needs dask: pip install 'cattn[dask]'") from error

__all__ = ["attention", "linear_attention"]
__dir__ = public_names(globals())
__getattr__ = no_name(globals())

da: Any = dask.array  # its functions have no types

Part: TypeAlias = tuple[NDArray[Any], NDArray[Any]]  # the output over some keys, and its float64 lse

# Operands that are cut by their letters besides query, key, value and the scales.
_MASKS_AND_HEADS = [name for name, axes, *_ in _cattn._operands() if axes in ("NTS", "N")]
# Numbers that mean the same in a call on chunks.
_OF_EVERY_CHUNK = [name for name, kind in _cattn._numbers() if kind in ("REAL", "BOUND", "CHOICE", "PRODUCTS")]
_MERGED_AT_ONCE = 4  # parts that one task merges: few, so that a worker holds few of them at a time
_UNBOUNDED = 2**61  # no sum of positions overflows


# ---- tasks: pure functions of NumPy arrays ---------------------------------------------------------------------------
def _attend(
    *chunks: NDArray[Any], names: Sequence[str], rows: tuple[int, ...], num_threads: int, **options: Any
) -> Part:
    """Attend from one chunk of queries to one chunk of keys. The arguments have the names of the operands."""
    given = dict(zip(names, chunks, strict=True))
    query, key, value = (given.pop(name) for name in ("query", "key", "value"))
    key_scale, value_scale = given.pop("key_scale", None), given.pop("value_scale", None)
    attn_mask = given.get("attn_mask")
    if query.itemsize == key.itemsize == value.itemsize == 2:  # so that halves are rounded once, after the last merge
        query, key, value = cast(query, "query", "f"), cast(key, "key", "f"), cast(value, "value", "f")
    if attn_mask is not None and attn_mask.dtype.kind != "b":
        # Not as attn_mask: a chunk of an additive mask may hold only 0 and 1, of which cattn warns.
        dtype = "d" if max(query.itemsize, key.itemsize, value.itemsize) == 8 else "f"
        given["bias"] = _add_masks(given.pop("attn_mask"), given.get("bias"), dtype)
    lse = np.empty(rows, np.float64)
    attend: Any = cattn.scaled_dot_product_attention  # its overloads do not see through **given
    with cattn.num_threads(num_threads):
        result = attend(
            query, key if key_scale is None else Quantized._of_argument(key, key_scale, "key"),
            value if value_scale is None else Quantized._of_argument(value, value_scale, "value"),
            return_lse=True, out=AttentionOutput(lse=lse), **given, **options,
        )  # fmt: skip
    return result.out, lse


def _add_masks(attn_mask: NDArray[Any], bias: NDArray[Any] | None, dtype: str) -> NDArray[Any]:
    """Add two additive masks as the kernels do: in the dtype of the computation, and -inf in either hides the key."""
    first = as_mask(attn_mask, "attn_mask", dtype)
    if bias is None:
        return first
    second = as_bias(bias, "bias", dtype)
    with np.errstate(all="ignore"):
        total = first + second
    return np.where(np.isneginf(first) | np.isneginf(second), total.dtype.type(-np.inf), total)


def _attend_to_nothing(
    *sinks: NDArray[Any], rows: tuple[int, ...], d_v: int, dtype: Any, num_threads: int, enable_gqa: bool | None
) -> Part:
    """Return the result of queries that see no key at all, which depends on no chunk but the sinks'."""
    query, key, value = (np.empty((*rows[:-1], *shape), dtype) for shape in ((rows[-1], 1), (0, 1), (0, d_v)))
    query.fill(0)
    names = ("query", "key", "value", "sinks")[: 3 + len(sinks)]
    return _attend(query, key, value, *sinks, names=names, rows=rows, num_threads=num_threads, enable_gqa=enable_gqa)


def _merge(parts: list[Part]) -> Part:
    """Merge parts in the order of the keys; the result is float64, because each lse is."""
    return cattn.merge_attention([out for out, _ in parts], [lse for _, lse in parts])


def _finish(part: Part, field: int, dtype: Any) -> NDArray[Any]:
    """Return the output (field 0) or the lse (field 1) of all keys, rounded once."""
    array = part[field]
    return array if array.dtype == dtype else cast(array, ("out", "lse")[field], dtype)


# ---- which pairs of chunks are visible -------------------------------------------------------------------------------
class _Ranges(NamedTuple):
    """Which keys a query sees by position. Arrays have the shape of the batch."""

    causal: bool
    left: int
    right: int
    positional: bool  # whether the position of a query has any effect
    offset: NDArray[np.int64]
    queries: NDArray[np.int64] | None
    keys: NDArray[np.int64] | None
    starts: NDArray[np.int64] | None

    def sees(self, batch: tuple[slice, ...], rows: Interval, keys: Interval) -> bool:
        """Return whether any of these queries sees any of these keys: their windows are a range without a gap."""
        offset = self.offset[batch]
        last = rows[1] if self.queries is None else np.minimum(rows[1], self.queries[batch])
        end = keys[1] if self.keys is None else np.minimum(keys[1], self.keys[batch])
        low = np.maximum(keys[0], rows[0] + offset - self.left)
        if self.starts is not None:
            low = np.maximum(low, self.starts[batch])
        high = np.minimum(end, last + offset + self.right)  # the last query is at last - 1
        return bool(np.any((last > rows[0]) & (low < high)))

    def options(self, batch: tuple[slice, ...], rows: Interval, keys: Interval) -> dict[str, Any]:
        """Return the arguments that mean the same in a call on these chunks alone."""
        found: dict[str, Any] = {}
        if self.positional:
            found = {
                "is_causal": "upper_left" if self.causal else False,
                "query_offset": self.offset[batch] + (rows[0] - keys[0]),
                "window_size": tuple(-1 if side == _UNBOUNDED else side for side in (self.left, self.right)),
            }
        if self.queries is not None:
            found["query_seq_lengths"] = np.clip(self.queries[batch] - rows[0], 0, rows[1] - rows[0])
        if self.keys is not None:
            found["key_value_seq_lengths"] = np.clip(self.keys[batch] - keys[0], 0, keys[1] - keys[0])
        if self.starts is not None:
            found["key_value_seq_starts"] = np.clip(self.starts[batch] - keys[0], 0, keys[1] - keys[0])
        return found


def _read_ranges(batch: tuple[int, ...], T_q: int, T_k: int, given: dict[str, Any]) -> _Ranges:
    """Read arguments that `cattn.explain` has checked."""

    def read(name: str, most: int) -> NDArray[np.int64] | None:
        numbers = given[name]
        return None if numbers is None else np.broadcast_to(as_integers(numbers, name, -most, most), batch)

    is_causal, window_size = given["is_causal"], given["window_size"]
    causal = bool(is_causal)
    left, right = (_UNBOUNDED if side in (None, -1) else min(int(side), _UNBOUNDED) for side in window_size or (-1, -1))
    queries, keys = read("query_seq_lengths", T_q), read("key_value_seq_lengths", T_k)
    starts = read("key_value_seq_starts", T_k)
    offset = read("query_offset", _UNBOUNDED)
    offset = np.zeros(batch, np.int64) if offset is None else offset
    if isinstance(is_causal, str) and is_causal == "lower_right":
        offset = np.broadcast_to((T_k if keys is None else keys) - (T_q if queries is None else queries), batch)
    positional = causal or given["alibi_slopes"] is not None or min(left, right) < _UNBOUNDED
    return _Ranges(causal, left, 0 if causal else right, positional, offset, queries, keys, starts)


# ---- arguments -------------------------------------------------------------------------------------------------------
def _as_dask(obj: Any, name: str) -> Any:
    """Return a dask array of known chunks, none of them empty on an axis that is not.

    dask 2026.8 cannot rechunk the result of `where` if its input has an empty chunk beside others.
    """
    if not isinstance(obj, da.Array):
        return da.from_array(read_array(obj, name), chunks=-1)
    if np.isnan(obj.shape).any():
        raise ValueError(f"{name} has chunks of unknown sizes: call {name}.compute_chunk_sizes() first")
    return obj.rechunk(tuple(tuple(n for n in sizes if n > 0) or (0,) for sizes in obj.chunks))


def _read_stored(obj: Any, name: str) -> tuple[Any, Any]:
    """Return a key or value and its scale, or None, as dask arrays."""
    values, given = split_scale(obj, name)
    array = _as_dask(values, name)
    if given is None:
        return array, None
    scale = _as_dask(given, f"{name}.scale")
    if not is_quantized(array.dtype):
        raise scale_error(name, array.dtype)
    as_scale(np.ones((), scale.dtype), f"{name}.scale")
    check_scale_fits(array, scale, f"{name}.scale", name)
    return array, scale


def _with_dims(array: Any, ndim: int) -> Any:
    """Return the array with leading axes of size 1."""
    return array[(None,) * (ndim - array.ndim)] if array.ndim < ndim else array


def _stand_in(obj: Any) -> Any:
    """Return an array of the same shape and dtype that occupies no memory, or NumPy's own arrays as they are."""
    return np.broadcast_to(np.zeros((), obj.dtype), obj.shape) if isinstance(obj, da.Array) else obj


def _chunk_seed(seed: int, starts: Sequence[int]) -> int:
    """Return the seed of the chunk that starts at these positions of the whole array.

    The core counts positions from the start of a call. Chunks with one seed would all drop the same pairs. The first
    chunk keeps the seed, so that an array of one chunk gives the bits of a call on NumPy arrays.
    """
    if not any(starts):
        return seed
    return int(np.random.SeedSequence(seed, spawn_key=tuple(starts)).generate_state(1, np.uint64)[0])


class _Options(TypedDict, total=False):
    """The keyword-only options besides what is returned, with those that are refused."""

    scale: float | None
    enable_gqa: bool | None
    layout: Literal["bhtd"]
    bias: Any
    query_offset: ArrayLike | None
    query_seq_lengths: ArrayLike | None
    key_value_seq_lengths: ArrayLike | None
    key_value_seq_starts: ArrayLike | None
    window_size: Window
    softcap: float | None
    alibi_slopes: Any
    sinks: Any
    block_mask: BlockMask | tuple[Any, int] | None
    key_indices: None
    gate: None
    compute_dtype: ComputeDType
    rng: RNG
    out: None
    num_threads: int


class _WithLse(_Options, total=False):
    return_weights: Literal[False]
    return_dropout_mask: Literal[False]


class _Plain(_WithLse, total=False):
    return_lse: Literal[False]


class _Extras(_Options, total=False):
    return_weights: bool
    return_lse: bool
    return_dropout_mask: bool


@overload
def attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = ...,
    dropout_p: float = ...,
    is_causal: Alignment = ...,
    **options: Unpack[_Plain],
) -> dask.array.Array: ...
@overload
def attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = ...,
    dropout_p: float = ...,
    is_causal: Alignment = ...,
    *,
    return_lse: Literal[True],
    **options: Unpack[_WithLse],
) -> AttentionOutput: ...
@with_hints
@documented
@spelled_out(num_threads=1)
def attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: Alignment = False,
    **options: Unpack[_Extras],
) -> Any:
    """Compute `cattn.scaled_dot_product_attention` of dask arrays, lazily, in one task for each visible pair of chunks.

    Parameters
    ----------
    query : dask.array.Array, shape (..., T_q, head_dim)
        Chunks along the batch, the heads and the tokens remain chunks of the result, or are split where the chunks of
        key and value do not fit them. The last axis is made one chunk. NumPy arrays count as one chunk, here and below.
    key : dask.array.Array, shape (..., T_k, head_dim)
        The chunks along its tokens are the chunks of keys; value and masks are rechunked to them.
    value : dask.array.Array, shape (..., T_k, d_v)
        Values.
    attn_mask : dask.array.Array or array_like, optional
        Boolean (True where the key is visible) or float (added). Broadcasts to (..., T_q, T_k).

    Returns
    -------
    dask.array.Array, shape (..., T_q, d_v), or cattn.AttentionOutput
        The output; with return_lse, a `cattn.AttentionOutput` of dask arrays.

    Other Parameters
    ----------------
    enable_gqa : bool, optional
        None infers grouped heads, False forbids them, True also makes axis -3 of three-dimensional arrays the heads.
    layout : {"bhtd"}
        "bthd" is not available: the arrays are (B, H, T, head_dim), so pass ``x.swapaxes(1, 2)`` of others.
    bias : dask.array.Array or array_like of float, optional
        Added to the scaled scores. Broadcasts to (..., T_q, T_k).
    query_offset, query_seq_lengths, key_value_seq_lengths : int or array_like of int, optional
        Position of the first query, and numbers of valid queries and keys. They decide which tasks exist, so that they
        cannot be dask arrays.
    key_value_seq_starts : int or array_like of int, optional
        Index of the first valid key: padding on the left. No dask array either.
    alibi_slopes, sinks : dask.array.Array or array_like of float, shape (H,) or (..., H), optional
        One number for each query head: the slope of ALiBi, and one extra logit. A sink counts once for a row of chunks.
    block_mask : BlockMask or (dask.array.Array of bool, int), optional
        Which blocks of queries and keys are visible. Each chunk makes a mask of single pairs of it.
    key_indices : None
        Not available: the keys of a list lie in any chunk.
    compute_dtype : {None, "bfloat16", "bfloat16_tiles"}
        Whether the products are of numbers that are rounded to bfloat16.
    rng : None, int, numpy.random.Generator or what numpy.random.default_rng takes
        The source of dropout's random bits. One seed is drawn now, not when the tasks run.
    return_weights : bool
        Not available: no task holds a whole row of weights.
    return_lse : bool
        Also return the logarithm of each row's sum of exponentials, shape (..., T_q).
    return_dropout_mask : bool
        Not available, as return_weights.
    out : None
        Not available: the result is computed later.
    num_threads : int
        Number of cattn's threads in each task. The default leaves parallelism to dask's workers.

    Raises
    ------
    TypeError, ValueError
        As for `cattn.scaled_dot_product_attention`, at once; also for a length or offset that is a dask array, for a
        `cattn.TorchGenerator` with dropout, and for chunks of unknown sizes. Numbers inside of dask arrays are checked
        when the tasks run.
    NotImplementedError
        An argument that is not available was given.

    Warns
    -----
    CausalAlignmentWarning, UserWarning
        As for `cattn.scaled_dot_product_attention`.

    Notes
    -----
    The result has the same bits for any scheduler, number of workers and threads, but it depends on the chunks. A row
    has the bits of `cattn.scaled_dot_product_attention` on the whole arrays if all keys that it may see by causality,
    window, length and start are in one chunk, whose first key is a multiple of 1536, and if no other chunk of keys is
    visible to its chunk of queries when there are sinks. Other rows equal it to rounding: parts are merged in float64,
    and the result is rounded once.

    The dropout mask of a chunk of queries and keys depends on the seed and on the place where the chunk starts in the
    whole arrays. The mask of another chunking, and of `cattn.scaled_dot_product_attention`, is another one, unless
    there is only one chunk.

    Pairs of chunks that causality, windows, lengths and starts hide get no task. Masks are not looked into.

    Examples
    --------
    >>> import dask.array
    >>> import numpy as np
    >>> import cattn
    >>> from cattn.integrations.dask import attention
    >>> x = np.random.default_rng(0).standard_normal((2, 6, 4))
    >>> chunked = dask.array.from_array(x, chunks=(1, 3, 4))
    >>> context = attention(chunked, chunked, chunked, is_causal=True)
    >>> context
    dask.array<cattn-attention, shape=(2, 6, 4), dtype=float64, chunksize=(1, 3, 4), chunktype=numpy.ndarray>
    >>> np.allclose(context.compute(), cattn.scaled_dot_product_attention(x, x, x, is_causal=True))
    True
    """
    given: dict[str, Any] = {"query": query, "key": key, "value": value, "attn_mask": attn_mask}
    given |= {"dropout_p": dropout_p, "is_causal": is_causal, **options}
    num_threads, return_lse = given.pop("num_threads"), given.pop("return_lse")
    given["layout"] = given["layout"] != "bhtd"
    for name, reason in DOORS["dask"].refused.items():
        if (unavailable := given.pop(name)) is not None and unavailable is not False:
            raise NotImplementedError(f"{name} is not available for dask arrays: {reason}")
    for name, axes, *_ in _cattn._operands():
        if axes == "" and isinstance(given[name], da.Array):
            raise TypeError(f"{name} must be an int or a NumPy array, because it decides which tasks exist: "
                            f"pass {name}.compute()")  # fmt: skip
    threads = as_size(num_threads, "num_threads", maximum=2**31 - 1)
    arrays: dict[str, Any] = {"query": _as_dask(query, "query")}
    for name, stored in (("key", key), ("value", value)):
        arrays[name], arrays[f"{name}_scale"] = _read_stored(stored, name)
    blocks, size = split_blocks(given["block_mask"])
    blocks = blocks if blocks is None else _as_dask(blocks, "block_mask")
    for name in _MASKS_AND_HEADS:
        arrays[name] = None if given[name] is None else _as_dask(given[name], name)

    # cattn checks the arguments, and says what the whole call would return
    stands = {name: _stand_in(x) for name, x in (given | {"query": arrays["query"]}).items()}
    for name in ("key", "value"):
        stands[name] = _stand_in(arrays[name])
        if arrays[f"{name}_scale"] is not None:
            stands[name] = Quantized._of_checked(stands[name], np.ones((), np.float32))
    stands["block_mask"] = blocks if blocks is None else BlockMask._of_argument(_stand_in(blocks), size)
    explain: Any = cattn.explain  # its overloads do not see through **stands
    plan = explain(**stands, return_lse=True)
    (shape, dtype), (_, lse_dtype) = plan.outputs["out"], plan.outputs["lse"]
    dtypes = dtype, lse_dtype
    if blocks is not None:
        arrays["attn_mask"] = add_blocks(
            arrays["attn_mask"], blocks, operator.index(size), arrays["query"], arrays["key"]
        )
    rng, enable_gqa = given["rng"], given["enable_gqa"]
    if float(dropout_p) > 0 and isinstance(rng, cattn.TorchGenerator):
        raise TypeError("rng is a TorchGenerator, whose numbers depend on all that it drew before: chunks need an int, "
                        "or what numpy.random.default_rng takes")  # fmt: skip
    problem = _Problem(arrays, shape, enable_gqa is not None and bool(enable_gqa), threads, dtypes)
    ranges = _read_ranges(problem.batch, shape[-2], arrays["key"].shape[-2], given)
    scores = {name: given[name] for name in _OF_EVERY_CHUNK}
    seed = draw_seed(rng) if float(dropout_p) > 0 else None
    if seed is not None:
        scores["dropout_p"] = float(dropout_p)
    results = problem.build(ranges, scores, seed)
    if return_lse:
        return AttentionOutput(out=results[0], lse=results[1], dropout_seed=seed)
    return results[0]


class _Problem:
    """The operands of a call in common chunks, and the graph over them."""

    def __init__(
        self, arrays: dict[str, Any], shape: tuple[int, ...], forced_heads: bool, num_threads: int,
        dtypes: tuple[Any, Any],
    ) -> None:  # fmt: skip
        lead = shape[:-2]
        has_heads = len(shape) > 3 or (forced_heads and len(shape) == 3)
        self.shape, self.batch = shape, lead[:-1] if has_heads else lead
        self.num_threads, self.has_heads = num_threads, has_heads
        self.dtypes = dtypes
        self.compute_dtype: DTypeLike = np.float64 if dtypes[0] == np.float64 else np.float32
        inputs = [_with_dims(arrays[name], len(shape)) for name in ("query", "key", "value")]
        query, key, value = (x.rechunk({x.ndim - 1: -1}) for x in inputs)
        self.lead = [
            (head_intervals if has_heads and axis == len(lead) - 1 else batch_intervals)(n, (query, key, value), axis)
            for axis, n in enumerate(lead)
        ]
        self.rows, self.keys = intervals_of(query.chunks[-2]), intervals_of(key.chunks[-2])
        self.axes = {"T": self.rows, "S": self.keys, "H": intervals_of(query.shape[-1:])}
        self.axes["D"] = intervals_of(value.shape[-1:])
        arrays = {**arrays, "query": query, "key": key, "value": value}
        self.letters = {name: axes for name, axes, *_ in _cattn._operands() if arrays.get(name) is not None}
        self.operands = {name: self._cut(arrays[name], letters) for name, letters in self.letters.items()}

    def _cut(self, array: Any, letters: str) -> Operand:
        """Cut an operand at the intervals of its axes. One number for each head has an axis of heads in any case."""
        without_heads = [[(0, 1)]] * (letters == "N" and not self.has_heads)
        intervals = [*self.lead, *without_heads, *(self.axes[letter] for letter in letters[1:])]
        return Operand(_with_dims(array, len(intervals)), intervals)

    def _at(self, name: str, lead: Sequence[int], i: int, j: int) -> tuple[Any, ...]:
        """Return the key of an operand's block for these chunks of batch and heads, of queries, and of keys."""
        letters = self.letters[name]
        without_heads = [0] * (letters == "N" and not self.has_heads)
        own = {"T": i, "S": j}
        return self.operands[name].at([*lead, *without_heads, *(own.get(letter, 0) for letter in letters[1:])])

    def build(self, ranges: _Ranges, scores: dict[str, Any], seed: int | None) -> list[Any]:
        """Return the output and the lse as dask arrays over one graph."""
        chunks = [tuple(b - a for a, b in axis) or (0,) for axis in [*self.lead, self.rows]]
        sizes = [(*chunks, self.shape[-1:]), tuple(chunks)]
        if 0 in self.shape[:-1]:  # no task: nothing is computed
            kinds = zip(sizes, self.dtypes, strict=True)
            return [da.empty(tuple(map(sum, size)), dtype=dtype, chunks=size) for size, dtype in kinds]
        names = [(name, operand.array.name) for name, operand in self.operands.items()]
        token = tokenize(names, self.shape, *ranges, scores, seed, self.num_threads)
        graph: dict[Any, Any] = {}
        layers: list[dict[Any, Any]] = [{}, {}]
        for at in itertools.product(*map(range, map(len, [*self.lead, self.rows]))):
            part = self._add_row(graph, token, at, ranges, scores, seed)
            for field, layer in enumerate(layers):
                index = (*at, 0) if field == 0 else at
                layer[index] = (functools.partial(_finish, field=field, dtype=self.dtypes[field]), part)
        results = [f"cattn-{name}-{token}" for name in ("attention", "lse")]
        fields = list(zip(results, layers, sizes, self.dtypes, strict=True))
        return _over_one_graph(f"cattn-parts-{token}", graph, self.operands, fields)

    def _add_row(
        self, graph: dict[Any, Any], token: str, at: tuple[int, ...], ranges: _Ranges, scores: dict[str, Any],
        seed: int | None,
    ) -> tuple[Any, ...]:  # fmt: skip
        """Add the tasks of one chunk of queries to the graph, and return the key of their result."""
        *lead, i = at
        where = [axis[n] for axis, n in zip(self.lead, lead, strict=True)]
        batch = tuple(slice(*interval) for interval in where[: len(self.batch)])
        rows = (*(b - a for a, b in where), self.rows[i][1] - self.rows[i][0])
        options: dict[str, Any] = {"rows": rows, "num_threads": self.num_threads}
        visible = [j for j, keys in enumerate(self.keys) if ranges.sees(batch, self.rows[i], keys)]
        if not visible:
            name = (f"cattn-hidden-{token}", *at)
            task = functools.partial(
                _attend_to_nothing, d_v=self.shape[-1], dtype=self.compute_dtype, enable_gqa=scores["enable_gqa"],
                **options,
            )  # fmt: skip
            graph[name] = (task, *(self._at("sinks", lead, i, 0) for _ in self.letters.keys() & {"sinks"}))
            return name
        parts: list[tuple[Any, ...]] = []
        for j in visible:
            options |= ranges.options(batch, self.rows[i], self.keys[j])
            if seed is not None:
                starts = [a for a, _ in (*where, self.rows[i], self.keys[j])]
                options["rng"] = _chunk_seed(seed, starts)
            names = [name for name in self.letters if name != "sinks" or j == visible[0]]  # a sink counts once
            parts.append((f"cattn-pair-{token}", *at, j))
            task = functools.partial(_attend, names=names, **scores, **options)
            graph[parts[-1]] = (task, *(self._at(name, lead, i, j) for name in names))
        return _add_tree(graph, f"cattn-merge-{token}", at, parts)


def _over_one_graph(parts: str, graph: dict[Any, Any], operands: dict[str, Operand], fields: list[Any]) -> list[Any]:
    """Return dask arrays of the parts of a graph: a field has a name, the task of each block, chunks and a dtype."""
    shared = HighLevelGraph.from_collections(parts, graph, dependencies=[x.array for x in operands.values()])
    arrays = []
    for name, tasks, chunks, dtype in fields:
        layer = {(name, *index): task for index, task in tasks.items()}
        whole = HighLevelGraph({**shared.layers, name: layer}, {**shared.dependencies, name: {parts}})
        arrays.append(da.Array(whole, name, chunks, dtype=dtype))
    return arrays


def _add_tree(graph: dict[Any, Any], name: str, at: tuple[int, ...], parts: list[tuple[Any, ...]]) -> tuple[Any, ...]:
    """Add tasks that merge neighbouring parts until one is left, and return its key."""
    level = 0
    while len(parts) > 1:
        groups = [parts[n : n + _MERGED_AT_ONCE] for n in range(0, len(parts), _MERGED_AT_ONCE)]
        parts = []
        for n, group in enumerate(groups):
            if len(group) == 1:
                parts += group
                continue
            parts.append((name, *at, level, n))
            graph[parts[-1]] = (_merge, group)
        level += 1
    return parts[0]


Interval: TypeAlias = tuple[int, int]


def intervals_of(sizes: Iterable[int]) -> list[Interval]:
    """Return the intervals of consecutive chunks, without the empty ones."""
    return [(a, b) for a, b in itertools.pairwise(itertools.accumulate(sizes, initial=0)) if a < b]


def _split_at(bounds: Iterable[int]) -> list[Interval]:
    return list(itertools.pairwise(sorted({0, *bounds})))


class Operand:
    """A dask array, chunked so that each interval of the whole problem needs exactly one of its blocks."""

    def __init__(self, array: Any, intervals: Sequence[list[Interval]]) -> None:
        self.blocks: list[list[int]] = []  # on each axis, the block of each interval
        chunks = []
        for n, own_size in zip(intervals, array.shape, strict=True):
            whole = n[-1][1] if n else 0
            shared = max(1, whole // max(1, own_size))  # positions that share one of this array: all, or a group's
            own = [(a // shared, (b - 1) // shared + 1) for a, b in n]
            distinct = list(dict.fromkeys(own))
            self.blocks.append([distinct.index(interval) for interval in own] or [0])
            chunks.append(tuple(b - a for a, b in distinct) or (own_size,))
        self.array = array.rechunk(tuple(chunks))

    def at(self, index: Iterable[int]) -> tuple[Any, ...]:
        """Return the key of the block for these intervals."""
        return (self.array.name, *(blocks[i] for blocks, i in zip(self.blocks, index, strict=True)))


def head_intervals(n: int, arrays: Sequence[Any], axis: int) -> list[Interval]:
    """Return common chunks of the heads, in which each array has whole groups, or all heads are in one group."""
    groups = {n // array.shape[axis] for array in arrays if 1 < array.shape[axis] < n}
    bounds = {
        n // array.shape[axis] * end
        for array in arrays
        if array.shape[axis] > 1
        for end in itertools.accumulate(array.chunks[axis])
    } | {n}
    for group in groups:
        for a, b in _split_at(bounds):
            first, last = -(-a // group) * group, b // group * group
            if a // group != (b - 1) // group:
                bounds |= {first, last}
    return _split_at(bounds)


def batch_intervals(n: int, arrays: Sequence[Any], axis: int) -> list[Interval]:
    """Return common chunks of a batch dimension."""
    ends = (itertools.accumulate(array.chunks[axis]) for array in arrays if array.shape[axis] == n)
    return _split_at({n}.union(*ends))


def _repeat(blocks: NDArray[np.bool_], first: int, n: int, size: int, axis: int) -> NDArray[np.bool_]:
    """Return n elements along the axis, from ``first`` on, of the blocks repeated ``size`` times."""
    return blocks.take(np.arange(first, first + n) // size, axis)


def _repeat_blocks(blocks: Any, size: int, axis: int, intervals: list[Interval]) -> Any:
    """Return the blocks repeated ``size`` times along the axis, with a chunk for each interval."""
    parts = []
    for start, end in intervals:
        index: list[Any] = [slice(None)] * blocks.ndim
        index[axis] = slice(start // size, (end - 1) // size + 1)
        part = blocks[tuple(index)].rechunk({axis: -1})
        chunks = list(part.chunks)
        chunks[axis] = (end - start,)
        parts.append(part.map_blocks(_repeat, start % size, end - start, size, axis, chunks=chunks, dtype=bool))
    return da.concatenate(parts, axis=axis)


def add_blocks(attn_mask: Any, block_mask: Any, size: int, query: Any, key: Any) -> Any:
    """Return attn_mask without the pairs that the block mask hides."""
    blocks = block_mask[(None,) * (2 - block_mask.ndim)] if block_mask.ndim < 2 else block_mask
    for axis, chunks in ((-2, query.chunks[-2]), (-1, key.chunks[-2])):
        if blocks.shape[axis] > 1:
            blocks = _repeat_blocks(blocks, size, axis, intervals_of(chunks))
    if attn_mask is None:
        return blocks
    return attn_mask & blocks if attn_mask.dtype == bool else da.where(blocks, attn_mask, attn_mask.dtype.type(-np.inf))


# ---- linear attention ------------------------------------------------------------------------------------------------
@with_hints
@functools.partial(documented, like=cattn.linear_attention)
def linear_attention(
    query: Any,
    key: Any,
    value: Any,
    *,
    decay: Any = None,
    beta: Any = None,
    state: Any = None,
    scale: float | None = None,
    seq_lengths: ArrayLike | None = None,
    return_state: bool = False,
    num_threads: int = 1,
) -> Any:
    """Build linear attention of dask arrays that are chunked along batch and heads: `cattn.linear_attention`.

    Parameters
    ----------
    query, key, value : dask.array.Array or array_like
        As for `cattn.linear_attention`. All tokens must be in one chunk, because a state needs them in order.
    decay, beta, state : dask.array.Array or array_like, optional
        As for `cattn.linear_attention`.
    seq_lengths : int or array_like of int, optional
        The number of valid tokens of each batch entry; no dask array.
    num_threads : int
        Number of cattn's threads in each task.

    Returns
    -------
    dask.array.Array or LinearAttentionOutput
        The bits of one call of the whole arrays.

    Raises
    ------
    TypeError, ValueError
        As for `cattn.linear_attention`, at once; also for several chunks of tokens.

    Examples
    --------
    >>> import dask.array
    >>> import numpy as np
    >>> import cattn
    >>> from cattn.integrations.dask import linear_attention
    >>> x = np.random.default_rng(0).standard_normal((4, 2, 6, 3))
    >>> chunked = dask.array.from_array(x, chunks=(2, 1, 6, 3))
    >>> bool((linear_attention(chunked, chunked, chunked) == cattn.linear_attention(x, x, x)).all().compute())
    True
    """
    given = {"query": query, "key": key, "value": value, "decay": decay, "beta": beta, "state": state}
    arrays = {name: _as_dask(x, name) for name, x in given.items() if x is not None}
    nd = max(arrays[name].ndim for name in ("query", "key", "value", "state") if name in arrays)
    # the axes after batch and heads: tokens or rows, and numbers
    axes = {name: 1 + (name not in ("decay", "beta") or x.ndim == nd) for name, x in arrays.items()}
    stands, sizes = {name: _stand_in(x) for name, x in arrays.items()}, arrays["query"].shape[-2:-1]
    for name, x in arrays.items():
        axis = x.ndim - axes[name]
        if name == "state" or axis < 0:
            continue
        if x.numblocks[axis] > 1:
            raise ValueError(f"{name} has {x.numblocks[axis]} chunks of tokens, of which a state needs all in order: "
                             f"pass {name}.rechunk({{{axis}: -1}})")  # fmt: skip
        if x.shape[axis] not in (*sizes, *[1] * (name in ("decay", "beta"))):
            raise ValueError(f"{name} has {x.shape[axis]} tokens, query has {sizes[0]}")
        stands[name] = stands[name].take([], axis)
    like = cattn.linear_attention(**stands, scale=scale)  # checks the arguments of a call without tokens
    options = {"scale": scale, "num_threads": as_size(num_threads, "num_threads", maximum=2**31 - 1)}
    lengths = None if seq_lengths is None else as_integers(seq_lengths, "seq_lengths", 0, sizes[0])
    shape = (*like.shape[:-2], *sizes, like.shape[-1])
    results = _build_states(arrays, axes, shape, like.dtype, lengths, options)
    return LinearAttentionOutput(*results) if return_state else results[0]


def _build_states(
    arrays: dict[str, Any], axes: dict[str, int], shape: tuple[int, ...], dtype: Any, lengths: Any,
    options: dict[str, Any],
) -> list[Any]:  # fmt: skip
    """Return the output and the states as dask arrays: a task for each chunk of batch and heads."""
    lead, has_heads, last = shape[:-2], len(shape) > 3, (arrays["query"].shape[-1], shape[-1])
    inputs = [_with_dims(arrays[name], len(shape)) for name in ("query", "key", "value")]
    intervals, group = [batch_intervals(n, inputs, axis) for axis, n in enumerate(lead)], 1
    if has_heads and lead[-1]:  # a chunk has whole groups of the heads of each array
        n, n_states = lead[-1], max(x.shape[-3] for x in inputs[1:])
        group = n // n_states
        unit = n // math.gcd(n_states, *(x.shape[-3] for x in inputs if x.shape[-3] > 1))
        ends = [n // x.shape[-3] * end for x in inputs for end in itertools.accumulate(x.chunks[-3])]
        intervals[-1] = _split_at({n, *(end for end in ends if end % unit == 0)})
    operands = {}
    for name, x in arrays.items():
        first = last[0] if name == "state" else shape[-2]
        whole = [*intervals, [(0, first)], intervals_of(x.shape[-1:])][: len(lead) + axes[name]]
        operands[name] = Operand(_with_dims(x, len(whole)), whole)
    chunks = [tuple(b - a for a, b in axis) or (0,) for axis in intervals]
    of_states = [*chunks[:-1], tuple(n // group for n in chunks[-1])] if has_heads else chunks
    sizes = [(*chunks, shape[-2:-1], last[1:]), (*of_states, last[:1], last[1:])]
    dtypes = (dtype, np.float64 if dtype == np.float64 else np.float32)
    if 0 in lead:
        return [da.zeros([sum(n) for n in size], dtype=d, chunks=size) for size, d in zip(sizes, dtypes, strict=True)]
    if lengths is not None:
        lengths = np.broadcast_to(lengths, lead[:-1] if has_heads else lead)
    token = tokenize([(name, x.array.name) for name, x in operands.items()], lengths, options)
    graph: dict[Any, Any] = {}
    fields: list[dict[Any, Any]] = [{}, {}]
    for at in itertools.product(*map(range, map(len, intervals))):
        where = tuple(slice(*axis[i]) for axis, i in zip(intervals, at, strict=True))
        own = None if lengths is None else lengths[where[: lengths.ndim]]
        task = functools.partial(_follow, names=list(operands), seq_lengths=own, **options)
        part = (f"cattn-states-{token}", *at)
        graph[part] = (task, *(x.at([*at, *[0] * axes[name]]) for name, x in operands.items()))
        for i, field in enumerate(fields):
            field[(*at, 0, 0)] = (operator.itemgetter(i), part)
    names = [f"cattn-{name}-{token}" for name in ("linear-attention", "state")]
    return _over_one_graph(
        f"cattn-states-{token}", graph, operands, list(zip(names, fields, sizes, dtypes, strict=True))
    )


def _follow(*chunks: NDArray[Any], names: Sequence[str], num_threads: int, **options: Any) -> tuple[Any, ...]:
    """Compute the output and the states of one chunk."""
    function: Any = cattn.linear_attention  # its overloads do not see through **options
    with cattn.num_threads(num_threads):
        return tuple(function(**dict(zip(names, chunks, strict=True)), return_state=True, **options))
