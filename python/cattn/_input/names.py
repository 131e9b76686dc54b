"""The hint in the TypeError for an unknown keyword: the name that cattn has for the argument."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn, ParamSpec, TypeVar

from .doors import why_refused

P = ParamSpec("P")
R = TypeVar("R")

# The names of other libraries (PyTorch, JAX, Keras and TensorFlow, onnxruntime, FlashAttention, Hugging Face) for each
# parameter of cattn. A name may mean several parameters: the first that a function has is suggested.
_OTHERS = {
    "query": "q queries query_states",
    "key": "k keys key_states",
    "value": "v values value_states",
    "is_causal": "causal use_causal_mask unidirectional",
    "attn_mask": "mask attention_mask key_mask padding_mask src_mask where visible",
    "mask": "attn_mask attention_mask key_mask padding_mask where visible",
    "where": "mask attn_mask",
    "bias": "attn_bias attention_bias position_bias relative_position_bias rel_pos_bias score_bias beta",
    "qkv_bias": "bias use_bias add_bias in_proj_bias",
    "dropout_p": "dropout dropout_rate attn_dropout attention_dropout p rate prob probability drop_prob attn_pdrop",
    "p": "dropout dropout_p dropout_rate rate prob probability drop_prob",
    "dropout": "dropout_p dropout_rate attn_dropout attention_dropout p rate drop_prob attn_pdrop",
    "rng": "seed generator random_state dropout_rng dropout_seed prng rngs random_seed prng_key",
    "seed": "rng generator random_state",
    "axis": "dim axes dims",
    "scale": "sm_scale softmax_scale scaling scaling_factor scale_factor attn_scale inv_temperature",
    "softcap": "softmax_cap logits_soft_cap logit_softcap logits_softcap logit_cap attn_logit_softcapping tanh_cap",
    "window_size": "window sliding_window local_window_size attention_window local_attention window_left",
    "alibi_slopes": "alibi slopes alibi_bias",
    "sinks": "sink s_aux attn_sink attention_sink attention_sinks head_sink softmax_sink",
    "enable_gqa": "gqa use_gqa",
    "block_mask": "blocks blockmask base_blockmask block_sparse_mask sparse_mask block_layout sparsity_layout",
    "key_indices": "topk_indices indices topk_idxs topk_index gather_indices kv_indices selected_keys token_indices",
    "count": "top_k topk k num_keys n_keys index_topk budget",
    "blocks": "mask block_mask layout",
    "size": "block_size blocksize block_len block_width",
    "values": "x array numbers",
    "query_offset": "offset q_offset position start_pos cache_position past_length past_seq_len position_offset",
    "query_seq_lengths": "q_lengths query_lengths q_seqlens seqused_q seqlens_q q_seq_lengths",
    "key_value_seq_lengths": "lengths seq_lengths seqlens seq_lens sequence_lengths kv_lengths key_lengths kv_seqlens "
    "seqused_k seqlens_k key_seq_lengths kv_seq_lengths cache_seqlens total_sequence_length nonpad_kv_seqlen",
    "key_value_seq_starts": "starts seq_starts kv_starts key_starts kv_seq_starts key_seq_starts leftpad_k "
    "cache_leftpad left_padding left_pad",
    "cu_seqlens_q": "cu_seqlens cu_seq_q cu_seqlen_q cu_seq_lens_q",
    "cu_seqlens_k": "cu_seqlens_kv cu_seq_k cu_seqlen_k cu_seq_lens_k",
    "return_weights": "need_weights return_attention_scores return_attention return_attention_weights "
    "output_attentions return_attn_weights return_attn_probs",
    "return_lse": "return_softmax_lse return_logsumexp return_residual need_lse",
    "return_mask": "return_dropout_mask",
    "decay": "g gate gk gates log_decay alpha a slopes log_alpha",
    "beta": "b learning_rate write_strength betas",
    "state": "initial_state past_state recurrent_state h0 s0 conv_state init_state cache",
    "return_state": "output_final_state return_final_state return_final_states",
    "state_out": "out_state final_state present_state new_state",
    "grad_state": "grad_final_state dht dstate",
    "seq_lengths": "lengths seqlens seq_lens sequence_lengths seq_len",
    "cu_seqlens": "cu_seqlens_q cu_seq_lens cu_seq_lens_q offsets",
    "activation": "act silu activation_fn",
    "return_dropout_mask": "return_mask",
    "lse": "logsumexp log_sum_exp softmax_lse",
    "grad_out": "grad grad_output grad_outputs dout upstream",
    "out": "output result",
    "positions": "position_ids position pos offset input_pos cache_position start_pos token_positions",
    "theta": "base rope_theta rope_base rotary_base rotary_emb_base freq_base",
    "rotary_dim": "dim rope_dim rotary_ndims rotary_embedding_dim n_rot dims",
    "interleaved": "interleave traditional rotary_interleaved is_interleaved",
    "scaling": "rope_scaling rope_parameters",
    "inverse": "backward conjugate transpose",
    "weight": "gamma scale weights gain",
    "dtype": "quant_dtype qtype to_dtype storage_dtype cache_dtype kv_cache_dtype torch_dtype",
    "eps": "epsilon norm_eps rms_norm_eps layer_norm_eps variance_epsilon",
    "approximate": "approximation approx",
    "stage": "step qk_matmul_output_mode until",
    "method": "how mode",
    "training": "train is_training",
    "cache": "kv_cache past_key_value past_key_values layer_past past_kv",
    "x": "input inputs a arr array logits scores hidden_states",
    "scores": "x input inputs a arr array logits",
    "T_q": "seqlen_q num_queries n n_queries seq_len size tgt_len",
    "T_k": "seqlen_k num_keys n_keys kv_len src_len",
    "num_heads": "n_heads heads n_head nhead num_attention_heads n",
    "num_kv_groups": "num_kv_heads n_kv_heads num_key_value_heads kv_heads kv_num_heads n_kv_groups",
    "num_kv_heads": "num_kv_groups n_kv_heads num_key_value_heads kv_heads kv_num_heads num_heads heads n_heads",
    "d_in": "in_features d_input input_dim in_dim emb_dim d_model",
    "d_out": "out_features d_output output_dim out_dim",
    "context_length": "block_size max_len max_seq_len max_length max_position_embeddings n_positions ctx_len n_ctx",
    "max_len": "max_length max_seq_len context_length capacity size max_cache_len",
    "batch_shape": "batch_size batch max_batch_size",
    "head_dim": "d_k head_size d_head key_dim",
    "v_head_dim": "d_v value_dim head_dim_v",
    "n": "threads num_threads n_threads nthreads limits intra_op_num_threads",
    "weights": "attn_weights attention scores matrix attentions probs",
    "tokens": "labels words key_tokens xticklabels",
    "query_tokens": "yticklabels",
    "cmap": "colormap colours colors",
    "titles": "title names",
    "total": "window window_size size n",
    "outs": "outputs outs_list",
    "lses": "logsumexps lse_list",
}  # fmt: skip
_RIGHT_NAMES: dict[str, list[str]] = {}
for _right, _others in _OTHERS.items():
    for _other in _others.split():
        _RIGHT_NAMES.setdefault(_other, []).append(_right)

# Names without a counterpart: pairs of the parameter that a function has if the advice applies ("" for any), and the
# advice.
_ALWAYS_CAUSAL = [("query", "causal_attention is always causal"), ("context_length", "the class is always causal")]
_NO_MASK = [("cache", "the classes take no mask, but scaled_dot_product_attention does")]
_SCALES = {
    f"{prefix}_{word}": [(name, f"pass {name}=cattn.Quantized({name}, scale)")]
    for name in ("key", "value", "weight")
    for prefix in (name, name[0])
    for word in ("scale", "descale")
}
_PACKED = [
    ("query_tangent", "packed sequences have no tangents: call it for each sequence"),
    ("grad_out", "varlen_attention_backward takes packed sequences"),
    ("statistics", "varlen_attention_statistics takes packed sequences"),
    ("query", "varlen_attention takes packed sequences"),
]
_HEADS_ARE_AN_AXIS = [
    (
        "query",
        "heads are an axis of the arrays, (B, num_heads, T, head_dim); cattn.MultiHeadAttention splits them itself",
    )
]
_ADVICE: dict[str, list[tuple[str, str]]] = {
    "temperature": [("query", "pass scale=1 / (temperature * head_dim**0.5)"), ("scale", "pass scale=1 / temperature")],
    "key_padding_mask": [
        (
            "key_value_seq_lengths",
            "pass key_value_seq_lengths, or attn_mask=~key_padding_mask[:, None, None, :] (True = visible)",
        ),
        ("mask", "pass mask=~key_padding_mask[:, None, None, :] (True = visible)"),
        *_NO_MASK,
    ],
    "is_causal": _ALWAYS_CAUSAL,
    "causal": _ALWAYS_CAUSAL,
    "mask": _NO_MASK,
    "attn_mask": _NO_MASK,
    "attention_mask": _NO_MASK,
    "partial_rotary_factor": [("rotary_dim", "pass rotary_dim=int(partial_rotary_factor * D)")],
    "rotary_pct": [("rotary_dim", "pass rotary_dim=int(rotary_pct * D)")],
    "cos": [("theta", "rope computes cosines and sines itself, from positions and theta")],
    "sin": [("theta", "rope computes cosines and sines itself, from positions and theta")],
    "is_neox_style": [("interleaved", "pass interleaved=not is_neox_style")],
    "normalized_shape": [("eps", "the last axis is normalised")],
    "inplace": [("x", "pass out=x")],
    "embed_dim": [("d_in", "pass d_in and d_out, which are both embed_dim in PyTorch")],
    "batch_first": [("d_in", "x is always (B, T, d_in) or (T, d_in)")],
    "training": [("dropout_p", "dropout is always applied; pass dropout_p=0.0 outside of training")],
    "deterministic": [("dropout_p", "dropout is always applied; pass dropout_p=0.0 outside of training")],
    **_SCALES,
    "block_size": [("block_mask", "pass block_mask=cattn.BlockMask(blocks, block_size)")],
    "dtype": [("query", "convert the arrays first"), ("x", "convert x first"), ("scores", "convert scores first")],
    "device": [("", "cattn computes on the CPU")],
    **dict.fromkeys(("cu_seqlens", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"), _PACKED),
    "num_heads": _HEADS_ARE_AN_AXIS,
    "n_heads": _HEADS_ARE_AN_AXIS,
    "nhead": _HEADS_ARE_AN_AXIS,
}

# What people look for in the package itself: names of other libraries, and of the field.
_ELSEWHERE = {
    "scaled_dot_product_attention": "sdpa attn attention Attention dot_product_attention flash_attention "
    "flash_attn_func",
    "causal_attention": "causal_self_attention masked_attention",
    "MultiHeadAttention": "MultiheadAttention multi_head_attention MHA",
    "CausalAttention": "CausalSelfAttention",
    "SelfAttention_v2": "SelfAttention self_attention",
    "plot_attention": "plot plot_weights heatmap",
    "view_attention": "view show_attention bertviz",
    "attention_statistics": "statistics",
    "causal_mask": "tril triu",
    "KVCache": "Cache cache_ DynamicCache",
    "testing.diagnose": "diagnose",
    "testing.assert_attention_close": "assert_attention_close",
    "rope": "rotary rotary_embedding apply_rotary_pos_emb",
    "functional.silu": "swish",
}
# The public names of the integrations, which cannot be asked without their libraries. tests/api/test_names.py compares.
INTEGRATIONS = {
    "torch": "Seen batch_invariant causal_conv choose_keys linear_attention nn scaled_dot_product_attention use_cattn",
    "transformers": "AttentionMask register set_attn_implementation",
    "jax": "dot_product_attention",
    "keras": "use_cattn",
    "dask": "attention linear_attention",
    "onnx": "Attention AttentionOutputs CausalConvWithState LinearAttention attention causal_conv_with_state "
    "linear_attention",
}


def _plain(name: str) -> str:
    return name.lower().replace("_", "")


def _places(own: Iterable[str], modules: Mapping[str, Iterable[str]]) -> list[tuple[str, str]]:
    """Return what people ask the package for, and where it is: its own names first, names of integrations last."""
    return [
        *((name, name) for name in own),
        *((other, right) for right, others in _ELSEWHERE.items() for other in others.split()),
        *((name, name) for name in ("cache", "functional", "integrations", "nn", "random")),
        *((name, f"{module}.{name}") for module, found in modules.items() for name in found),
        *((module, f"integrations.{module}") for module in INTEGRATIONS),
        *((n, f"integrations.{module}.{n}") for module, names in INTEGRATIONS.items() for n in names.split()),
    ]


def no_attribute(name: str, own: Iterable[str], modules: Mapping[str, Iterable[str]]) -> AttributeError:
    """Return the error for a name that the package lacks, with the place where it is, or a similar name.

    `own` has the public names of the package, and `modules` has those of its modules.
    """
    import difflib  # imported here, because only errors need it

    spelled: dict[str, str] = {}
    plain: dict[str, str] = {}  # by the letters alone
    for other, place in _places(own, modules):
        spelled.setdefault(other, place)
        plain.setdefault(_plain(other), place)
    near = difflib.get_close_matches(_plain(name), plain, n=1, cutoff=0.85)
    right = spelled.get(name) or plain.get(_plain(name)) or (plain[near[0]] if near else None)
    hint = "" if right is None or right == name else f": did you mean cattn.{right}?"
    return AttributeError(f"module 'cattn' has no attribute {name!r}{hint}")


def no_name(module: Mapping[str, Any]) -> Callable[[str], NoReturn]:
    """Return the ``__getattr__`` of a module: an error that says what the module has."""

    def raise_error(name: str) -> NoReturn:
        has = ", ".join(module["__all__"])
        raise AttributeError(f"module {module['__name__']!r} has no attribute {name!r}: it has {has}")

    return raise_error


def public_names(module: Mapping[str, Any]) -> Callable[[], list[str]]:
    """Return the ``__dir__`` of a module: its public names, and the names that Python gives it."""
    return lambda: sorted({*module["__all__"], *(name for name in module if name.startswith("__"))})


_UNKNOWN = re.compile(r"(?P<text>.* got an unexpected keyword argument '(?P<name>.*?)')")


def _hint(name: str, parameters: Sequence[str]) -> str:
    """Return the hint for an unknown keyword, or ""."""
    by_lower = {parameter.lower(): parameter for parameter in parameters}
    same = by_lower.get(name.lower())
    right = same or next((right for right in _RIGHT_NAMES.get(name.lower(), ()) if right in parameters), None)
    advice = next((advice for needed, advice in _ADVICE.get(name, ()) if needed in ("", *parameters)), None)
    if right is None and advice is not None:
        return advice
    if right is None:
        import difflib  # imported here, because only errors need it

        close = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=0.7)
        right = by_lower[close[0]] if close else None
    return "" if right is None else f"did you mean {right!r}?"


def _missing_advice(text: str, function: str, given: list[object]) -> str:
    """Return the hint for positional arguments that are too few or too many, or ""."""
    if "KVCache.fork() takes " in text:
        return "it makes one copy; pass [cache.fork() for _ in range(n)] for n of them"
    if " missing " not in text:
        return ""
    first = given[0] if len(given) == 1 else None
    if isinstance(first, (tuple, list)) and len(first) > 1 and all(hasattr(each, "shape") for each in first):
        return f"unpack the {type(first).__name__}, {function}(*arrays)"
    if given and ("'out' and 'lse'" in text or "'out', 'lse'" in text):
        return "out and lse are results of the forward call, with return_lse=True"
    return ""


def add_hint(error: TypeError, function: Callable[..., Any], given: Iterable[object] = ()) -> None:
    """Add a hint to the error, raised by a call of this Python function, if its arguments did not bind.

    The hint is about an unknown keyword, or about an object of cattn among those given that does not go there.
    """
    traceback = error.__traceback__
    if traceback is None or traceback.tb_next is not None:  # raised inside the function: its arguments did bind
        return
    stranger = next((type(each) for each in given if hasattr(type(each), "_instead")), None)
    if stranger is not None and " missing " in str(error) and not str(error).startswith(f"{stranger.__name__}."):
        error.args = (f"{error}, and got a {stranger.__name__}: {stranger._instead}",)  # type: ignore[attr-defined]
        return
    advice = _missing_advice(str(error), function.__name__, list(given))
    if advice:
        error.args = (f"{error}: {advice}",)
        return
    unknown = _UNKNOWN.match(str(error))
    if unknown is None:
        return
    code = function.__code__
    parameters = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    hint = why_refused(function, unknown["name"]) or _hint(
        unknown["name"], [parameter for parameter in parameters if parameter != "self"]
    )
    if hint:
        error.args = (f"{unknown['text']}: {hint}",)  # in the place of the hint that Python 3.13 adds


def with_hints(function: Callable[P, R]) -> Callable[P, R]:
    """Make the TypeError of an unknown keyword suggest the right one."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except TypeError as error:
            add_hint(error, function, (*args, *kwargs.values()))
            raise

    return call
