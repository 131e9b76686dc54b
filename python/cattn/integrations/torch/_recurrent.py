"""Layers with a state in the models of transformers: the functions that the contexts replace by cattn's.

A family computes such a layer by functions of its own module, which have the same names in all families: the gated
delta rule (Qwen 3.5, Olmo Hybrid), its form with a decay for each row (Kimi Linear), and the short convolution before.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

import cattn

from ._linear_attention import causal_conv, linear_attention
from ._tensors import DTYPES, as_array, as_tensor, is_readable, nobody_watches

_CHUNKS = ("torch_chunk_gated_delta_rule", "chunk_kimi_delta_attention")
_STEPS = ("torch_recurrent_gated_delta_rule", "recurrent_kimi_delta_attention")
_ACTIVATIONS: dict[str | None, Literal["silu"] | None] = {None: None, "silu": "silu", "swish": "silu"}
Function: TypeAlias = Callable[..., Any]


def _is_ours(*tensors: Tensor | None) -> bool:
    return all(x is None or (x.device.type == "cpu" and x.dtype in DTYPES) for x in tensors)


def _step_in_place(inputs: list[Tensor], decay: Tensor, beta: Tensor, state: Tensor) -> Tensor | None:
    """Return the output, with the new state in the place of the old one; None where something is recorded."""
    tensors = (*inputs, decay, beta, state)
    if not nobody_watches() or not all(map(is_readable, tensors)) or state.dtype is not torch.float32:
        return None
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        return None
    memory = as_array(state)
    function: Any = cattn.linear_attention
    options = {"decay": as_array(decay), "beta": as_array(beta), "state": memory, "state_out": memory}
    return as_tensor(function(*map(as_array, inputs), **options, layout="bthd"))


def _make_rule(module: Any, theirs: Function, steps: bool) -> Function:
    """Return the gated delta rule with the arguments of the family's function, which computes what cattn cannot."""
    normalize = module.l2norm

    def rule(
        query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, *arguments: Any,
        initial_state: Tensor | None = None, output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False,
        cu_seqlens: Tensor | None = None, **options: Any,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        if arguments or not _is_ours(query, key, value, g, beta, initial_state):
            options |= {"initial_state": initial_state, "output_final_state": output_final_state}
            options |= {"use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel, "cu_seqlens": cu_seqlens}
            found: tuple[Tensor, Tensor | None] = theirs(query, key, value, g, beta, *arguments, **options)
            return found
        dtype = query.dtype
        with torch.autocast("cpu", enabled=False):
            inputs = [x.to(torch.float32) for x in (query, key, value)]
            if use_qk_l2norm_in_kernel:
                inputs[:2] = (normalize(x, dim=-1, eps=1e-6) for x in inputs[:2])
            bounds = options.get("cu_seq_lens_q") if cu_seqlens is None else cu_seqlens
            if bounds is not None:
                if query.shape[0] != 1:
                    raise NotImplementedError(f"cu_seqlens needs a batch of one row, got {query.shape[0]} rows")
                inputs, g, beta = [x[0] for x in inputs], g[0], beta[0]
            elif steps and initial_state is not None and output_final_state:
                out = _step_in_place(inputs, g, beta, initial_state)
                if out is not None:
                    return out.to(dtype), initial_state
            out, state = linear_attention(
                *inputs, decay=g, beta=beta, state=initial_state, cu_seqlens=bounds, layout="bthd", return_state=True
            )
        out = out if bounds is None else out[None]
        return out.to(dtype), state if output_final_state else None

    return rule


def _split(x: Tensor, bounds: Tensor | None, seq_idx: Tensor | None) -> list[Tensor]:
    """Return packed sequences, which are the last tokens of (1, T, C), each alone; states stand before the first."""
    if bounds is None and seq_idx is None:
        return [x]
    if bounds is None:
        assert seq_idx is not None
        starts = (seq_idx[0, 1:] != seq_idx[0, :-1]).nonzero()[:, 0] + 1
        sizes = torch.diff(starts, prepend=starts.new_zeros(1), append=starts.new_full((1,), seq_idx.shape[1])).tolist()
    else:
        sizes = torch.diff(bounds).tolist()
    sizes[0] += x.shape[1] - sum(sizes)
    parts: list[Tensor] = list(torch.split(x, sizes, 1))
    return parts


def _make_conv(module: Any, theirs: Function) -> Function:
    def conv(
        hidden_states: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None,
        seq_idx: Tensor | None = None, cu_seq_lens_q: Tensor | None = None, **options: Any,
    ) -> Tensor:  # fmt: skip
        if activation not in _ACTIVATIONS or not _is_ours(hidden_states, weight, bias):
            options |= {"activation": activation, "seq_idx": seq_idx}
            found: Tensor = theirs(hidden_states, weight, bias, **options)
            return found
        sequences = _split(hidden_states.to(weight.dtype).transpose(1, 2), cu_seq_lens_q, seq_idx)
        parts = [causal_conv(x, weight, bias, activation=_ACTIVATIONS[activation]) for x in sequences]
        out = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
        return out.transpose(1, 2).to(hidden_states.dtype)

    return conv


def _make_update(module: Any, theirs: Function) -> Function:
    def update(
        hidden_states: Tensor, conv_state: Tensor, weight: Tensor, bias: Tensor | None = None,
        activation: str | None = None,
    ) -> Tensor:  # fmt: skip
        if activation not in _ACTIVATIONS or not _is_ours(hidden_states, conv_state, weight, bias):
            found: Tensor = theirs(hidden_states, conv_state, weight, bias, activation)
            return found
        kept, size = weight.shape[-1] - 1, conv_state.shape[-1]
        x = torch.cat([conv_state, hidden_states], dim=-1).to(weight.dtype)
        conv_state.copy_(x[..., x.shape[-1] - size :])
        tokens, before = x[..., size:].transpose(1, 2), x[..., size - kept : size].transpose(1, 2)
        out: Tensor = causal_conv(tokens, weight, bias, state=before, activation=_ACTIVATIONS[activation])
        return out.transpose(1, 2).to(hidden_states.dtype)

    return update


_MAKERS: dict[str, Callable[[Any, Function], Function]] = {
    **{name: lambda module, theirs: _make_rule(module, theirs, False) for name in _CHUNKS},
    **{name: lambda module, theirs: _make_rule(module, theirs, True) for name in _STEPS},
    "causal_conv1d_fn": _make_conv,
    "causal_conv1d_update": _make_update,
}


class _Layers:
    """The functions that are replaced while a context is active, in any thread."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.uses = 0
        self.theirs: dict[tuple[Any, str], Function] = {}

    def begin(self) -> None:
        with self.lock:
            self.uses += 1
            families = [x for name, x in list(sys.modules.items()) if name.startswith("transformers.models.")]
            for module in families:
                own = vars(module)
                if "l2norm" not in own or not any(name in own for name in _CHUNKS):
                    continue
                for name, make in _MAKERS.items():
                    if name in own and (module, name) not in self.theirs:
                        self.theirs[module, name] = own[name]
                        setattr(module, name, make(module, own[name]))

    def end(self) -> None:
        with self.lock:
            self.uses -= 1
            if self.uses == 0:
                for (module, name), theirs in self.theirs.items():
                    setattr(module, name, theirs)
                self.theirs.clear()


_layers = _Layers()


@contextmanager
def recurrent_layers() -> Iterator[None]:
    """Let cattn compute the layers with a state of the families of transformers that are imported."""
    _layers.begin()
    try:
        yield
    finally:
        _layers.end()
