"""The choice of keys for sparse attention, of tensors: at once, or as an operator. It has no gradients."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal, Unpack

import torch
from torch import Tensor

import cattn
from cattn import _cattn

from ..._input.doors import DOORS
from ..._input.names import with_hints
from ..._input.types import Alignment
from ...functional._options import documented, spelled_out
from ._attention import (
    RangeOptions,
    are_tokens_first,
    as_positions,
    cast_inputs,
    check_inputs,
    check_others,
    read_alignment,
)
from ._derivatives import in_turn
from ._operator import (
    POSITIONS,
    TYPES,
    read_numbers,
    recorded,
    refuse_mixed_devices,
    tensors_schema,
    write_numbers,
)
from ._tensors import as_array, as_tensor, check_class, is_traceable, nobody_watches

_REFUSED = {*DOORS["choose_keys"].refused, "out", "return_scores"}
_ROWS = [row for row in _cattn._functions()["choose_keys"] if row[0] not in _REFUSED]
_ARRAYS = [name for name, what, *_ in _ROWS if what == "ARRAY"]
_NUMBERS = [(name, kind) for name, what, kind, *_ in _ROWS if what != "ARRAY"]
_SCHEMA = ", ".join([tensors_schema(_ARRAYS, ("query", "key")), *(TYPES[kind].format(name) for name, kind in _NUMBERS)])


def _compute(arrays: dict[str, Any], numbers: dict[str, Any], return_scores: bool) -> tuple[Tensor, Tensor | None]:
    given: Any = {name: None if x is None else as_array(x, name) for name, x in arrays.items()}
    found = recorded("cattn::choose_keys", cattn.choose_keys, **given, **numbers, return_scores=return_scores)
    return (as_tensor(found[0]), as_tensor(found[1])) if return_scores else (as_tensor(found), None)


def _read(arguments: tuple[Any, ...]) -> tuple[dict[str, Any], dict[str, Any], bool]:
    """Return the tensors and the numbers of the operator by their names, and whether the scores are wanted."""
    left = iter(arguments)
    arrays = {name: next(left) for name in _ARRAYS}
    return arrays, read_numbers(_NUMBERS, left), next(left)


@torch.library.custom_op(
    "cattn::choose_keys",
    mutates_args=(),
    device_types="cpu",
    schema=f"({_SCHEMA}, bool return_scores) -> (Tensor, Tensor)",
)
def choose_operator(*arguments: Any) -> Any:
    """Return the keys, and their scores or an empty tensor."""
    arrays, numbers, return_scores = _read(arguments)
    for name, tensor in arrays.items():
        if tensor is not None:
            check_class(tensor, name)
    keys, scores = _compute(arrays, numbers, return_scores)
    return keys, keys.new_empty(0) if scores is None else scores


@choose_operator.register_fake
def _shapes(*arguments: Any) -> tuple[Tensor, Tensor]:
    refuse_mixed_devices(arguments)
    arrays, numbers, return_scores = _read(arguments)
    query, key, size = arrays["query"], arrays["key"], numbers["block_size"]
    shapes = [tuple(x.shape) for x in (query, key)]
    if numbers["layout"] == "bthd":
        shapes = [(*shape[:-3], shape[-2], shape[-3], shape[-1]) for shape in shapes]
    broadcast: Any = torch.broadcast_shapes  # has no types
    rank = max(map(len, shapes))
    has_heads = rank > 3 or (rank == 3 and (numbers["enable_gqa"] or numbers["layout"] == "bthd"))
    heads, kept = ((1,), 3) if has_heads else ((), 2)
    batch = broadcast(*(shape[:-kept] for shape in shapes))
    rows, edges = shapes[1][-2], 0
    blocks, n_keys = -(-rows // size), rows
    if numbers["pooled"]:
        blocks, n_keys = rows, rows * size + size - 1
        edges = (1 if numbers["window_size"][0] == -1 else 2) * (size - 1)
    n = min(min(numbers["count"], blocks) * size + edges, n_keys)
    keys = query.new_empty((*batch, *heads, shapes[0][-2], n), dtype=torch.int32)
    dtype = torch.float64 if query.dtype is torch.float64 else torch.float32
    return keys, keys.new_empty(keys.shape, dtype=dtype) if return_scores else keys.new_empty(0)


choose_operator.register_vmap(lambda info, dims, *a: in_turn(choose_operator, info.batch_size, dims, a))


class _Options(RangeOptions, total=False):
    weights: Tensor | None
    activation: Literal["relu"] | None
    block_size: int
    pooled: bool
    first: int
    last: int
    attn_mask: Tensor | None
    is_causal: Alignment
    scale: float | None
    enable_gqa: bool | None
    return_scores: bool


@with_hints
@partial(documented, like=cattn.choose_keys, words="Tensor")
@spelled_out(
    order=_cattn._arguments("choose_keys"), is_causal=False, block_size=1, pooled=False, first=0, last=0,
    return_scores=False,
)  # fmt: skip
def choose_keys(query: Tensor, key: Tensor, count: int, **options: Unpack[_Options]) -> Any:
    """Return the keys with the largest scores for each query of CPU tensors, as `cattn.choose_keys` does of arrays.

    Parameters
    ----------
    query : Tensor, shape (..., H, T_q, head_dim) or (T_q, head_dim)
        Queries of the indexer, on the CPU, of float16, bfloat16 (with ``ml_dtypes``), float32 or float64. key has the
        same dtype. ``torch.autocast`` casts the two, all but float64.
    key : Tensor, shape (..., H_kv, T_k, head_dim) or (T_k, head_dim)
        Keys of the indexer.

    Returns
    -------
    Tensor of int32, shape (..., 1, T_q, n) or (T_q, n)
        The chosen keys in ascending order, then -1: the key_indices of `scaled_dot_product_attention` of tensors. With
        return_scores, a tuple of this tensor and the scores of the chosen keys, which have no gradients.

    Other Parameters
    ----------------
    layout : {"bhtd", "bthd"}
        Order of heads and tokens in query and key.

    Raises
    ------
    TypeError, ValueError
        As `cattn.choose_keys`; also for other devices, mixed dtypes and arguments that are not tensors.

    Notes
    -----
    Where PyTorch compiles or traces, it is the custom operator ``torch.ops.cattn.choose_keys``, which stays in one
    graph. ``torch.vmap`` makes a call for each entry of its batch.

    Examples
    --------
    >>> import torch
    >>> from cattn.integrations.torch import choose_keys
    >>> choose_keys(torch.ones(3, 1), torch.tensor([[3.0], [1.0], [2.0]]), 2, is_causal=True)
    tensor([[ 0, -1],
            [ 0,  1],
            [ 0,  2]], dtype=torch.int32)
    """
    check_inputs(query, key, key)
    query, key, _ = cast_inputs(query, key, key)
    given: dict[str, Any] = {"query": query, "key": key, "count": count, **options}
    given |= {name: as_positions(given[name], name) for name in POSITIONS}
    given["layout"] = "bthd" if are_tokens_first(given["layout"]) else "bhtd"
    given["is_causal"] = read_alignment(given["is_causal"]) or False
    arrays = {name: given.pop(name) for name in _ARRAYS}
    check_others(arrays)
    arrays = {name: None if x is None else x.detach() for name, x in arrays.items()}
    if not is_traceable() and nobody_watches(*arrays.values()):
        return_scores = given.pop("return_scores")
        found = _compute(arrays, given, return_scores)
    else:
        return_scores = given["return_scores"]
        found = choose_operator(*arrays.values(), *write_numbers(_NUMBERS, given), return_scores)
    return tuple(found) if return_scores else found[0]
