"""Families of transformers with linear attention: eager's numbers, and one text has the same bits however it is cut."""

from __future__ import annotations

import importlib
import inspect
import sys
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
if not hasattr(torch.library, "get_kernel"):
    pytest.skip("batch_invariant needs PyTorch 2.9", allow_module_level=True)

from test_transformers import GRADIENTS, LOGITS, make, padding  # noqa: E402
from test_transformers_bits import pad  # noqa: E402

from cattn.integrations.torch import batch_invariant, use_cattn  # noqa: E402
from support.hf_models import _EXPERTS, _GROUPED, RECURRENT, VOCABULARY  # noqa: E402

_generator = torch.Generator().manual_seed(1)
TEXTS = [torch.randint(3, VOCABULARY, (n,), generator=_generator) for n in (5, 17, 11)]
RULES = ("torch_chunk_gated_delta_rule", "chunk_kimi_delta_attention", "forward")
CALLS = {"minimax": 2}  # of attention, the recurrence, and the convolution before it
each = pytest.mark.parametrize("name", RECURRENT)


def family(model: Any) -> Any:
    return sys.modules[type(model).__module__]


def layer_of(model: Any) -> Any:
    names = ("conv_kernel_size", "q_conv1d", "slope_rate")
    return next(x for x in model.modules() if any(hasattr(x, name) for name in names))


def functions_of(model: Any) -> dict[str, Any]:
    """Return what the contexts may replace: the family's functions, and the layer's method."""
    return vars(family(model)) | {"forward": type(layer_of(model)).forward}


def logits_and_gradients(model: Any) -> tuple[Any, dict[str, Any]]:
    mask = padding("left")
    ids = torch.randint(3, VOCABULARY, mask.shape, generator=torch.Generator().manual_seed(1))
    model.zero_grad()
    found = model(input_ids=ids, attention_mask=mask).logits[mask.bool()]
    (found * torch.randn(found.shape, generator=torch.Generator().manual_seed(2))).sum().backward()
    return found.detach(), {k: p.grad.clone() for k, p in model.named_parameters() if p.grad is not None}


@pytest.mark.promise("transformers")
@each
def test_outputs_and_gradients_are_those_of_the_family(name: str) -> None:
    model = make(name)
    before = functions_of(model)
    logits, gradients = logits_and_gradients(model)
    with use_cattn() as seen:
        rule = next(rule for rule in RULES if rule in before)
        assert functions_of(model)[rule] is not before[rule]
        found, ours = logits_and_gradients(model)
    assert functions_of(model) == before
    assert (seen.calls, seen.passed_on) == (CALLS.get(name, 3), 0)
    assert (found - logits).abs().max() <= 3 * LOGITS * max(1, logits.abs().max())
    assert set(ours) == set(gradients)
    largest = max(grad.abs().max() for grad in gradients.values())
    for key, grad in gradients.items():
        assert (grad - ours[key]).abs().max() <= 3 * GRADIENTS * largest, key


@pytest.mark.promise("transformers")
@each
def test_greedy_tokens_of_padded_prompts_are_those_of_the_family(name: str) -> None:
    model = make(name)
    options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "disable_compile": True}
    theirs = model.generate(**pad(TEXTS, "left"), **options)
    with use_cattn():
        assert torch.equal(model.generate(**pad(TEXTS, "left"), **options), theirs)


def cut(model: Any, text: Any, sizes: list[int]) -> Any:
    """Return the logits of a text that is given to the model in pieces."""
    cache, found = None, []
    for piece in text.split(sizes):
        result = model(input_ids=piece[None], cache=cache, use_cache=True)
        cache = result.cache
        found.append(result.logits[0])
    return torch.cat(found)


def logits_alone_and_padded(model: Any, theirs: Any = None) -> list[Any]:
    """Return the logits of each text alone, near those of transformers for the longest, and with the bits of a batch.

    The batch is padded on either side. Where transformers computes a state in chunks it is padded on the right alone,
    because tokens of padding on the left shift the chunks.
    """
    alone = [model(input_ids=text[None]).logits[0] for text in TEXTS]
    if theirs is not None:
        assert (alone[1] - theirs).abs().max() <= 3 * LOGITS * max(1, theirs.abs().max())
    in_chunks = any(hasattr(model.config, name) for name in ("chunk_size", "mamba_chunk_size"))
    for side in ("right",) if in_chunks else ("right", "left"):
        inputs = pad(TEXTS, side)
        mask = inputs["attention_mask"]
        positions = {} if no_positions(model) else {"position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}
        batch = model(**inputs, **positions).logits
        for row, own, logits in zip(batch, mask.bool(), alone, strict=True):
            assert torch.equal(row[own], logits), side
    return alone


def no_positions(model: Any) -> bool:
    return "position_ids" not in inspect.signature(model.forward).parameters


@pytest.mark.promise("projections' bits")
@each
def test_bits_do_not_depend_on_the_batch_nor_on_where_a_text_is_cut(name: str) -> None:
    model = make(name)
    model.set_attn_implementation("cattn")
    with torch.inference_mode(), batch_invariant() as seen:
        alone, text = logits_alone_and_padded(model), TEXTS[1]
        for sizes in ([1] * len(text), [3, 1, 13], [12, 5]):
            assert torch.equal(cut(model, text, sizes), alone[1]), sizes
    assert (seen.passed_on, seen.products_passed_on) == (0, 0)


CONVOLVED = {
    "lfm2": ("Lfm2ForCausalLM", "Lfm2Config", {}),
    "lfm2_moe": ("Lfm2MoeForCausalLM", "Lfm2MoeConfig", {"num_experts": 4, "num_dense_layers": 1}),
    "lfm3": ("Lfm3ForCausalLM", "Lfm3Config", {}),
}


@pytest.mark.promise("projections' bits")
@pytest.mark.parametrize("name", CONVOLVED)
def test_families_with_a_short_convolution_alone_have_the_bits_of_the_text(name: str) -> None:
    cls, config, sizes = CONVOLVED[name]
    sizes = _EXPERTS | sizes | {"layer_types": ["conv", "full_attention"]}
    torch.manual_seed(0)
    model = getattr(transformers, cls)(getattr(transformers, config)(**sizes)).eval()
    model.set_attn_implementation("cattn")
    with torch.inference_mode():
        theirs = model(input_ids=TEXTS[1][None]).logits[0]
        with batch_invariant() as seen:
            alone = logits_alone_and_padded(model, theirs)
            for pieces in ([1] * 17, [3, 1, 13]):
                assert torch.equal(cut(model, TEXTS[1], pieces), alone[1]), pieces
    assert seen.calls >= 5
    assert (seen.passed_on, seen.products_passed_on) == (0, 0)


_SCAN = {"mamba_d_state": 8, "mamba_d_head": 8, "mamba_n_heads": 8, "mamba_chunk_size": 8}
OF_CHANNELS: dict[str, dict[str, Any]] = {
    "Mamba": {"state_size": 8},
    "Mamba2": {"state_size": 8, "num_heads": 8, "head_dim": 8, "n_groups": 1, "chunk_size": 8},
    "RecurrentGemma": {"lru_width": 32, "num_key_value_heads": 1, "block_types": ["recurrent", "attention"]},
    "FalconH1": _SCAN | {"mamba_d_ssm": 64, "mamba_n_groups": 1},
    "NemotronH": {"ssm_state_size": 8, "mamba_num_heads": 8, "mamba_head_dim": 8, "n_groups": 1, "chunk_size": 8,
                  "layer_types": ["mamba", "attention"]},
    "Bamba": _SCAN | {"attn_layer_indices": [1]},
    "Jamba": {"mamba_d_state": 8, "num_experts": 2, "attn_layer_offset": 1, "attn_layer_period": 2,
              "use_mamba_kernels": False},
}  # fmt: skip


@pytest.mark.promise("projections' bits")
@pytest.mark.parametrize("name", OF_CHANNELS)
def test_families_with_convolutions_of_each_channel_have_the_bits_of_the_text(name: str) -> None:
    """Their states are those of transformers."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**_GROUPED | OF_CHANNELS[name])
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    if not no_positions(model):
        model.set_attn_implementation("cattn")
    with torch.inference_mode():
        theirs = model(input_ids=TEXTS[1][None]).logits[0]
        with batch_invariant() as seen:
            logits_alone_and_padded(model, theirs)
    assert (seen.passed_on, seen.products_passed_on) == (0, 0)


PACKED = {"cu_seq_lens_q": torch.tensor([0, 5, 14], dtype=torch.int32), "seq_idx": torch.tensor([[3] * 5 + [1] * 9])}


@pytest.mark.parametrize("option", PACKED)
@each
def test_packed_sequences_are_apart(name: str, option: str) -> None:
    """transformers itself refuses them without another package, or mixes them."""
    layer = layer_of(make(name))
    hidden = [torch.randn(1, n, 32, generator=_generator) for n in (5, 9)]
    common = {"position_embeddings": None, "attention_mask": None}
    packed, given = torch.cat(hidden, 1), {option: PACKED[option]}
    with torch.no_grad(), batch_invariant():
        parts = [layer(x, **common) for x in hidden]
        found = layer(packed, **common, **given)
        if name == "minimax":
            found, parts = found[0], [part for part, _ in parts]
        assert torch.equal(found, torch.cat(parts, 1))
        with pytest.raises(NotImplementedError, match="packed sequences need a batch of one row, got 2 rows"):
            layer(packed.repeat(2, 1, 1), **common, **given)


def test_the_states_that_are_returned_with_attention_are_those_of_each_step() -> None:
    """The layer of MiniMax returns its state in the place of weights, and decoding must not change an earlier one."""
    model = make("minimax")
    model.set_attn_implementation("eager")
    options = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None, "disable_compile": True}
    options |= {"return_dict_in_generate": True, "output_attentions": True}
    theirs = model.generate(TEXTS[0][None], **options)
    with use_cattn():
        ours = model.generate(TEXTS[0][None], **options)
    for right, found in zip(theirs.attentions, ours.attentions, strict=True):
        torch.testing.assert_close(found, right)


def states_of(cache: Any) -> list[Any]:
    if hasattr(cache, "linear_cache"):
        return [x for x in cache.linear_cache if isinstance(x, torch.Tensor)]
    return [x for layer in cache.layers if hasattr(layer, "recurrent_states")
            for x in (*layer.recurrent_states.values(), *layer.conv_states.values())]  # fmt: skip


@pytest.mark.parametrize("context", [use_cattn, batch_invariant])
@each
def test_a_step_writes_the_states_of_a_cache_only_where_the_cache_does(name: str, context: Any) -> None:
    """Most caches copy a new state into their own tensor, whose version moves. MiniMax's keeps each state itself."""
    model, copies = make(name), name != "minimax"
    with torch.no_grad(), context():
        cache = model(TEXTS[0][None], use_cache=True).cache
        for token in TEXTS[1][:3]:
            before = [(x, x.clone(), x._version) for x in states_of(cache)]
            model(token[None, None], cache=cache, use_cache=True)
            assert len(before) > 0
            for (kept, numbers, version), now in zip(before, states_of(cache), strict=True):
                assert (now is kept) == copies == (kept._version > version)
                assert torch.equal(kept, numbers) != copies


@pytest.mark.parametrize("first", ["linear_attention", "full_attention"])
def test_scores_of_padded_prompts_are_those_of_the_prompts_alone(first: str) -> None:
    """transformers asks layer 0 how many keys there are. If it has a state, the mask is of one key, and eager wrong."""
    model = make("minimax", layer_types=sorted(["linear_attention", "full_attention"], key=lambda kind: kind != first))
    model.set_attn_implementation("cattn")
    options = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None, "disable_compile": True}
    options |= {"return_dict_in_generate": True, "output_scores": True}
    with torch.inference_mode(), batch_invariant():
        scores = model.generate(**pad(TEXTS, "left"), **options).scores
        for row, text in enumerate(TEXTS):
            for found, alone in zip(scores, model.generate(text[None], **options).scores, strict=True):
                assert torch.equal(found[row], alone[0])


def test_a_family_that_is_imported_inside_the_context_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    name = family(make("qwen3_5")).__name__
    monkeypatch.delitem(sys.modules, name)
    with use_cattn():
        module = importlib.import_module(name)
        inside = module.torch_chunk_gated_delta_rule
    assert inside.__module__.startswith("cattn.")
    assert not module.torch_chunk_gated_delta_rule.__module__.startswith("cattn.")


@pytest.mark.parametrize("name", ["qwen3_5", "kimi_linear"])
def test_the_layer_has_the_same_bits_alone_in_a_batch_and_in_pieces(name: str) -> None:
    """Also with gradients, and outside batch_invariant with the projections that cattn does not compute left out."""
    module = family(make(name))
    rule = next(vars(module)[rule] for rule in RULES if rule in vars(module))
    step = {True: "recurrent_kimi_delta_attention", False: "torch_recurrent_gated_delta_rule"}[name == "kimi_linear"]
    shapes = [(3, 20, 4, 8)] * 3 + [(3, 20, 4, 8) if name == "kimi_linear" else (3, 20, 4), (3, 20, 4)]
    inputs = [torch.randn(shape, generator=_generator) for shape in shapes]
    inputs[3], inputs[4] = -inputs[3].abs(), inputs[4].sigmoid()
    options: dict[str, Any] = {"output_final_state": True, "use_qk_l2norm_in_kernel": False}
    want, last = rule(*inputs, **options)
    with use_cattn():
        ours, stepped = (getattr(module, x) for x in (rule.__name__, step))
        out, state = ours(*inputs, **options)
        torch.testing.assert_close(out, want, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(state, last, rtol=1e-5, atol=1e-5)
        followed = [x.clone().requires_grad_() for x in inputs]
        assert torch.equal(ours(*followed, **options)[0], out)
        row = [x[1:2] for x in inputs]
        first, now = ours(*(x[:, :7] for x in row), **options)
        parts = [first]
        for t in range(7, 20):
            part, now = stepped(*(x[:, t : t + 1] for x in row), initial_state=now, **options)
            parts.append(part)
        assert torch.equal(torch.cat(parts, 1), out[1:2])
        assert torch.equal(now, state[1:2])
