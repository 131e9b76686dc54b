"""Families of transformers with an indexer: the family's own choices and numbers, and bits that depend on no batch."""

from __future__ import annotations

import importlib
from typing import Any, NamedTuple

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
if not hasattr(torch.library, "get_kernel"):
    pytest.skip("batch_invariant needs PyTorch 2.9", allow_module_level=True)

from test_transformers_bits import pad  # noqa: E402

from cattn.integrations.torch import batch_invariant, use_cattn  # noqa: E402
from cattn.integrations.torch._indexers import Chosen, _make_watched  # noqa: E402
from cattn.integrations.transformers import set_attn_implementation  # noqa: E402
from support.hf_models import _EXPERTS, _INDEXED, VOCABULARY  # noqa: E402

# So many heads that no score is the sum of zeros, of which every key would be as good as another.
_INDEXER = _INDEXED | {"index_n_heads": 16}
_QWEN = {"indexer_n_heads": 16, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 6,
         "indexer_compress_ratio": 2, "layer_types": ["linear_attention", "indexed_attention"]}  # fmt: skip
_MINIMAX = {
    "num_local_experts": 4, "dense_intermediate_size": 48, "rotary_dim": 4, "index_n_heads": 2, "index_head_dim": 8,
    "index_block_size": 3, "index_topk_blocks": 2, "layer_types": ["full_attention", "minimax_m3_sparse"],
}  # fmt: skip
_DOTS = {"layer_types": ["indexed_attention"] * 2}
_V4 = {"num_key_value_heads": 1, "head_dim": 16, "sliding_window": 5,
       "layer_types": ["heavily_compressed_attention", "compressed_sparse_attention"]}  # fmt: skip
_GLM = {"index_kpool": 2, "qk_rope_head_dim": 0, "linear_head_dim": 8, "linear_num_heads": 4,
        "layer_types": ["linear_attention", "indexed_attention"]}  # fmt: skip
_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}}


class Family(NamedTuple):
    """A model of a family, and the implementation of attention with the right results."""

    name: str
    config: str
    sizes: dict[str, Any]
    choices: int = 2  # layers with an indexer
    oracle: str = "sdpa"


FAMILIES = {
    "deepseek_v32": Family("DeepseekV32ForCausalLM", "DeepseekV32Config", _INDEXER),
    "glm_moe_dsa": Family("GlmMoeDsaForCausalLM", "GlmMoeDsaConfig", _INDEXER),
    "hy_v4": Family("HYV4ForCausalLM", "HYV4Config", _INDEXER, oracle="eager"),
    "hy_v4_vl": Family("HYV4VLTextModel", "HYV4VLTextConfig", _INDEXER | _ROPE, oracle="eager"),
    "axk2": Family("AXK2ForCausalLM", "AXK2Config", _INDEXER),
    "dots3_note": Family("Dots3NoteForCausalLM", "Dots3NoteTextConfig", _INDEXER | _DOTS),
    "mistral_large4": Family("MistralLarge4TextModel", "MistralLarge4TextConfig", _INDEXER),
    "qwen4_exp": Family("Qwen4ExpForCausalLM", "Qwen4ExpTextConfig", _EXPERTS | _QWEN, 1),
    "minimax_m3_vl": Family("MiniMaxM3VLForCausalLM", "MiniMaxM3VLTextConfig", _EXPERTS | _MINIMAX, 1),
    "glm5_next": Family("Glm5NextTextModel", "Glm5NextTextConfig", _INDEXER | _GLM, 1),
    "deepseek_v4": Family("DeepseekV4ForCausalLM", "DeepseekV4Config", _INDEXER | _V4, 1, "eager"),
}
each = pytest.mark.parametrize("family", FAMILIES)
GENERATING = [name for name, family in FAMILIES.items() if family.name.endswith("CausalLM")]
_generator = torch.Generator().manual_seed(1)
TEXTS = [torch.randint(3, VOCABULARY, (n,), generator=_generator) for n in (5, 17, 11)]


def make(family: str, attention: str, dtype: Any = torch.float64) -> Any:
    row = FAMILIES[family]
    torch.manual_seed(0)
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    config = getattr(transformers, row.config)(**row.sizes)
    experts = "eager" if dtype is torch.float64 else None
    model = getattr(module, row.name)._from_config(config, experts_implementation=experts).to(dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # with the initial ones attention would be nearly uniform
            if parameter.ndim > 1 and parameter.std() < 0.05:
                parameter.mul_(4)
        model.get_input_embeddings().weight[0].normal_()  # a token of zeros would choose any keys
    set_attn_implementation(model)
    if attention != "cattn":
        model.set_attn_implementation(attention)
    return model


def inputs_of(family: str, side: str) -> dict[str, Any]:
    """Return the padded texts, and positions, which MiniMax M3 takes for indices of keys."""
    inputs = pad(TEXTS, side)
    positions = (inputs["attention_mask"].cumsum(-1) - 1).clamp(min=0)
    return inputs if (family, side) == ("minimax_m3_vl", "left") else inputs | {"position_ids": positions}


def run(family: str, attention: str, side: str) -> tuple[Any, list[Any], dict[str, Any]]:
    """Return the numbers of the texts' tokens, the choices of the indexers, and the gradients."""
    model, inputs, choices = make(family, attention), inputs_of(family, side), []
    for module in model.modules():
        if type(module).__name__.endswith("Indexer"):
            module.register_forward_hook(lambda _, inputs, output: choices.append(output))
    found = model(**inputs)[0][inputs["attention_mask"].bool()]
    (found * torch.randn(found.shape, generator=torch.Generator().manual_seed(2))).sum().backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return found.detach(), choices, gradients


def sets_of(choice: Any, own: Any) -> list[set[int]]:
    """Return what each token of the texts chooses among the keys that it sees, or the blocks for each head."""
    if isinstance(choice, Chosen):
        choice = choice.indices
    if choice.dtype is torch.bool:  # a mask
        choice = torch.where(choice[:, 0], torch.arange(choice.shape[-1]), -1)
    of_keys, starts = choice.ndim == 3, own.long().argmax(-1)
    rows = choice[:, None] if of_keys else choice
    found = []
    for b, h, t in torch.cartesian_prod(*map(torch.arange, rows.shape[:3])).tolist():
        if own[b, t]:
            first, last = (int(starts[b]) // (1 if of_keys else _MINIMAX["index_block_size"]), t)
            found.append({k for k in rows[b, h, t].tolist() if first <= k <= last})
    return found


@pytest.mark.promise("transformers")
@pytest.mark.parametrize("attention", ["cattn", "oracle"])
@pytest.mark.parametrize("side", ["right", "left"])
@each
def test_choices_outputs_and_gradients_are_those_of_the_family(family: str, side: str, attention: str) -> None:
    row = FAMILIES[family]
    right, choices, gradients = run(family, row.oracle, side)
    with use_cattn() as seen:
        found, ours, of_ours = run(family, row.oracle if attention == "oracle" else attention, side)
    assert seen.calls >= row.choices == len(ours)
    assert seen.passed_on == 0
    own = inputs_of(family, side)["attention_mask"].bool()
    assert [sets_of(x, own) for x in ours] == [sets_of(x, own) for x in choices]
    assert (found - right).abs().max() <= 2e-6 * right.abs().max()  # parts of each model are of float32
    assert set(gradients) == set(of_ours)
    largest = max(gradient.abs().max() for gradient in gradients.values())
    for name, gradient in gradients.items():
        assert (gradient - of_ours[name]).abs().max() <= 2e-6 * largest, name


@pytest.mark.promise("transformers")
@pytest.mark.parametrize("options", [{}, {"cache_implementation": "static"}, {"num_beams": 3}], ids=str)
@pytest.mark.parametrize("family", GENERATING)
def test_generated_tokens_are_those_of_the_family(family: str, options: dict[str, Any]) -> None:
    if family == "deepseek_v4" and "cache_implementation" in options:
        pytest.skip("the family has no static cache")
    options = options | {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "disable_compile": True}
    # MiniMax M3 takes positions of a text for indices of padded keys, and queries that see none differ.
    inputs = {"input_ids": TEXTS[1][None]} if family == "minimax_m3_vl" else pad(TEXTS, "left")
    right = make(family, FAMILIES[family].oracle).generate(**inputs, **options)
    with use_cattn() as seen:
        for attention in ("cattn", FAMILIES[family].oracle):
            assert torch.equal(make(family, attention).generate(**inputs, **options), right), attention
    assert seen.calls >= 12 * FAMILIES[family].choices
    assert seen.passed_on == 0


def cut(model: Any, text: Any, sizes: list[int]) -> Any:
    """Return the results for a text that is given to the model in pieces."""
    cache, found = None, []
    for piece in text.split(sizes):
        result = model(input_ids=piece[None], cache=cache, use_cache=True)
        cache = result.cache
        found.append(result[0][0])
    return torch.cat(found)


@pytest.mark.promise("projections' bits")
@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "deepseek_v4"])  # its windows move in a cache
def test_bits_do_not_depend_on_the_batch_nor_on_where_a_text_is_cut(family: str) -> None:
    model = make(family, "cattn", torch.float32)
    with torch.inference_mode(), batch_invariant() as seen:
        alone = [model(input_ids=text[None])[0][0] for text in TEXTS]
        for side in ("right", "left") if family != "minimax_m3_vl" else ("right",):  # counts blocks from the padding
            inputs = inputs_of(family, side)
            for row, own, wanted in zip(model(**inputs)[0], inputs["attention_mask"].bool(), alone, strict=True):
                assert torch.equal(row[own], wanted), side
        for sizes in ([1] * 17, [3, 1, 13], [12, 5]):
            assert torch.equal(cut(model, TEXTS[1], sizes), alone[1]), sizes
    assert (seen.passed_on, seen.products_passed_on) == (0, 0)


def test_a_mask_between_tokens_is_left_to_the_family() -> None:
    """Qwen 4 counts blocks of the tokens that a query sees, wherever they are."""
    inputs = pad(TEXTS[1:2], "right")
    inputs["attention_mask"][0, 6:8] = 0
    with torch.no_grad():
        right = make("qwen4_exp", "sdpa")(**inputs).logits[0, 8:]
        for attention in ("sdpa", "cattn"):
            with use_cattn() as seen:
                found = make("qwen4_exp", attention)(**inputs).logits[0, 8:]
            assert seen.passed_on == 1
            assert (found - right).abs().max() <= 2e-6 * right.abs().max()


def test_what_nobody_knows_is_computed_as_the_family_writes_it() -> None:
    class Indexer(torch.nn.Module):
        def forward(self, query: Any, key: Any, how: Any) -> Any:
            return how(torch.matmul(query, key))

    query, key, weights = torch.randn(2, 5, 4, 8), torch.randn(2, 1, 8, 9), torch.rand(2, 5, 4, 1)
    counted: list[bool] = []
    forward = _make_watched(None, Indexer.forward, counted.append)
    for ours, how in (
        (False, lambda x: x),
        (False, lambda x: torch.exp(x).sum(2).topk(3, dim=-1).indices),
        (False, lambda x: (x * -2.0).topk(3)),
        (False, lambda x: (torch.relu(x) * weights).sum(dim=2).cumsum(-1)),
        (False, lambda x: (x * weights).sum(dim=2).topk(3, dim=-1, largest=False).indices),
        (True, lambda x: (torch.relu(x * 3) * weights).sum(dim=2).topk(3, dim=-1).indices.sort(-1).values),
    ):
        found, right = forward(Indexer(), query, key, how), how(torch.matmul(query, key))
        assert all(map(torch.equal, found, right))
        assert counted.pop() == ours
