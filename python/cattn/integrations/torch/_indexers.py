"""Indexers in the models of transformers: their ``forward`` in the contexts, which lets cattn choose the keys.

Most families end alike: products of queries and keys, relu, a weighted sum over the heads, a mask, and ``topk``. There
the family's own method runs. What it does with the products is written down, and computed when it asks for the largest.
Qwen 4 and MiniMax M3 choose blocks of keys in ways of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from ._choose_keys import choose_keys
from ._tensors import is_ours

Function = Callable[..., Any]
Count = Callable[[bool], None]  # a call, and whether cattn computes it


class Chosen:
    """The keys that each query sees, (B, T_q, n) or None for all, in the place of a mask for cattn's attention."""

    def __init__(self, indices: Tensor | None) -> None:
        self.indices = indices

    def __invert__(self) -> Chosen:
        """Return the same: a family writes ``mask.masked_fill(~chosen, value)``."""
        return self


# ---- scores whose largest are chosen ---------------------------------------------------------------------------------
def _step(name: str) -> Any:
    def method(self: _Scores, *others: Any, **options: Any) -> Any:
        return _Scores.__torch_function__(getattr(Tensor, name), (), (self, *others), options)

    return method


@dataclass(frozen=True)
class _Scores:
    """Scores of an indexer that are not computed yet. Whoever does something unknown with them gets the tensor."""

    query: Tensor  # (B, T_q, H, head_dim)
    key: Tensor  # (B, 1, head_dim, T_k)
    watch: _Watch
    compute: Callable[[], Any]  # returns the tensor, as the family computes it
    scale: float = 1.0
    relu: bool = False
    weights: Tensor | None = None  # (B, T_q, H)
    axes: str = "BTHS"
    mask: Any = None

    @property
    def shape(self) -> torch.Size:
        sizes = {"B": self.query.shape[0], "T": self.query.shape[1], "H": self.query.shape[2], "1": 1}
        return torch.Size([{**sizes, "S": self.key.shape[-1]}[axis] for axis in self.axes])

    @property
    def dtype(self) -> torch.dtype:
        return self.query.dtype

    @property
    def device(self) -> torch.device:
        return self.query.device

    __mul__ = __rmul__ = _step("mul")
    __add__ = __radd__ = _step("add")
    masked_fill, squeeze, sum, topk = map(_step, ("masked_fill", "squeeze", "sum", "topk"))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._computed(), name)

    def _computed(self) -> Any:
        self.watch.is_awake = False  # these are the products that it saw
        return self.compute()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        scores = [x for x in args if isinstance(x, cls)]
        if len(scores) == 1:
            others = [x for x in args if x is not scores[0]]
            found = scores[0]._follow(func.__name__, others, kwargs, args[0] is scores[0])
            if isinstance(found, dict):

                def compute() -> Any:
                    return func(*(x.compute() if isinstance(x, cls) else x for x in args), **kwargs)

                return replace(scores[0], compute=compute, **found)
            if found is not None:
                return found
        args, kwargs = tree_map_only(cls, cls._computed, (tuple(args), kwargs))
        return func(*args, **kwargs)

    def _follow(self, name: str, others: list[Any], options: dict[str, Any], is_first: bool) -> Any:
        """Return what changes by a function of the scores and others, its result, or None if it is unknown."""
        of_heads, other = self.axes == "BTHS", others[0] if others else None
        B, T, H, S = self.query.shape[:3] + self.key.shape[-1:]
        if name == "relu" and of_heads and self.weights is None:
            return {"relu": True}
        if name == "mul" and of_heads and isinstance(other, (int, float)) and other > 0:
            return {"scale": self.scale * other}
        if self.weights is None and of_heads and isinstance(other, Tensor):
            if name == "mul" and other.shape == (B, T, H, 1):
                return {"weights": other[..., 0]}
            if name == "matmul" and not is_first and other.shape == (B, T, 1, H):
                return {"weights": other[..., 0, :], "axes": "BT1S"}
        if name == "sum" and of_heads and self.weights is not None and not others and options == {"dim": 2}:
            return {"axes": "BTS"}
        if name == "squeeze" and self.axes == "BT1S" and others == [-2]:
            return {"axes": "BTS"}
        if self.axes == "BTS" and self.mask is None and tuple(getattr(other, "shape", ())) == (B, T, S):
            assert other is not None
            if name == "masked_fill" and others[1] <= torch.finfo(self.dtype).min:
                return {"mask": ~other}
            if name == "add":
                return {"mask": other}
        if name == "topk" and self.axes == "BTS" and len(others) == 1 and options == {"dim": -1}:
            return self._choose(others[0])
        return None

    def _choose(self, count: int) -> Any:
        """Return the keys with the largest scores, and hidden ones where fewer are visible, as ``topk`` does.

        Beside a mask of `cattn.integrations.transformers` they are -1, which cattn's attention takes.
        """
        self.watch.has_chosen = True
        if count == 0:
            none = self.query.new_empty(*self.shape[:2], 0)
            return torch.return_types.topk((none, none.long()))
        options: dict[str, Any] = {}
        mask = self.mask
        if isinstance(mask, Tensor):
            mask = mask[:, None] if mask.dtype is torch.bool else mask[:, None].to(self.dtype)
            options = {"attn_mask": mask}
        elif mask is not None:
            options = {**mask.options, "attn_mask": mask.attn_mask}
        assert self.weights is not None
        indices, scores = choose_keys(
            self.query.transpose(1, 2), self.key.transpose(-1, -2), count, weights=self.weights.transpose(1, 2),
            activation="relu" if self.relu else None, scale=self.scale, return_scores=True, **options,
        )  # fmt: skip
        if isinstance(mask, Tensor):
            hidden = ~mask if mask.dtype is torch.bool else mask == -torch.inf
            indices = indices.where(indices >= 0, hidden.to(torch.uint8).argmax(-1, keepdim=True))
        return torch.return_types.topk((scores[:, 0], indices[:, 0].long()))


class _Watch(TorchFunctionMode):
    """Makes `_Scores` of the products of an indexer."""

    is_awake, has_chosen = True, False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (
            self.is_awake
            and func is torch.matmul
            and not kwargs
            and len(args) == 2
            and all(type(x) is Tensor for x in args)
        ):
            q, k = args
            of_one_head = q.ndim == k.ndim == 4 and k.shape[:2] == (q.shape[0], 1) and q.shape[-1] == k.shape[-2]
            if of_one_head and q.dtype is k.dtype and is_ours(query=q, key=k):
                return _Scores(q, k, self, lambda: func(q, k))
        return func(*args, **(kwargs or {}))


def _make_watched(module: Any, theirs: Function, count: Count) -> Function:
    """Return the ``forward`` of an indexer with its products, sums and choice by cattn."""

    def forward(self: Any, *args: Any, **options: Any) -> Any:
        if torch.compiler.is_compiling():
            return theirs(self, *args, **options)
        with _Watch() as watch:
            found = theirs(self, *args, **options)
            found = found._computed() if isinstance(found, _Scores) else found
        count(watch.has_chosen)
        return found

    return forward


# ---- blocks of keys --------------------------------------------------------------------------------------------------
def _ranges_of(mask: Any) -> dict[str, Any] | None:
    """Return causality, lengths and starts as `choose_keys` takes them; None if the mask hides other keys."""
    options = getattr(mask, "options", None)
    if options is not None and mask.attn_mask is None:
        return None if "window_size" in options else options
    if options is not None:
        mask = mask.visible()
    visible = (mask if mask.dtype is torch.bool else mask == 0)[:, 0]
    n_queries, n_keys = visible.shape[1:]
    counts, places, keys = visible.sum(-1), torch.arange(n_queries), torch.arange(n_keys)
    starts = visible.any(1).to(torch.uint8).argmax(-1)
    ends = torch.where(counts > 0, starts[:, None] + counts, 0)
    offsets = torch.where(counts > 0, ends - 1 - places, 0).amax(-1)
    lengths = ends.amax(-1)
    last = torch.minimum(offsets[:, None] + places, lengths[:, None] - 1)
    if not torch.equal(visible, (keys >= starts[:, None, None]) & (keys <= last[..., None])):
        return None
    options = {"key_value_seq_starts": starts, "key_value_seq_lengths": lengths}
    return options | {"is_causal": "upper_left", "query_offset": offsets}


def _make_pooled(module: Any, theirs: Function, count: Count) -> Function:
    """Return the ``forward`` of Qwen 4's indexer, whose keys are means of blocks, counted from a text's first token."""
    rotate = module.apply_rotary_pos_emb

    def forward(
        self: Any, hidden_states: Tensor, position_embeddings: Any, attention_mask: Any, cache: Any = None,
        **options: Any,
    ) -> Any:  # fmt: skip
        ours = not (options or torch.compiler.is_compiling()) and is_ours(hidden_states=hidden_states)
        ranges = _ranges_of(attention_mask) if ours and self.index_kv_heads == 1 <= self.block_topk else None
        count(ranges is not None)
        if ranges is None:
            return theirs(self, hidden_states, position_embeddings, attention_mask, cache, **options)
        batch, n_queries, _ = hidden_states.shape
        cos, sin = (x.expand(batch, -1, -1) for x in position_embeddings)  # of all tokens
        heads = self.index_qk_proj(hidden_states).unflatten(-1, (-1, self.index_head_dim))
        query, keys = heads[:, :, :-1], heads[:, :, -1]
        query = rotate(self.q_layernorm(query), cos=cos[:, -n_queries:], sin=sin[:, -n_queries:], unsqueeze_dim=2)
        if cache is not None:
            keys = cache.update_indexer(keys, self.layer_idx)
        size, n_keys = self.compress_ratio, cos.shape[1]
        rows = n_keys // size
        places = torch.as_tensor(ranges.get("key_value_seq_starts", 0)).reshape(-1, 1) + torch.arange(rows * size)
        places = places.clamp(max=n_keys - 1).expand(batch, -1)
        pooled = keys[torch.arange(batch)[:, None], places].unflatten(1, (rows, size)).float().mean(2).to(keys.dtype)
        first = (torch.arange(batch)[:, None], places[:, ::size])
        pooled = rotate(self.k_layernorm(pooled)[:, :, None], cos=cos[first], sin=sin[first], unsqueeze_dim=2)
        indices = choose_keys(
            query.float(), pooled.float(), self.block_topk, activation="relu", block_size=size, pooled=True,
            layout="bthd", **{"key_value_seq_lengths": n_keys} | ranges,
        )[:, 0]  # fmt: skip
        if not isinstance(attention_mask, Tensor):
            return Chosen(indices)
        none = torch.zeros(batch, n_queries, attention_mask.shape[-1] + 1, dtype=torch.bool)
        return none.scatter(-1, indices.long() % none.shape[-1], True)[:, None, :, :-1]

    return forward


def _make_blocks(module: Any, theirs: Function, count: Count) -> Function:
    """Return the ``forward`` of MiniMax M3's indexer, where each head chooses the blocks with the largest scores."""
    rotate = module.apply_rotary_pos_emb

    def forward(
        self: Any, hidden_states: Tensor, position_embeddings: Any, cache: Any, position_ids: Tensor, **options: Any
    ) -> Any:
        tokens, first, last = hidden_states.shape[:2], position_ids[:, :1], position_ids[:, -1:]
        ours = not (options or torch.compiler.is_compiling()) and is_ours(hidden_states=hidden_states)
        # Padding on the right has the position of the last token. That on the left has none.
        ours = ours and torch.equal(position_ids, torch.minimum(first + torch.arange(tokens[1]), last))
        count(ours)
        if not ours:
            return theirs(self, hidden_states, position_embeddings, cache, position_ids, **options)
        query, key = (
            norm(project(hidden_states).view(*tokens, -1, self.head_dim)).transpose(1, 2)
            for project, norm in ((self.q_proj, self.q_norm), (self.k_proj, self.k_norm))
        )
        query, key = rotate(query, key, *(x[..., : self.head_dim] for x in position_embeddings))
        if cache is not None:
            key = cache.layers[self.layer_idx].update_index(key)
        keys = choose_keys(
            query.float()[:, :, None], key.float()[:, :, None], self.topk_blocks, block_size=self.block_size,
            last=min(self.local_blocks, self.topk_blocks), scale=1.0, is_causal=True, query_offset=first,
            key_value_seq_lengths=last + 1,
        )[:, :, 0]  # fmt: skip
        # In ascending order only the last block has fewer keys, so that the others begin at multiples of the size.
        return keys[..., :: self.block_size].long() // self.block_size

    return forward


def _make_lists(module: Any, theirs: Function, count: Count) -> Function:
    """Return GLM 5 Next's method that makes a mask of the chosen keys, which cattn's attention does not need."""

    def build(self: Any, topk_indices: Tensor, query_states: Tensor, kv_length: int) -> Any:
        if self.config._attn_implementation in ("eager", "sdpa") or torch.compiler.is_compiling():
            return theirs(self, topk_indices, query_states, kv_length)
        return Chosen(topk_indices)

    return build


_OWN = {"Qwen4ExpTextQSAIndexer": _make_pooled, "MiniMaxM3VLIndexer": _make_blocks}
_MASK = "build_attention_mask_from_topk"


def find_methods(module: Any) -> list[tuple[Any, str, Callable[[Any, Function, Count], Function]]]:
    """Return the methods of a family's classes to replace, and what makes ours of them."""
    classes = [x for x in vars(module).values() if isinstance(x, type) and x.__module__ == module.__name__]
    found = [
        (cls, "forward", _OWN.get(cls.__name__, _make_watched))
        for cls in classes
        if cls.__name__.endswith("Indexer") and "forward" in vars(cls)
    ]
    return found + [(cls, _MASK, _make_lists) for cls in classes if _MASK in vars(cls)]
