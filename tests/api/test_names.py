"""An unknown keyword: the TypeError suggests cattn's name, in every public function and class, and nowhere else."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import cattn
from cattn import functional
from cattn._input import names
from cattn._input.names import with_hints
from support import find, looped
from support.rows import IN_C, parameters_of, working

X = np.ones((4, 3), np.float32)
attend = functools.partial(cattn.scaled_dot_product_attention, X, X, X)
causal = functools.partial(cattn.causal_attention, X, X, X)
LAYER = cattn.CausalAttention(3, 2, 8, 0.0, rng=1)
MULTI_HEAD = functools.partial(cattn.MultiHeadAttention, 4, 4, 8, 0.0, 2)

CASES: list[tuple[Callable[..., Any], str, str]] = [
    # PyTorch
    (attend, "causal", "did you mean 'is_causal'?"),
    (attend, "mask", "did you mean 'attn_mask'?"),
    (attend, "dropout", "did you mean 'dropout_p'?"),
    (attend, "generator", "did you mean 'rng'?"),
    (attend, "seed", "did you mean 'rng'?"),
    (attend, "key_padding_mask", "pass key_value_seq_lengths, or attn_mask=~key_padding_mask[:, None, None, :] "),
    (functools.partial(cattn.masked_softmax, X), "key_padding_mask", "pass mask=~key_padding_mask[:, None, None, :] "),
    (functools.partial(cattn.softmax, X), "dim", "did you mean 'axis'?"),
    (functools.partial(cattn.softmax, X), "dtype", "convert x first"),
    (functools.partial(cattn.softmax, X), "mask", "did you mean 'where'?"),
    (functools.partial(cattn.masked_softmax, X), "dim", "did you mean 'axis'?"),
    (functools.partial(cattn.masked_softmax, X), "attn_mask", "did you mean 'mask'?"),
    (functools.partial(cattn.softmax_backward, X, X), "dim", "did you mean 'axis'?"),
    (functools.partial(cattn.dropout, X), "dropout_p", "did you mean 'p'?"),
    (functools.partial(cattn.dropout, X), "train", "did you mean 'training'?"),
    (functools.partial(cattn.dropout, X), "return_dropout_mask", "did you mean 'return_mask'?"),
    (functools.partial(cattn.dropout_backward, X), "generator", "did you mean 'rng'?"),
    (cattn.Linear, "in_features", "did you mean 'd_in'?"),
    (functools.partial(cattn.Linear, 3), "out_features", "did you mean 'd_out'?"),
    (functools.partial(cattn.Linear, 3, 2), "device", "cattn computes on the CPU"),
    (MULTI_HEAD, "bias", "did you mean 'qkv_bias'?"),
    (MULTI_HEAD, "batch_first", "x is always (B, T, d_in) or (T, d_in)"),
    (cattn.MultiHeadAttention, "embed_dim", "pass d_in and d_out, which are both embed_dim in PyTorch"),
    (functools.partial(LAYER, X), "need_weights", "did you mean 'return_weights'?"),
    (functools.partial(LAYER, X), "attn_mask", "the classes take no mask, but scaled_dot_product_attention does"),
    (cattn.TorchGenerator, "generator", "did you mean 'seed'?"),
    (cattn.manual_seed, "sead", "did you mean 'seed'?"),
    # JAX and Flax, Keras and TensorFlow, onnxruntime, FlashAttention, Hugging Face
    (attend, "local_window_size", "did you mean 'window_size'?"),
    (attend, "return_residual", "did you mean 'return_lse'?"),
    (attend, "dropout_rng", "did you mean 'rng'?"),
    (attend, "deterministic", "dropout is always applied; pass dropout_p=0.0 outside of training"),
    (attend, "use_causal_mask", "did you mean 'is_causal'?"),
    (attend, "return_attention_scores", "did you mean 'return_weights'?"),
    (attend, "unidirectional", "did you mean 'is_causal'?"),
    (attend, "softmax_scale", "did you mean 'scale'?"),
    (attend, "s_aux", "did you mean 'sinks'?"),
    (attend, "output_attentions", "did you mean 'return_weights'?"),
    (attend, "return_attention", "did you mean 'return_weights'?"),
    (functools.partial(LAYER, X), "past_key_values", "did you mean 'cache'?"),
    (MULTI_HEAD, "num_key_value_heads", "did you mean 'num_kv_groups'?"),
    # other words
    (attend, "temperature", "pass scale=1 / (temperature * head_dim**0.5)"),
    (functools.partial(cattn.softmax, X), "temperature", "pass scale=1 / temperature"),
    (causal, "is_causal", "causal_attention is always causal"),
    (MULTI_HEAD, "causal", "the class is always causal"),
    (causal, "window", "did you mean 'window_size'?"),
    (cattn.set_num_threads, "threads", "did you mean 'n'?"),
    (cattn.num_threads, "limits", "did you mean 'n'?"),
    (functools.partial(cattn.causal_mask, 3), "kv_len", "did you mean 'T_k'?"),
    (functools.partial(cattn.show_mask, 3), "mask", "did you mean 'attn_mask'?"),
    (cattn.sliding_window, "window", "did you mean 'total'?"),
    (cattn.get_alibi_slopes, "heads", "did you mean 'num_heads'?"),
    (functools.partial(cattn.merge_attention, [X]), "logsumexps", "did you mean 'lses'?"),
    (functools.partial(cattn.plot_attention, X), "labels", "did you mean 'tokens'?"),
    (functools.partial(cattn.KVCache, 1), "n_heads", "did you mean 'num_kv_heads'?"),
    (functools.partial(cattn.explain, X, X, X), "causal", "did you mean 'is_causal'?"),
    (functools.partial(cattn.explain, X, X, X), "out", "nothing is computed"),
    (functools.partial(cattn.attention_weights, X, X), "until", "did you mean 'stage'?"),
    (functools.partial(cattn.attention_backward, X, X, X, X, X), "logsumexp", "did you mean 'lse'?"),
    (functools.partial(cattn.varlen_attention, X, X, X), "cu_seqlens", "did you mean 'cu_seqlens_q'?"),
    (functools.partial(cattn.attention_jvp, X, X, X), "query_tangents", "did you mean 'query_tangent'?"),
    (functools.partial(cattn.attention_jvp_backward, *[X] * 8), "bias_tangents", "did you mean 'bias_tangent'?"),
    (attend, "cu_seqlens_q", "varlen_attention takes packed sequences"),
    (functools.partial(cattn.attention_backward, *[X] * 6), "max_seqlen_k", "varlen_attention_backward takes packed"),
    (functools.partial(cattn.attention_jvp, X, X, X), "cu_seqlens_q", "packed sequences have no tangents: call it for"),
    (functools.partial(cattn.attention_jvp_backward, *[X] * 8), "cu_seqlens_k", "packed sequences have no tangents"),
    (functools.partial(cattn.attention_statistics, X, X), "cu_seqlens", "varlen_attention_statistics takes packed"),
    (functools.partial(cattn.varlen_attention_backward, *[X] * 6), "cu_seqlens", "did you mean 'cu_seqlens_q'?"),
    (functools.partial(cattn.attention_statistics, X, X), "causal", "did you mean 'is_causal'?"),
    (functools.partial(cattn.varlen_attention_statistics, X, X), "cu_seqlens", "did you mean 'cu_seqlens_q'?"),
    (functools.partial(cattn.head_scores, X), "token_id", "did you mean 'token_ids'?"),
    (functools.partial(cattn.attention_rollout, X), "residuals", "did you mean 'residual'?"),
    # rotary positions and RMS norm
    (functools.partial(cattn.rope, X), "position_ids", "did you mean 'positions'?"),
    (functools.partial(cattn.rope, X), "base", "did you mean 'theta'?"),
    (functools.partial(cattn.rope, X), "rope_scaling", "did you mean 'scaling'?"),
    (functools.partial(cattn.rope, X), "traditional", "did you mean 'interleaved'?"),
    (functools.partial(cattn.rope, X), "partial_rotary_factor", "pass rotary_dim=int(partial_rotary_factor * D)"),
    (functools.partial(cattn.rope, X), "cos", "rope computes cosines and sines itself, from positions and theta"),
    (functools.partial(cattn.rope, X), "is_neox_style", "pass interleaved=not is_neox_style"),
    (functools.partial(cattn.rms_norm, X), "epsilon", "did you mean 'eps'?"),
    (functools.partial(cattn.rms_norm, X), "gamma", "did you mean 'weight'?"),
    (functools.partial(cattn.rms_norm, X), "normalized_shape", "the last axis is normalised"),
    # the layers around attention
    (functools.partial(functional.layer_norm, X), "normalized_shape", "the last axis is normalised"),
    (functools.partial(functional.layer_norm, X), "beta", "did you mean 'bias'?"),
    (functools.partial(functional.linear, X), "gamma", "did you mean 'weight'?"),
    (functools.partial(functional.gelu, X), "approximation", "did you mean 'approximate'?"),
    (functools.partial(functional.gelu_backward, X, X), "inplace", "pass out=x"),
    (functools.partial(functional.silu, X), "inplace", "pass out=x"),
    # keys and values in 8 bits
    (functools.partial(cattn.quantize, X), "dim", "did you mean 'axis'?"),
    (functools.partial(cattn.quantize, X), "quant_dtype", "did you mean 'dtype'?"),
    (functools.partial(cattn.dequantize, X), "scales", "did you mean 'scale'?"),
    (attend, "key_scale", "pass key=cattn.Quantized(key, scale)"),
    (attend, "v_descale", "pass value=cattn.Quantized(value, scale)"),
    (functools.partial(cattn.Quantized, X), "scales", "did you mean 'scale'?"),
    # blocks
    (attend, "block_size", "pass block_mask=cattn.BlockMask(blocks, block_size)"),
    (functools.partial(cattn.BlockMask, X), "block_size", "did you mean 'size'?"),
    (functools.partial(cattn.view_attention, X), "labels", "did you mean 'tokens'?"),
    (cattn.AttentionView, "content", "did you mean 'contents'?"),
    # linear attention
    (functools.partial(cattn.linear_attention, X, X, X), "initial_state", "did you mean 'state'?"),
    (functools.partial(cattn.linear_attention, X, X, X), "g", "did you mean 'decay'?"),
    (functools.partial(cattn.linear_attention, X, X, X), "softcap", "linear attention has a state, and no scores"),
    (functools.partial(cattn.functional.linear_attention_backward, X, X, X, X), "dht", "did you mean 'grad_state'?"),
    (functools.partial(cattn.functional.causal_conv, X, X), "conv_state", "did you mean 'state'?"),
    (functools.partial(cattn.functional.causal_conv_backward, X, X, X), "act", "did you mean 'activation'?"),
    (functools.partial(cattn.choose_keys, X, X, 1), "top_k", "did you mean 'count'?"),
    (functools.partial(cattn.choose_keys, X, X, 1), "key_indices", "pass a boolean attn_mask"),
    # slips
    (attend, "is_casual", "did you mean 'is_causal'?"),
    (attend, "Return_weights", "did you mean 'return_weights'?"),
    (attend, "need_weights", "did you mean 'return_weights'?"),
    (functools.partial(cattn.causal_mask, 3), "t_k", "did you mean 'T_k'?"),
    (functools.partial(cattn.dropout_backward, X), "maks", "did you mean 'mask'?"),
]


@pytest.mark.promise("errors")
@looped("function, word, hint", CASES, ids=lambda case: case[1])
def test_an_unknown_keyword_gets_a_hint(function: Callable[..., Any], word: str, hint: str) -> None:
    with pytest.raises(TypeError, match=rf"got an unexpected keyword argument '{word}': {re.escape(hint)}"):
        function(**{word: 1})


@looped("name", IN_C)
def test_a_slip_in_the_longest_name_of_a_function_of_c_gets_it(name: str) -> None:
    right = max(parameters_of(name), key=len)
    with pytest.raises(TypeError, match=rf"got an unexpected keyword argument '{right}_': did you mean '{right}'\?"):
        find(name)(**working(name), **{f"{right}_": 1})


def test_every_public_function_and_class_gives_hints() -> None:
    called = {getattr(function, "func", function) for function, _, _ in CASES} | {find(name) for name in IN_C}
    callables = {name: find(name) for name in {*cattn.__all__, *cattn.functional.__all__}}
    with_arguments = {
        name
        for name, value in callables.items()
        if callable(value) and not (isinstance(value, type) and issubclass(value, (tuple, Warning)))
    }
    covered = {name for name in with_arguments if callables[name] in called}
    same_decorator = {"Dropout", "SelfAttention_v1", "SelfAttention_v2", "CausalAttention", "MultiHeadAttentionWrapper"}
    assert with_arguments - covered - same_decorator == {"get_num_threads", "show_config"}
    for name in same_decorator:
        with pytest.raises(TypeError, match=r": did you mean 'rng'\?"):
            callables[name](1, 1, 1, 0.1, 1, seed=1) if "Causal" in name or "Multi" in name else callables[name](
                *(1, 1)[: 1 if name == "Dropout" else 2], seed=1
            )


@pytest.mark.parametrize("word", ["nonsense", "xyz", "foo_bar"])
def test_a_word_without_a_counterpart_gets_no_hint(word: str) -> None:
    for function in (attend, functools.partial(cattn.softmax, X), cattn.MultiHeadAttention, cattn.sliding_window):
        with pytest.raises(TypeError, match=rf"got an unexpected keyword argument '{word}'$"):
            function(**{word: 1})


def test_other_errors_stay_as_they_are() -> None:
    with pytest.raises(TypeError, match=r"^sliding_window\(\) missing 1 required positional argument: 'total'$"):
        cattn.sliding_window()  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"multiple values for argument 'total'$"):
        cattn.sliding_window(3, total=3)  # type: ignore[misc]

    @with_hints
    def outer(mask: object) -> None:
        inner(mask=mask)  # type: ignore[call-arg]

    def inner(attn_mask: object) -> None: ...

    with pytest.raises(TypeError, match=r"unexpected keyword argument 'mask'$"):
        outer(mask=1)
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'attn_mask': did you mean 'mask'\?$"):
        outer(attn_mask=1)  # type: ignore[call-arg]


def test_the_hint_takes_the_place_of_pythons_own() -> None:
    """Python 3.13 and later suggest a name too."""

    def function(attn_mask: object) -> None: ...

    with pytest.raises(TypeError) as caught:
        raise TypeError("function() got an unexpected keyword argument 'mask'. Did you mean 'value'?")
    names.add_hint(caught.value, function)
    assert str(caught.value) == "function() got an unexpected keyword argument 'mask': did you mean 'attn_mask'?"


def test_the_table_names_parameters_of_the_public_functions_and_classes() -> None:
    parameters: set[str] = {*inspect.signature(LAYER).parameters}
    for name in {*cattn.__all__, *cattn.functional.__all__}:
        value = find(name)
        if callable(value) and not (isinstance(value, type) and issubclass(value, Warning)):
            parameters |= set(inspect.signature(value).parameters)
    assert set(names._OTHERS) <= parameters
    for right, others in names._OTHERS.items():
        assert right not in others.split()
        assert len(set(others.split())) == len(others.split())
    assert {needed for pairs in names._ADVICE.values() for needed, _ in pairs if needed} <= parameters


def test_decorated_functions_keep_their_signature_and_source() -> None:
    for function in (cattn.sliding_window, cattn.merge_attention, cattn.plot_attention):
        assert function.__name__ in inspect.getsource(function)
    assert list(inspect.signature(cattn.Linear).parameters) == ["d_in", "d_out", "bias", "dtype", "rng"]


# ---- other hints -----------------------------------------------------------------------------------------------------
def test_a_generator_of_pytorch_is_refused_with_its_counterpart() -> None:
    torch = pytest.importorskip("torch")
    generator = torch.Generator().manual_seed(123)
    for call in (
        lambda: cattn.dropout(X, 0.5, rng=generator),
        lambda: attend(dropout_p=0.5, rng=generator),
        lambda: cattn.Dropout(0.5, rng=generator),
        lambda: cattn.Linear(3, 2, rng=generator),
    ):
        with pytest.raises(
            TypeError, match=r"^rng must be .*, got a torch.Generator: pass cattn.TorchGenerator\(123\)"
        ):
            call()


def test_the_module_numpy_random_is_refused_with_a_generator() -> None:
    for call in (lambda: attend(dropout_p=0.5, rng=np.random), lambda: cattn.Dropout(0.5, rng=np.random)):  # type: ignore[arg-type]
        with pytest.raises(TypeError, match=r"^rng must be .*, got the module .*: pass numpy.random.default_rng\(\)$"):
            call()


@pytest.mark.parametrize(
    ("shape", "mask", "index"),
    [
        ((2, 5, 8), (2, 5), "[:, None, :]"),
        ((2, 3, 5, 8), (2, 5), "[:, None, None, :]"),
        ((2, 3, 4, 5, 8), (2, 5), "[:, None, None, None, :]"),
    ],
)
def test_a_mask_of_padding_is_refused_with_its_cure(shape: tuple[int, ...], mask: tuple[int, ...], index: str) -> None:
    x, m = np.ones(shape, np.float32), np.ones(mask, bool)
    query = x[..., :4, :]
    text = f": to hide keys of whole batch entries pass {{}}{index}"
    with pytest.raises(ValueError, match=re.escape(text.format("attn_mask")) + ", or key_value_seq_lengths$"):
        cattn.scaled_dot_product_attention(query, x, x, m)
    with pytest.raises(ValueError, match=re.escape(text.format("bias")) + "$"):
        cattn.scaled_dot_product_attention(query, x, x, bias=m.astype(np.float32))
    with pytest.raises(ValueError, match=re.escape(text.format("mask")) + "$"):
        cattn.masked_softmax(np.ones((*query.shape[:-1], 5), np.float32), m)
    cured = eval(f"m{index}")
    lengths = np.full(shape[: -3 if len(shape) > 3 else 1], 5)
    np.testing.assert_array_equal(
        cattn.scaled_dot_product_attention(query, x, x, cured),
        cattn.scaled_dot_product_attention(query, x, x, key_value_seq_lengths=lengths),
    )


@pytest.mark.parametrize(
    ("shape", "mask"),
    [((5, 8), (2, 5)), ((2, 3, 4, 2, 5, 8), (2, 5)), ((2, 3, 5, 8), (3, 5)), ((2, 3, 5, 8), (2, 6)), ((2, 5, 8), (7,))],
)
def test_other_masks_that_do_not_fit_get_no_cure(shape: tuple[int, ...], mask: tuple[int, ...]) -> None:
    x = np.ones(shape, np.float32)
    with pytest.raises(ValueError, match=r"does not broadcast to the scores' shape \([\d, ]*\)$"):
        cattn.scaled_dot_product_attention(x[..., :4, :], x, x, np.ones(mask, bool))


def test_errors_that_swapped_axes_explain_say_so() -> None:
    x = np.ones((2, 16, 4, 8), np.float32)  # 16 tokens, 4 heads
    hint = (
        r"if the arrays are \(\.\.\., tokens, heads, head_dim\), pass query\.swapaxes\(-3, -2\) and so on, "
        r"or layout='bthd'$"
    )
    for mask in (np.ones((16, 16), bool), np.ones((2, 1, 1, 16), bool), np.zeros((16, 16))):
        with pytest.raises(ValueError, match="does not broadcast.*: " + hint):
            cattn.scaled_dot_product_attention(x, x, x, mask)
        swapped = x.swapaxes(-3, -2)
        assert cattn.scaled_dot_product_attention(swapped, swapped, swapped, mask, rng=None).shape == (2, 4, 16, 8)
    with pytest.raises(ValueError, match=r"16 heads .* query's a multiple; " + hint):
        cattn.scaled_dot_product_attention(x, x[:, :11], x[:, :11])
    for wrong, arrays in (
        (r"query's a multiple$", (x, np.ones((2, 11, 5, 8)), np.ones((2, 11, 5, 8)))),
        (r"scores' shape \(2, 16, 4, 4\)$", (x, x, x, np.ones((5, 5), bool))),
        (r"scores' shape \(2, 4, 4\)$", (x[:, 0], x[:, 0], x[:, 0], np.ones((5, 2), bool))),
    ):
        with pytest.raises(ValueError, match=wrong):
            cattn.scaled_dot_product_attention(*arrays)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"scores' shape \(2, 16, 4, 4\)$"):
        cattn.masked_softmax(np.ones((2, 16, 4, 4)), np.ones((16, 16), bool))


@pytest.mark.parametrize("kind", ["mha", "v2", "wrapper"])
def test_a_state_with_other_biases_says_how_to_make_the_class(kind: str) -> None:
    def make(bias: bool) -> Any:
        if kind == "v2":
            return cattn.SelfAttention_v2(4, 4, bias, rng=1)
        cls = cattn.MultiHeadAttention if kind == "mha" else cattn.MultiHeadAttentionWrapper
        return cls(4, 4, 8, 0.0, 2, qkv_bias=bias, rng=1)

    with pytest.raises(ValueError, match=r"unexpected: .*; make the class with qkv_bias=True$"):
        make(False).load_state_dict(make(True).state_dict())
    with pytest.raises(ValueError, match=r"missing: .*; make the class with qkv_bias=False$"):
        make(True).load_state_dict(make(False).state_dict())


def test_the_state_of_pytorchs_class_says_how_to_make_the_class() -> None:
    torch = pytest.importorskip("torch")
    state = torch.nn.MultiheadAttention(4, 2).state_dict()
    with pytest.raises(ValueError, match=r"unexpected: in_proj_bias; make the class with qkv_bias=True$"):
        MULTI_HEAD().load_state_dict(state)
    MULTI_HEAD(qkv_bias=True).load_state_dict(state)


@pytest.mark.parametrize("extra", ["out_proj.bias", "in_proj.bias"])
def test_other_biases_get_no_hint(extra: str) -> None:
    layer = cattn.SelfAttention_v1(4, 4, rng=1)
    with pytest.raises(ValueError, match=f"unexpected: {extra}$"):
        layer.load_state_dict({**layer.state_dict(), extra: np.ones(12)})
    both = cattn.SelfAttention_v2(4, 4, True, rng=1)
    state = {name: value for name, value in both.state_dict().items() if name != "W_key.bias"}
    with pytest.raises(ValueError, match=r"missing: W_key\.bias$"):
        both.load_state_dict(state)


def test_plot_attention_takes_the_weights_of_a_result() -> None:
    pytest.importorskip("matplotlib")
    result = causal(return_weights=True)
    image = cattn.plot_attention(result).images[0].get_array()
    np.testing.assert_array_equal(np.asarray(image.filled(0)), result.weights)
    with pytest.raises(TypeError, match=r"^weights is an AttentionOutput without weights: .*return_weights=True"):
        cattn.plot_attention(causal(return_lse=True))
