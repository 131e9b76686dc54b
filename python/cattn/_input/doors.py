"""The functions that compute attention, and the options of `scaled_dot_product_attention` that each of them lacks.

Every option is a parameter of every function here, or it is refused with a reason. The TypeError for an unknown keyword
ends with the reason. tests/api/test_signature.py compares this table with the signatures.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from .. import _cattn


class Door(NamedTuple):
    """One function. An option is in `refused`, or a parameter: by its own name, or by its name in `spelled`.

    Attributes
    ----------
    refused : dict
        Options that the function lacks, with the reason, which says what to do instead if there is something.
    otherwise : str
        The reason for every other option of the table in C that is no parameter, a new one for instance. "" where
        parameters come from the table.
    own : str
        Parameters that are no options of attention.
    spelled : dict
        Options whose parameters have other names.
    has_refused : bool
        Whether refused options are parameters, too, so that the error can be one of another kind.
    """

    refused: dict[str, str]
    otherwise: str = ""
    own: str = ""
    spelled: Mapping[str, str] = MappingProxyType({})
    has_refused: bool = False

    def why_refused(self, name: str) -> str | None:
        """Return why the function lacks an option; None if it has it, or if there is no such option."""
        reason = self.refused.get(name)
        if reason is None and self.otherwise and name not in self.spelled:
            return self.otherwise if name in _cattn._arguments("scaled_dot_product_attention") else None
        return reason


_NOTHING_RETURNED = "it returns no output: call scaled_dot_product_attention for it"
_ONLY_GRADIENTS = "only gradients are returned: ask scaled_dot_product_attention for it"
_NO_DROPOUT = "the statistics are of the weights before dropout"
_NO_VALUE = "no values are read"
_BEFORE_THE_GATE = "weights are those before the gate, which multiplies the output alone"
_NO_COMMON_SCORES = "packed sequences have no common matrix of scores: pad them for scaled_dot_product_attention"

_HEADS_FIRST = "the arrays are (B, H, T, head_dim): pass {}, which copies nothing, of (B, T, H, head_dim)"

_PACKED = {
    "attn_mask": _NO_COMMON_SCORES,
    "bias": _NO_COMMON_SCORES,
    "block_mask": _NO_COMMON_SCORES,
    "key_indices": _NO_COMMON_SCORES,
    "enable_gqa": "leave it out: grouped heads are inferred from the shapes",
    "layout": "packed sequences are (total, H, head_dim)",
    "query_offset": "alignment says where the queries of a sequence stand",
    "query_seq_lengths": "cu_seqlens_q has the lengths",
    "key_value_seq_lengths": "cu_seqlens_k has the lengths",
    "key_value_seq_starts": "cu_seqlens_k says where the sequences start",
}
_PACKED_OWN = "cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k alignment"
_STATISTICS = {
    "value": _NO_VALUE,
    "gate": _BEFORE_THE_GATE,
    "dropout_p": _NO_DROPOUT,
    "rng": _NO_DROPOUT,
    "return_weights": "call attention_weights for it",
    "return_lse": 'ask for it by statistics=["lse"]',
    "return_dropout_mask": _NO_DROPOUT,
    "key_indices": "statistics are of all keys: pass a boolean attn_mask of the listed keys",
    "compute_dtype": "statistics are of weights in the dtype of the computation",
    "out": "the result has several arrays, which are always new",
}
_STATISTICS_OWN = "statistics top_k observation_window"
_GRADIENTS = dict.fromkeys(("return_weights", "return_lse", "return_dropout_mask"), _ONLY_GRADIENTS)
_GRADIENTS_OWN = "grad_out lse grad_lse merged"
_TANGENTS = {
    "key_indices": "pass a boolean attn_mask of the listed keys",
    "gate": "multiply the output by the gate's sigmoid, and the derivative by the product rule",
    "compute_dtype": "leave it out, and round the inputs: derivatives are computed in the dtype of the inputs",
    "return_weights": "call attention_weights for them",
    "return_dropout_mask": "the mask is the mask of scaled_dot_product_attention with the same rng",
}
_TANGENTS_OWN = "query_tangent key_tangent value_tangent bias_tangent sinks_tangent lse"
_NO_WHOLE_ROWS = "no task holds a whole row of weights"

# The name of a function of cattn, the module of an integration, or the command.
DOORS: dict[str, Door] = {
    "causal_attention": Door({"is_causal": "causal_attention is always causal"}),
    "attention_weights": Door(
        {
            "value": _NO_VALUE,
            "gate": _BEFORE_THE_GATE,
            "return_weights": "the weights are what is returned",
            "return_lse": _NOTHING_RETURNED,
            "return_dropout_mask": "pass stage='dropout' for the weights after dropout",
        },
        own="stage",
    ),
    "attention_backward": Door(_GRADIENTS, own=_GRADIENTS_OWN),
    "attention_jvp": Door(_TANGENTS, own=_TANGENTS_OWN),
    "attention_jvp_backward": Door(
        _TANGENTS | {"return_lse": _ONLY_GRADIENTS},
        own=f"{_TANGENTS_OWN} grad_out_tangent grad_lse_tangent out_tangent lse_tangent",
    ),
    "attention_statistics": Door(_STATISTICS, own=_STATISTICS_OWN),
    "varlen_attention": Door(
        _PACKED | {"return_weights": _NO_COMMON_SCORES, "return_dropout_mask": _NO_COMMON_SCORES}, own=_PACKED_OWN
    ),
    "varlen_attention_backward": Door(_PACKED | _GRADIENTS, own=f"{_PACKED_OWN} {_GRADIENTS_OWN}"),
    "varlen_attention_statistics": Door(_PACKED | _STATISTICS, own=f"{_PACKED_OWN} {_STATISTICS_OWN}"),
    "choose_keys": Door(
        {
            "value": _NO_VALUE,
            "gate": "it has no output",
            **dict.fromkeys(("dropout_p", "rng"), "nothing is dropped"),
            **dict.fromkeys(("softcap", "sinks", "alibi_slopes"), "it has no softmax: pass numbers of keys as bias"),
            **dict.fromkeys(("block_mask", "key_indices"), "pass a boolean attn_mask"),
            "compute_dtype": "keys are chosen in the dtype of the computation",
            **dict.fromkeys(("return_weights", "return_lse", "return_dropout_mask"), "return_scores returns scores"),
        },
        own="count weights activation block_size pooled first last return_scores",
    ),
    "linear_attention": Door(
        {
            "is_causal": "linear attention is always causal",
            "enable_gqa": "leave it out: grouped heads are inferred from the shapes",
            "query_seq_lengths": "pass seq_lengths",
            "key_value_seq_lengths": "pass seq_lengths",
            "key_value_seq_starts": "give padding on the left keys of 0 and a beta of 0: it changes no state",
            "dropout_p": "there are no weights that it could drop",
            "rng": "there are no weights that it could drop",
        },
        otherwise="linear attention has a state, and no scores to which it could apply",
        own="decay beta state seq_lengths cu_seqlens return_state state_out",
    ),
    "explain": Door(
        {
            "key_indices": "each list of keys is computed as a call of its own, on the keys of the list",
            "out": "nothing is computed",
        }
    ),
    "torch": Door(
        {
            "return_dropout_mask": "the mask has the memory of the weights: draw it from rng by cattn's own function",
            "out": "PyTorch's functions with gradients return new tensors",
        },
        otherwise="call cattn on arrays for it: the operator for tensors has no such argument",
    ),
    "jax": Door(
        {
            "enable_gqa": "leave it out: grouped heads are inferred from the shapes",
            "layout": "JAX's arrays are (B, T, N, H)",
            "key_indices": "pass a boolean mask that is True for the listed keys",
            "return_weights": "no matrix of weights is computed: call cattn.attention_weights on arrays",
            "return_dropout_mask": "no matrix of weights is computed: call cattn on arrays, with the seed of the mask",
            "out": "JAX's arrays do not change",
        },
        otherwise="call cattn on arrays for it: XLA's call has no such attribute",
        spelled={
            "attn_mask": "mask",
            "window_size": "local_window_size",
            "return_lse": "return_residual",
            "rng": "dropout_key",
        },
    ),
    "dask": Door(
        {
            "layout": _HEADS_FIRST.format("x.swapaxes(1, 2)"),
            "return_weights": _NO_WHOLE_ROWS,
            "return_dropout_mask": _NO_WHOLE_ROWS,
            "key_indices": "the keys of a list lie in any chunk",
            "gate": "tasks see some keys of a row each: multiply the result by the gate's sigmoid",
            "out": "the result is computed later",
        },
        otherwise="call cattn on the arrays of a chunk for it: tasks have no such argument",
        own="num_threads",
        has_refused=True,
    ),
    "keras": Door(
        {},
        otherwise="Keras's dot_product_attention has no such argument",
        own="flash_attention",
        spelled={"attn_mask": "mask", "softcap": "attn_logits_soft_cap"},
    ),
    "onnx": Door(
        {"query_offset": "the operator takes it from past_key or nonpad_kv_seqlen"},
        otherwise="the operator has no such input or attribute",
        own="past_key past_value q_num_heads kv_num_heads softmax_precision qk_matmul_output_mode right_window_size",
        spelled={
            "query": "Q",
            "key": "K",
            "value": "V",
            "key_value_seq_lengths": "nonpad_kv_seqlen",
            "window_size": "left_window_size",
            "return_weights": "return_qk",
        },
    ),
    "attend": Door(
        {},
        otherwise="not on the command line: call cattn from Python",
        own="help threads force quiet key_scale value_scale",
        spelled={
            "query": "inputs",
            "key": "inputs",
            "value": "inputs",
            "attn_mask": "mask",
            "dropout_p": "dropout",
            "is_causal": "causal",
            "query_seq_lengths": "query_lengths",
            "key_value_seq_lengths": "lengths",
            "key_value_seq_starts": "starts",
            "window_size": "window",
            "alibi_slopes": "alibi",
            "rng": "seed",
            "return_weights": "weights",
            "return_lse": "lse",
            "out": "output",
        },
    ),
}  # fmt: skip


# The options of linear attention, the short convolution and the choice of keys that their doors lack, with the reasons.
_NEW_TENSORS = "PyTorch's functions with gradients return new tensors"
_IN_TENSORS = {"state_out": f"{_NEW_TENSORS}: take .state with return_state=True", "out": _NEW_TENSORS}
BESIDE_ATTENTION: dict[str, dict[str, str]] = {
    "torch.linear_attention": _IN_TENSORS,
    "torch.causal_conv": _IN_TENSORS
    | dict.fromkeys(("seq_lengths", "cu_seqlens"), "call it for each sequence: gradients are of one at a time"),
    "torch.choose_keys": {"out": "it returns a new tensor"},
    "dask.linear_attention": {
        "layout": _HEADS_FIRST.format("x.swapaxes(1, 2)"),
        "cu_seqlens": "packed sequences have no batch to chunk: pad them, with seq_lengths",
        **dict.fromkeys(("state_out", "out"), "the result is computed later"),
    },
    "onnx.linear_attention": {
        "state": "the operator calls it past_state",
        "layout": "the arrays are (B, T, heads * width)",
        "return_state": "present_state is always returned",
        **dict.fromkeys(("seq_lengths", "cu_seqlens", "state_out", "out"), DOORS["onnx"].otherwise),
    },
}


def why_refused(function: Callable[..., Any], name: str) -> str | None:
    """Return why a function lacks this option; None if there is no such option or function."""
    module, _, last = function.__module__.rpartition(".")
    if (reasons := BESIDE_ATTENTION.get(f"{last}.{function.__name__}")) is not None:
        return reasons.get(name)
    door = DOORS.get(last if module == "cattn.integrations" else function.__name__)
    return None if door is None else door.why_refused(name)
