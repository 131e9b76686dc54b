"""Layers with a state, and indexers, in the models of transformers: the functions that the contexts replace by cattn's.

A family computes such a layer by functions of its own module, which have the same names in all families: the gated
delta rule (Qwen 3.5, Olmo Hybrid), its form with a decay for each row (Kimi Linear), and the short convolution before.
MiniMax computes its rule, a decay alone, in the ``forward`` of the layer's class.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from ._indexers import find_methods
from ._linear_attention import causal_conv, linear_attention
from ._tensors import is_ours

_CHUNKS = ("torch_chunk_gated_delta_rule", "chunk_kimi_delta_attention")
_STEPS = ("torch_recurrent_gated_delta_rule", "recurrent_kimi_delta_attention")
_ACTIVATIONS: dict[str | None, Literal["silu"] | None] = {None: None, "silu": "silu", "swish": "silu"}
Function: TypeAlias = Callable[..., Any]
Count: TypeAlias = Callable[[bool], None]  # a call, and whether cattn computes it


# ---- the recurrence --------------------------------------------------------------------------------------------------
def _compute(
    inputs: list[Tensor], bounds: Tensor | None, state: Tensor | None, **options: Any
) -> tuple[Tensor, Tensor]:
    """Return the output and a new last state; tokens are the second axis of inputs, ``decay`` and ``beta``."""
    if bounds is not None:
        inputs = [x[0] for x in inputs]
        options |= {name: options[name][0] for name in ("decay", "beta") if name in options}
    result = linear_attention(*inputs, **options, state=state, cu_seqlens=bounds, layout="bthd", return_state=True)
    return result.out if bounds is None else result.out[None], result.state


def _bounds_of(x: Tensor, bounds: Tensor | None, seq_idx: Tensor | None) -> Tensor | None:
    """Return the bounds of packed sequences, which may be given by the number of each token's sequence."""
    if bounds is None and seq_idx is None:
        return None
    if x.shape[0] != 1:
        raise NotImplementedError(f"packed sequences need a batch of one row, got {x.shape[0]} rows")
    if bounds is None:
        assert seq_idx is not None
        starts = (seq_idx[0, 1:] != seq_idx[0, :-1]).nonzero()[:, 0] + 1
        bounds = torch.cat([starts.new_zeros(1), starts, starts.new_full((1,), seq_idx.shape[1])])
    return bounds


def _make_rule(module: Any, theirs: Function, count: Count) -> Function:
    """Return the gated delta rule with the arguments of the family's function, which computes what cattn cannot."""
    normalize = module.l2norm

    def rule(
        query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, *arguments: Any,
        initial_state: Tensor | None = None, output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False,
        cu_seqlens: Tensor | None = None, **options: Any,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        given = {"query": query, "key": key, "value": value, "g": g, "beta": beta, "initial_state": initial_state}
        ours = not arguments and is_ours(**given)
        count(ours)
        if not ours:
            options |= {"initial_state": initial_state, "output_final_state": output_final_state}
            options |= {"use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel, "cu_seqlens": cu_seqlens}
            found: tuple[Tensor, Tensor | None] = theirs(query, key, value, g, beta, *arguments, **options)
            return found
        dtype = query.dtype
        bounds = options.get("cu_seq_lens_q") if cu_seqlens is None else cu_seqlens
        bounds = _bounds_of(query, bounds, options.get("seq_idx"))
        with torch.autocast("cpu", enabled=False):
            inputs = [x.to(torch.float32) for x in (query, key, value)]
            if use_qk_l2norm_in_kernel:
                inputs[:2] = (normalize(x, dim=-1, eps=1e-6) for x in inputs[:2])
            out, state = _compute(inputs, bounds, initial_state, decay=g, beta=beta)
        return out.to(dtype), state if output_final_state else None

    return rule


def _make_lightning(module: Any, theirs: Function, count: Count) -> Function:
    """Return the ``forward`` of MiniMax's layer, with the family's projections, norm and cache."""
    hide_padding = module.apply_mask_to_padding_states

    def forward(
        self: Any, hidden_states: Tensor, position_embeddings: Any, attention_mask: Tensor | None,
        cache: Any = None, **options: Any,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        cache = options.pop("past_key_values", cache)
        before = None if cache is None else cache.get_linear_cache(self.layer_idx)
        ours = is_ours(hidden_states=hidden_states, cache=before)
        count(ours)
        if not ours:
            found: tuple[Tensor, Tensor] = theirs(
                self, hidden_states, position_embeddings, attention_mask, cache, **options
            )
            return found
        tokens = hidden_states.shape[:2]
        qkv = hide_padding(self.act_fn(self.qkv_proj(hidden_states)), attention_mask)
        inputs = list(qkv.reshape(*tokens, self.num_attention_heads, -1).split(self.head_dim, 3))
        bounds = _bounds_of(qkv, options.get("cu_seq_lens_q"), options.get("seq_idx"))
        with torch.autocast("cpu", enabled=False):
            decay = -self.slope_rate.flatten().expand(*tokens, -1)
            out, state = _compute(inputs, bounds, before, decay=decay, scale=1.0)
        out = self.norm(out.reshape(*tokens, -1))
        out = self.out_proj(torch.sigmoid(self.output_gate(hidden_states)) * out)
        if cache is not None:
            cache.set_linear_cache(self.layer_idx, state)
        return out, state

    return forward


# ---- the short convolution -------------------------------------------------------------------------------------------
def _make_conv(module: Any, theirs: Function, count: Count) -> Function:
    def conv(
        hidden_states: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None,
        seq_idx: Tensor | None = None, cu_seq_lens_q: Tensor | None = None, **options: Any,
    ) -> Tensor:  # fmt: skip
        given = {"hidden_states": hidden_states, "weight": weight, "bias": bias}
        ours = activation in _ACTIVATIONS and is_ours(**given)
        count(ours)
        if not ours:
            options |= {"activation": activation, "seq_idx": seq_idx}
            found: Tensor = theirs(hidden_states, weight, bias, **options)
            return found
        sequences = [hidden_states.to(weight.dtype).transpose(1, 2)]
        bounds = _bounds_of(hidden_states, cu_seq_lens_q, seq_idx)
        if bounds is not None:
            sizes = torch.diff(bounds).tolist()
            sizes[0] += sequences[0].shape[1] - sum(sizes)  # the tokens of a state stand before the first sequence
            sequences = list(torch.split(sequences[0], sizes, 1))
        parts = [causal_conv(x, weight, bias, activation=_ACTIVATIONS[activation]) for x in sequences]
        out = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
        return out.transpose(1, 2).to(hidden_states.dtype)

    return conv


def _make_update(module: Any, theirs: Function, count: Count) -> Function:
    def update(
        hidden_states: Tensor, conv_state: Tensor, weight: Tensor, bias: Tensor | None = None,
        activation: str | None = None,
    ) -> Tensor:  # fmt: skip
        given = {"hidden_states": hidden_states, "conv_state": conv_state, "weight": weight, "bias": bias}
        ours = activation in _ACTIVATIONS and is_ours(**given)
        count(ours)
        if not ours:
            found: Tensor = theirs(hidden_states, conv_state, weight, bias, activation)
            return found
        kept, size = weight.shape[-1] - 1, conv_state.shape[-1]
        x = torch.cat([conv_state, hidden_states], dim=-1).to(weight.dtype)
        conv_state.copy_(x[..., x.shape[-1] - size :])
        tokens, before = x[..., size:].transpose(1, 2), x[..., size - kept : size].transpose(1, 2)
        out: Tensor = causal_conv(tokens, weight, bias, state=before, activation=_ACTIVATIONS[activation])
        return out.transpose(1, 2).to(hidden_states.dtype)

    return update


# ---- contexts --------------------------------------------------------------------------------------------------------
_MAKERS: dict[str, Callable[[Any, Function, Count], Function]] = {
    **dict.fromkeys((*_CHUNKS, *_STEPS), _make_rule),
    "causal_conv1d_fn": _make_conv,
    "causal_conv1d_update": _make_update,
}
_CONVOLUTIONS = ("causal_conv1d_fn", "causal_conv1d_update")
_FAMILIES = "transformers.models."


class _Layers:
    """The functions that are replaced while a context is active, in any thread."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.uses = 0
        self.counts: Count = lambda ours: None
        self.theirs: dict[tuple[Any, str], Function] = {}

    def begin(self, count: Count) -> None:
        with self.lock:
            self.uses += 1
            self.counts = count
            if self.uses == 1:
                sys.meta_path.insert(0, self)
            for name, module in list(sys.modules.items()):
                if name.startswith(_FAMILIES):
                    self.replace(module)

    def count(self, ours: bool) -> None:
        if not torch.compiler.is_compiling():
            self.counts(ours)

    def replace(self, module: Any) -> None:
        """Replace the functions of a family that has layers with a state or an indexer, while a context is active."""
        own = getattr(module, "__dict__", {})
        with self.lock:
            has_rule = "l2norm" in own and any(name in own for name in _CHUNKS)
            for name in _MAKERS.keys() & own.keys() if self.uses else ():
                if has_rule or name in _CONVOLUTIONS:
                    self._replace(module, module, name, _MAKERS[name])
            if self.uses and "MiniMaxLightningAttention" in own:
                self._replace(module, own["MiniMaxLightningAttention"], "forward", _make_lightning)
            for owner, name, make in find_methods(module) if self.uses else ():
                self._replace(module, owner, name, make)

    def _replace(self, module: Any, owner: Any, name: str, make: Callable[[Any, Function, Count], Function]) -> None:
        if (owner, name) not in self.theirs:
            theirs = self.theirs[owner, name] = vars(owner)[name]
            setattr(owner, name, make(module, theirs, self.count))

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Find a family that is imported while a context is active, and replace its functions once it is there."""
        spec = PathFinder.find_spec(name, path, target) if name.startswith(_FAMILIES) else None
        loader: Any = None if spec is None else spec.loader
        if loader is not None:
            execute = loader.exec_module

            def exec_module(module: Any) -> None:
                execute(module)
                self.replace(module)

            loader.exec_module = exec_module
        return spec

    def end(self) -> None:
        with self.lock:
            self.uses -= 1
            if self.uses == 0:
                sys.meta_path.remove(self)
                for (owner, name), theirs in self.theirs.items():
                    setattr(owner, name, theirs)
                self.theirs.clear()


_layers = _Layers()


@contextmanager
def recurrent_layers(count: Count) -> Iterator[None]:
    """Let cattn compute layers with a state and indexers of the families of transformers, and count the calls."""
    _layers.begin(count)
    try:
        yield
    finally:
        _layers.end()
