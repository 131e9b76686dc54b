"""cattn as an attention backend of Hugging Face transformers; eager attention is the oracle."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import cattn
from support import looped

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
from transformers import masking_utils  # noqa: E402

from cattn.integrations import _eager_attention  # noqa: E402
from cattn.integrations import transformers as backend  # noqa: E402
from support.hf_models import MODELS, RECURRENT, SHORT, VOCABULARY, Model  # noqa: E402

backend.register()

# Largest differences in float32, of numbers of about 1: eager sums in another order, in each of two layers.
LOGITS, GRADIENTS = 3e-6, 5e-6
SIDES, CACHES = (None, "left", "right", "both", "middle"), ("dynamic", "static")


def each(argument: str, short: dict[str, tuple[Any, ...]], values: tuple[Any, ...]) -> Any:
    """Parametrise by models and the values of an argument; those that are not in `short` are marked long."""
    cases = [(name, value) for name in MODELS for value in values]
    return pytest.mark.parametrize(
        ("name", argument),
        [pytest.param(*case, marks=() if case[1] in short.get(case[0], ()) else pytest.mark.long) for case in cases],
    )


def make(name: str, **sizes: Any) -> Any:
    """Return a tiny random model in evaluation mode."""
    torch.manual_seed(0)
    model = (MODELS | RECURRENT)[name]
    config = getattr(transformers, model.config)(**model.sizes | sizes)
    module = getattr(transformers, model.model)(config).eval()
    with torch.no_grad():
        for parameter in module.parameters():  # with the initial ones attention would be nearly uniform
            if parameter.ndim > 1 and parameter.std() < 0.05:
                parameter.mul_(4)
    return module


def padding(side: str | None, tokens: int = 11) -> Any:
    """Return the mask of two sequences, of which one at least has padding on this side."""
    mask = torch.ones(2, tokens, dtype=torch.long)
    if side in ("left", "both"):
        mask[0, :4] = 0
    if side in ("right", "both"):
        mask[1, -3:] = 0
    if side == "middle":
        mask[0, 6:8] = 0
    return mask


def inputs_of(model: Model, side: str | None) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, VOCABULARY, (2, 11), generator=generator)
    image = torch.randn(2, 3, 16, 16, generator=generator)
    if model.kind == "vision":
        return {"pixel_values": image}
    if model.kind == "audio pair":
        features = torch.randn(2, 8, 24, generator=generator)
        return {"input_features": features, "decoder_input_ids": ids[:, :7]}
    found = {"input_ids": ids}
    if side is not None:
        found["attention_mask"] = padding(side)
    if model.kind == "pair":
        found["decoder_input_ids"] = ids[:, :7]
    if model.kind == "two towers":
        found["pixel_values"] = image
    return found


def run(module: Any, implementation: str, **inputs: Any) -> Any:
    module.set_attn_implementation(implementation)
    assert module.config._attn_implementation == implementation
    return module(**inputs)


def numbers(model: Model, result: Any, mask: Any) -> Any:
    """Return the outputs at all tokens that are not padding, as one vector."""
    if model.kind == "two towers":
        return torch.cat([result.text_embeds.flatten(), result.image_embeds.flatten()])
    found = result.last_hidden_state if model.kind in ("encoder", "vision") else result.logits
    if mask is not None and found.shape[1] == mask.shape[1]:
        return found[mask.bool()].flatten()
    return found.flatten()


@pytest.mark.promise("transformers")
@each("side", dict.fromkeys(SHORT, ("both",)) | {"whisper": (None,), "gpt2": ("left",)}, SIDES)
def test_outputs_and_gradients_are_those_of_eager_attention(name: str, side: str | None) -> None:
    model = MODELS[name]
    if side is not None and model.kind in ("vision", "audio pair"):
        pytest.skip("no padding")
    module, inputs = make(name), inputs_of(model, side)
    mask = inputs.get("attention_mask")
    found, gradients = [], []
    for implementation in (model.oracle, "cattn"):
        found.append(numbers(model, run(module, implementation, **inputs), mask))
        module.zero_grad()
        weights = torch.randn(found[-1].shape, generator=torch.Generator().manual_seed(2))
        (found[-1] * weights).sum().backward()
        gradients.append({k: p.grad.clone() for k, p in module.named_parameters() if p.grad is not None})
    scale = max(1.0, found[0].abs().max().item())
    assert (found[0] - found[1]).abs().max() <= LOGITS * scale
    assert set(gradients[0]) == set(gradients[1])
    largest = max(grad.abs().max().item() for grad in gradients[0].values())
    for key, grad in gradients[0].items():
        assert (grad - gradients[1][key]).abs().max() <= GRADIENTS * largest, key


GENERATED = {"llama": ("dynamic",), "gemma2": ("static",), "t5": ("dynamic",)}
GENERATED |= dict.fromkeys(("deepseek_v32", "deepseek_v4", "minimax_m3"), ("dynamic",))


@each("cache", GENERATED, CACHES)
def test_greedy_tokens_are_those_of_eager_attention(name: str, cache: str) -> None:
    model = MODELS[name]
    if model.kind not in ("decoder", "pair", "audio pair"):
        pytest.skip("it does not generate")
    module = make(name)
    inputs = inputs_of(model, "left" if model.kind == "decoder" else None)
    inputs.pop("decoder_input_ids", None)
    options = {"max_new_tokens": 8, "do_sample": False, "disable_compile": True, "eos_token_id": None}
    if cache == "static":
        if not module._can_compile_fullgraph:
            pytest.skip("no static cache")
        options["cache_implementation"] = "static"
    tokens = []
    for implementation in (model.oracle, "cattn"):
        module.set_attn_implementation(implementation)
        tokens.append(module.generate(**inputs, **options))
    assert torch.equal(*tokens)


# ---- masks ---------------------------------------------------------------------------------------------------------
def overlay(**numbers: Any) -> Callable[..., Any]:
    """Return a mask function of a model's own, which the tests do not take from transformers."""

    def function(batch: Any, head: Any, query: Any, key: Any) -> Any:
        return (key >= query - numbers["before"]) & (query + numbers["after"] > key - 1)

    return function


BLOCKS = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2]] * 2)
RANGES: dict[str, Callable[..., Any]] = {
    "causal": masking_utils.causal_mask_function,
    "everything": masking_utils.bidirectional_mask_function,
    "window": masking_utils.sliding_window_causal_mask_function(4),
    "window of one": masking_utils.sliding_window_causal_mask_function(1),
    "window to both sides": masking_utils.sliding_window_bidirectional_mask_function(3),
    "an intersection": masking_utils.and_masks(
        masking_utils.sliding_window_causal_mask_function(5), masking_utils.sliding_window_causal_mask_function(3)
    ),
    "another function": overlay(before=2, after=1),
}
OTHERS: dict[str, Callable[..., Any]] = {
    "a union": masking_utils.or_masks(
        masking_utils.causal_mask_function, masking_utils.sliding_window_bidirectional_mask_function(2)
    ),
    "chunks": masking_utils.chunked_causal_mask_function(4, torch.tensor([0, 2])),
    "packed sequences": masking_utils.and_masks(
        masking_utils.causal_mask_function, masking_utils.packed_sequence_mask_function(BLOCKS)
    ),
    "only later keys": lambda batch, head, query, key: key > query,
    "only earlier keys": lambda batch, head, query, key: key < query,
    "one sequence": lambda batch, head, query, key: (batch == 0) & (key <= query),
    "even keys": lambda batch, head, query, key: key % 2 == 0,
    "far keys": lambda batch, head, query, key: abs(query - key) >= 2,
}


def expand(mask: Any) -> Any:
    """Return a description as the matrix (B, 1, T_q, T_k) that cattn computes with."""
    batch, _, queries, keys = mask.shape
    options = {k: v.numpy() if isinstance(v, torch.Tensor) else v for k, v in mask.options.items()}
    extra = None if mask.attn_mask is None else mask.attn_mask.numpy()
    zeros = np.zeros((batch, 1, queries, keys))
    scores = cattn.attention_weights(zeros[..., :1], zeros[..., :1, :].swapaxes(2, 3), extra, stage="mask", **options)
    return torch.from_numpy(scores == 0)


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize(("q_length", "q_offset", "kv_offset"), [(11, 0, 0), (3, 8, 0), (1, 10, 0), (2, 9, 5)])
@looped("name", [*RANGES, *OTHERS])
def test_a_description_is_the_matrix_of_transformers(
    name: str, q_length: int, q_offset: int, kv_offset: int, side: str | None
) -> None:
    function = (RANGES | OTHERS)[name]
    arguments = {
        "batch_size": 2, "q_length": q_length, "kv_length": 11 - kv_offset, "q_offset": q_offset,
        "kv_offset": kv_offset, "mask_function": function,
        "attention_mask": None if side is None else padding(side).bool(),
    }  # fmt: skip
    wanted = masking_utils.sdpa_mask(**arguments, allow_is_causal_skip=False)
    mask = backend._make_mask(**arguments, config=None)
    assert torch.equal(expand(mask), wanted)
    tensor_offset = backend._make_mask(**arguments | {"q_offset": torch.tensor(q_offset)}, config=None)
    assert torch.equal(expand(tensor_offset), wanted)
    assert (mask.shape, mask.ndim, mask.dim(), mask.size(), mask.size(-1)) == (
        wanted.shape,
        4,
        4,
        wanted.shape,
        11 - kv_offset,
    )
    if name in RANGES:  # nothing of T x T elements; lengths and starts if they say everything
        assert (mask.attn_mask is None) == (side != "middle")
        assert mask.attn_mask is None or mask.attn_mask.shape[2] == 1
        assert ("key_value_seq_starts" in mask.options) == (side in ("left", "both") and kv_offset == 0)
        assert ("key_value_seq_lengths" in mask.options) == (side in ("right", "both"))


def test_bounds_that_hide_nothing_are_left_out() -> None:
    """A step of decoding is a call without options."""
    options = {"batch_size": 2, "kv_length": 9, "q_length": 1, "q_offset": 8, "config": None}
    assert backend._make_mask(**options).options == {}
    window = masking_utils.sliding_window_causal_mask_function
    assert backend._make_mask(**options, mask_function=window(9)).options == {}
    assert backend._make_mask(**options, mask_function=window(8)).options == {"window_size": (7, -1), "query_offset": 8}


@pytest.mark.parametrize("name", ["llama", "gemma2", "bert", "t5"])
def test_no_matrix_of_a_mask_is_made(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = make(name)
    monkeypatch.setattr(masking_utils, "sdpa_mask", None)
    for side in SIDES:
        run(module, "cattn", **inputs_of(MODELS[name], side))


@pytest.mark.promise("transformers")
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss"])
def test_generation_with_padding_on_the_left_has_no_mask(
    name: str, cache: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither for the prompt nor for a single token: the index of the first token of each sequence says it all."""
    calls, attend = [], backend.scaled_dot_product_attention

    def record(query: Any, key: Any, value: Any, attn_mask: Any, *rest: Any, **options: Any) -> Any:
        calls.append((query.shape[2], attn_mask, options.get("key_value_seq_starts")))
        return attend(query, key, value, attn_mask, *rest, **options)

    module = make(name, **{"sliding_window": 64} if name != "llama" else {})
    options: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "disable_compile": True, "eos_token_id": None}
    if cache == "static":
        options["cache_implementation"] = "static"
    inputs = inputs_of(MODELS[name], "left")
    right = module.generate(**inputs, **options)
    monkeypatch.setattr(backend, "scaled_dot_product_attention", record)
    module.set_attn_implementation("cattn")
    assert torch.equal(module.generate(**inputs, **options), right)
    assert [queries for queries, _, _ in calls] == [11, 11, 1, 1, 1, 1, 1, 1]
    for _, attn_mask, starts in calls:
        assert attn_mask is None
        assert starts.tolist() == [4, 0]


@pytest.mark.promise("padding on the left")
@pytest.mark.parametrize("window", [None, 90])
@pytest.mark.parametrize("way", ["starts", "with padding between tokens", "compiling"])
def test_a_sequence_padded_on_the_left_has_its_bits_alone(
    way: str, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator, module = torch.Generator().manual_seed(0), SimpleNamespace(training=False)
    query, key, value = (torch.randn(2, n, 230, 16, generator=generator) for n in (4, 2, 2))
    padded = torch.ones(2, 230, dtype=torch.long)
    padded[0, :37] = 0
    if way == "with padding between tokens":
        padded[1, 5:9] = 0
    function = masking_utils.sliding_window_causal_mask_function(window) if window else None

    def describe(entries: int, length: int, mask: Any) -> Any:
        return backend._make_mask(entries, length, length, mask_function=function, attention_mask=mask)

    if way == "compiling":  # the values of the mask may not be looked at
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    mask = describe(2, 230, padded)
    monkeypatch.undo()
    assert mask.options["key_value_seq_starts"].tolist() == [37, 0]
    assert (mask.attn_mask is None) == (way == "starts")
    ours = backend._attend(module, query, key, value, mask)[0]
    alone = backend._attend(module, *(x[:1, :, 37:] for x in (query, key, value)), describe(1, 193, None))[0]
    assert torch.equal(ours[:1, 37:], alone)
    assert not ours[0, :37].any()


def test_a_mask_of_the_caller_is_used() -> None:
    module, ids = make("llama"), inputs_of(MODELS["llama"], None)["input_ids"]
    visible = torch.rand(2, 1, 11, 11, generator=torch.Generator().manual_seed(0)) > 0.4
    visible |= torch.eye(11, dtype=torch.bool)
    added = torch.where(visible, 0.0, torch.finfo(torch.float32).min)
    right = run(module, "eager", input_ids=ids, attention_mask=added).logits
    for mask in (added, visible):
        ours = run(module, "cattn", input_ids=ids, attention_mask=mask).logits
        assert (ours - right).abs().max() <= LOGITS * right.abs().max()


def test_packed_sequences_do_not_see_each_other() -> None:
    """Without a mask and a cache transformers finds them in the positions."""
    module, ids = make("llama"), inputs_of(MODELS["llama"], None)["input_ids"]
    positions = torch.tensor([[*range(4), *range(7)]] * 2)
    options = {"input_ids": ids, "position_ids": positions, "use_cache": False}
    right, ours = (run(module, implementation, **options).logits for implementation in ("eager", "cattn"))
    assert (ours - right).abs().max() <= LOGITS * right.abs().max()
    alone = run(module, "cattn", input_ids=ids[:, 4:]).logits
    assert (ours[:, 4:] - alone).abs().max() <= LOGITS * right.abs().max()


def test_ends_of_packed_sequences_hide_their_neighbours() -> None:
    """Also with a cache, where transformers does not look for sequences in the positions."""
    module, ids = make("mistral"), inputs_of(MODELS["mistral"], None)["input_ids"][:1]
    positions = torch.tensor([[*range(4), *range(7)]])
    ends = torch.tensor([0, 4, 11], dtype=torch.int32)
    batch = {"input_ids": ids, "position_ids": positions, "cu_seq_lens_q": ends, "cu_seq_lens_k": ends}
    batch |= {"max_length_q": 7, "max_length_k": 7, "seq_idx": torch.ones(1, 11), "anything": "of the caller"}
    right = run(module, "eager", **batch, use_cache=False).logits
    for use_cache in (False, True):
        ours = run(module, "cattn", **batch, use_cache=use_cache).logits
        assert (ours - right).abs().max() <= LOGITS * right.abs().max()
    alone = run(module, "cattn", input_ids=ids, cu_seq_lens_q=ends[::2]).logits
    assert torch.equal(alone, run(module, "cattn", input_ids=ids).logits)
    with pytest.raises(NotImplementedError, match="cu_seq_lens_q needs a batch of one row, got 2 rows"):
        run(module, "cattn", **batch | {"input_ids": ids.repeat(2, 1), "position_ids": positions.repeat(2, 1)})


# ---- options of a model --------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["llama", "gpt2", "gpt_oss", "deepseek_v32", "inkling2", "bert", "t5"])
def test_output_attentions_gives_the_weights(name: str) -> None:
    module, inputs = make(name), inputs_of(MODELS[name], None)
    fields = ("decoder_attentions", "encoder_attentions", "cross_attentions") if name == "t5" else ("attentions",)
    right, ours = (run(module, way, **inputs, output_attentions=True) for way in ("eager", "cattn"))
    for field in fields:
        assert len(getattr(ours, field)) == 2
        for a, b in zip(getattr(ours, field), getattr(right, field), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-5)
    without = run(module, "cattn", **inputs)
    assert all(getattr(without, field) is None for field in fields)


def test_dropout_follows_pytorchs_generator_in_training_alone() -> None:
    module, inputs = make("llama", attention_dropout=0.3), inputs_of(MODELS["llama"], None)

    def call() -> Any:
        torch.manual_seed(5)
        return run(module, "cattn", **inputs).logits

    plain = call()
    module.train()
    dropped = call()
    assert torch.equal(dropped, call())
    assert not torch.equal(dropped, run(module, "cattn", **inputs).logits)
    assert (dropped - plain).abs().max() > 0.01
    module.activation_checkpointing_enable()
    (again,) = torch.autograd.grad(call().square().sum(), module.lm_head.weight)
    module.activation_checkpointing_disable()
    (right,) = torch.autograd.grad(call().square().sum(), module.lm_head.weight)
    assert torch.equal(again, right)


@pytest.mark.parametrize("name", ["llama", "gpt_oss"])
def test_bfloat16(name: str) -> None:
    module, inputs = make(name).bfloat16(), inputs_of(MODELS[name], "left")
    ours = run(module, "cattn", **inputs).logits
    eager = run(module, "eager", **inputs).logits
    exact = run(module.float(), "eager", **inputs).logits
    seen = inputs["attention_mask"].bool()
    assert ours.dtype is torch.bfloat16
    errors = [(found.float() - exact)[seen].square().mean().sqrt() for found in (ours, eager)]
    assert errors[0] <= 1.5 * errors[1]  # both round every layer's output


@each("side", {}, (None, "both"))
def test_a_model_compiles_as_a_whole(name: str, side: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    model = MODELS[name]
    if model.kind not in ("decoder", "pair"):
        pytest.skip("a model of another kind")
    module, inputs = make(name), inputs_of(model, side)
    inputs["use_cache"] = False
    right = run(module, "cattn", **inputs).logits
    if side is not None:  # without a mask and a cache transformers looks for packed sequences
        monkeypatch.setattr(masking_utils, "sdpa_mask", None)
    torch.compiler.reset()
    try:
        ours = torch.compile(module, backend="aot_eager", fullgraph=True)(**inputs).logits
    except torch._dynamo.exc.Unsupported as error:
        if "integrations/transformers" in str(error) or "integrations/torch" in str(error):
            raise
        pytest.skip("PyTorch cannot compile this model")
    difference = numbers(model, SimpleNamespace(logits=ours - right), inputs.get("attention_mask"))
    assert difference.abs().max() <= LOGITS * right.abs().max()


# ---- refusals ------------------------------------------------------------------------------------------------------
REFUSED = {
    "bloom": ("BloomForCausalLM", "BloomConfig", {"n_layer": 2, "n_head": 4}),
    "mpt": ("MptForCausalLM", "MptConfig", {"d_model": 32, "n_layers": 2, "n_heads": 4}),
    "mpnet": ("MPNetModel", "MPNetConfig", {"num_hidden_layers": 2, "num_attention_heads": 4}),
}


def make_refused(name: str, **options: Any) -> Any:
    cls, config, sizes = REFUSED[name]
    config = getattr(transformers, config)(vocab_size=VOCABULARY, hidden_size=32, **sizes, **options)
    return getattr(transformers, cls)(config).eval()


@pytest.mark.promise("transformers")
@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("side", [None, "left"])
def test_a_model_with_attention_of_its_own_is_refused_by_name(name: str, side: str | None) -> None:
    module = make_refused(name, attn_implementation="cattn")
    assert module.config._attn_implementation == "cattn"
    ids = torch.ones(2, 11, dtype=torch.long)
    with pytest.raises(NotImplementedError, match=f'the model of {type(module.config).__name__} .*"eager"'):
        module(ids, attention_mask=padding(side))


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_that_would_stay_as_it_is_is_refused(name: str) -> None:
    module = make_refused(name)
    before = module.config._attn_implementation
    with pytest.raises(NotImplementedError, match=f"no layer of {type(module).__name__} leaves attention to"):
        backend.set_attn_implementation(module)
    assert module.config._attn_implementation == before


def test_a_model_is_set_as_a_whole_or_with_a_warning() -> None:
    module = make("llama")
    backend.set_attn_implementation(module, "cattn2")
    assert module.config._attn_implementation == "cattn2"
    inputs = inputs_of(MODELS["llama"], "left")
    assert torch.equal(module(**inputs).logits, run(module, "cattn", **inputs).logits)
    module.model.other = make_refused("bloom")
    with pytest.warns(UserWarning, match="BloomForCausalLM, BloomModel keep their own attention"):
        backend.set_attn_implementation(module, "cattn2")
    assert module.config._attn_implementation == "cattn2"
    assert module.model.other.config._attn_implementation == "eager"
    with pytest.raises(TypeError, match=r"model must be a transformers\.PreTrainedModel, got Linear"):
        backend.set_attn_implementation(torch.nn.Linear(1, 1))


def test_continuous_batching_is_refused_by_name() -> None:
    """By transformers itself: it takes its own implementations alone."""
    module = make("llama")
    module.set_attn_implementation("cattn")
    with pytest.raises(ValueError, match="Implementation cattn is not supported for continuous batching"):
        module.generate_batch([[3, 4, 5]], transformers.GenerationConfig(max_new_tokens=2, eos_token_id=None))


# ---- errors --------------------------------------------------------------------------------------------------------
def test_what_cattn_does_not_know_is_refused_by_name() -> None:
    q = torch.randn(2, 4, 5, 8)
    module = torch.nn.Module()
    for name in ("extra", "anything"):
        with pytest.raises(NotImplementedError, match=f"Module passes {name} to attention"):
            backend._attend(module, q, q, q, None, **{name: torch.ones(1)})
    backend._attend(module, q, q, q, None, indices=None, position_ids=torch.ones(1), use_cache=True)
    with pytest.raises(NotImplementedError, match=r"Module passes block_indices, but has no indexer\.block_size"):
        backend._attend(module, q, q, q, None, block_indices=torch.zeros(2, 1, 5, 1, dtype=torch.long))
    with pytest.raises(ValueError, match=r"attention_mask has shape \(2, 5\), wanted \(B, 1 or H, T_q, T_k\)"):
        backend._attend(module, q, q, q, torch.ones(2, 5))
    with pytest.raises(TypeError, match=r"attention_mask must be a torch\.Tensor, got str"):
        backend._attend(module, q, q, q, "x")
    with pytest.raises(NotImplementedError, match="sliding_window without a mask or causality"):
        backend._attend(module, q, q, q, None, is_causal=False, sliding_window=3)


def test_a_layer_without_a_mask() -> None:
    """A decoder's is causal from the upper left, also within a longer static cache; a window is one before it."""
    q, k = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 9, 8)
    module = torch.nn.Module()
    reference = torch.nn.functional.scaled_dot_product_attention
    causal = torch.ones(5, 9, dtype=torch.bool).tril()
    for options, visible in (
        ({}, causal),
        ({"is_causal": False}, torch.ones(5, 9, dtype=torch.bool)),
        ({"sliding_window": 2}, causal & ~causal.tril(-2)),
    ):
        out, weights = backend._attend(module, q, k, k, None, scaling=0.3, **options)
        right = reference(q, k, k, visible, scale=0.3, enable_gqa=True).transpose(1, 2)
        assert weights is None
        assert out.is_contiguous()
        torch.testing.assert_close(out, right)


@pytest.mark.parametrize("name", ["eager", "my_sdpa", "flash_cattn", "flex", "paged|cattn", ""])
def test_a_name_that_transformers_treats_in_its_own_way_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"name must not contain|name is empty"):
        backend.register(name)


def test_another_name() -> None:
    backend.register("cattn2")
    module, inputs = make("llama"), inputs_of(MODELS["llama"], "left")
    assert torch.equal(run(module, "cattn2", **inputs).logits, run(module, "cattn", **inputs).logits)
    with pytest.raises(TypeError, match="name must be a str, got int"):
        backend.register(3)  # type: ignore[arg-type]


# ---- models that compute with their mask, and keywords ---------------------------------------------------------------
def test_a_mask_is_the_tensor_of_eager_attention() -> None:
    """Whatever a model does with it but adding it to scores, which is attention of its own."""
    arguments: dict[str, Any] = {"batch_size": 2, "q_length": 5, "kv_length": 6, "q_offset": 1}
    arguments |= {"attention_mask": torch.tensor([[0, 1, 1, 1, 1, 1], [1, 1, 0, 1, 1, 1]]).bool()}
    right = masking_utils.eager_mask(**arguments, dtype=torch.bfloat16)
    mask = backend._make_mask(**arguments, dtype=torch.bfloat16)
    assert (mask.dtype, mask.device) == (right.dtype, right.device)
    chosen = torch.rand(right.shape, generator=torch.Generator().manual_seed(0)) > 0.5
    uses: list[Callable[[Any], Any]] = [
        lambda x: x[:, 0, :, :4], lambda x: x == 0, lambda x: x != 0, lambda x: x < 0, lambda x: x >= 0,
        lambda x: x > 0, lambda x: x <= 0,
        lambda x: x * 2, lambda x: 2 * x, lambda x: x.masked_fill(chosen, -1), lambda x: x.to(torch.float64),
        lambda x: torch.cat([x, x[..., :2]], dim=-1), lambda x: torch.nn.functional.pad(x, (0, 2), value=-1.0),
        lambda x: torch.where(chosen, x, -1.0), lambda x: x.expand(2, 3, 5, 6), lambda x: -x, lambda x: x / 2,
        lambda x: x[:, 0] + 1, lambda x: chosen[:, 0] + x[:, 0, :, :], lambda x: x[:, 0].masked_fill(chosen[:, 0], -1),
    ]  # fmt: skip
    for use in uses:
        assert torch.equal(use(mask), use(right))
    assert mask.to("cpu") is mask
    assert mask.to(dtype=torch.bfloat16, device="cpu") is mask
    assert torch.equal(mask.visible(), right == 0)
    assert hash(mask) == hash(mask)
    assert not hasattr(mask, "__array__")
    scores = torch.zeros(right.shape, dtype=torch.bfloat16)
    sums: list[Callable[[], Any]] = [
        lambda: mask + scores, lambda: scores + mask, lambda: scores.add_(mask), lambda: 1 - mask, lambda: mask - 1,
        lambda: torch.add(scores, mask),
    ]  # fmt: skip
    for add in sums:
        with pytest.raises(NotImplementedError, match=r"the model of NoneType computes add with its attention mask"):
            add()


def test_a_mask_keeps_the_offset_that_a_static_cache_counts_on() -> None:
    offset = torch.tensor(2)
    arguments: dict[str, Any] = {"batch_size": 1, "q_length": 3, "kv_length": 8}
    mask = backend._make_mask(**arguments, q_offset=offset)
    offset += 3
    right = masking_utils.sdpa_mask(**arguments, q_offset=2, allow_is_causal_skip=False)
    assert torch.equal(mask.visible(), right)
    assert torch.equal(expand(mask), right)


@pytest.mark.parametrize("side", ["left", "middle"])
@pytest.mark.parametrize("padded", [1, 2])
def test_a_mask_for_one_query_serves_all(side: str, padded: int) -> None:
    """As BridgeTower asks for it, for the keys of another modality; a batch of one row likewise."""
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(2, 4, tokens, 8, generator=generator) for tokens in (5, 11))
    seen = padding(side)[:padded].bool()
    mask = backend._make_mask(
        padded, 1, 11, mask_function=masking_utils.bidirectional_mask_function, attention_mask=seen
    )
    out, _ = backend._attend(torch.nn.Module(), q, k, k, mask)
    right = torch.nn.functional.scaled_dot_product_attention(q, k, k, seen[:, None, None, :])
    torch.testing.assert_close(out, right.transpose(1, 2))
    with pytest.raises(NotImplementedError, match=r"made its attention mask for .* = \(\d, 1, 11\) and attends with"):
        backend._attend(torch.nn.Module(), q, k[:, :, :9], k[:, :, :9], mask)
    for queries, columns in ((5, 11), (1, 1)):  # a mask of one key, and what is known of the others does not fit
        mask = backend._make_mask(2, 1, 1, attention_mask=torch.ones(2, columns))
        with pytest.raises(NotImplementedError, match=r"= \(2, 1, 1\) and attends with \(2, \d, 11\)"):
            backend._attend(torch.nn.Module(), q[:, :, :queries], k, k, mask)


def test_bridgetower_and_gemma4_audio_are_right() -> None:
    """A mask for one query, and none for images in layers that say is_causal; and the least number of a mask."""
    torch.manual_seed(0)
    text = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
            "num_attention_heads": 4, "max_position_embeddings": 32, "pad_token_id": 1}  # fmt: skip
    vision = {"hidden_size": 64, "num_hidden_layers": 2, "patch_size": 8, "image_size": 16}
    tower = transformers.BridgeTowerModel(
        transformers.BridgeTowerConfig(
            text_config=text, vision_config=vision, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
            num_attention_heads=4,
        )
    ).eval()  # fmt: skip
    ids = torch.randint(3, VOCABULARY, (2, 11))
    inputs = {"input_ids": ids, "attention_mask": padding("right"), "pixel_values": torch.randn(2, 3, 16, 16)}
    right, ours = (run(tower, way, **inputs).pooler_output for way in ("eager", "cattn"))
    assert (ours - right).abs().max() <= LOGITS * right.abs().max()
    audio = transformers.Gemma4AudioModel(
        transformers.Gemma4AudioConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, output_proj_dims=16)
    ).eval()
    features, mask = torch.randn(2, 64, 128), torch.ones(2, 64, dtype=torch.bool)
    mask[1, 40:] = False
    right, ours = (run(audio, way, input_features=features, attention_mask=mask) for way in ("eager", "cattn"))
    kept = right.attention_mask.bool()
    assert torch.equal(ours.last_hidden_state[kept], right.last_hidden_state[kept])


def test_keywords_have_a_meaning_if_the_model_looks_at_them() -> None:
    """Unknown ones of the caller pass; what the layer gives or its eager attention reads is refused."""
    module, ids = make("llama"), inputs_of(MODELS["llama"], None)["input_ids"]
    right = run(module, "cattn", input_ids=ids).logits
    assert torch.equal(run(module, "cattn", input_ids=ids, anything=torch.ones(1)).logits, right)
    from transformers.models.inkling2 import modeling_inkling2
    from transformers.models.llama import modeling_llama

    def eager_attention_forward(module: Any, query: Any, extra: Any = None, **kwargs: Any) -> Any:
        return query * kwargs.get("factor", 1), extra

    class Layer(modeling_llama.LlamaAttention):
        def forward(self, call: Any, **kwargs: Any) -> Any:
            return call(self, given=1, **kwargs), eager_attention_forward

    Layer.forward.__globals__["eager_layer_forward"] = eager_attention_forward
    try:
        assert {"given", "extra", "factor"} <= _eager_attention.find_keywords(Layer)
    finally:
        del Layer.forward.__globals__["eager_layer_forward"]
    assert _eager_attention.find_keywords(torch.nn.Module) is None
    assert "sinks" in _eager_attention.find_keywords(modeling_inkling2.Inkling2SlidingAttention)
    assert "anything" not in _eager_attention.find_keywords(modeling_llama.LlamaAttention)
