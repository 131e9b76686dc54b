"""Models of transformers that compute with their mask, and keywords; eager attention is the oracle."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from test_transformers import LOGITS, expand, inputs_of, make, padding, run  # noqa: E402
from transformers import masking_utils  # noqa: E402

from cattn.integrations import _model_code  # noqa: E402
from cattn.integrations import transformers as backend  # noqa: E402
from support.hf_models import MODELS, VOCABULARY  # noqa: E402


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
        assert {"given", "extra", "factor"} <= _model_code.find_keywords(Layer)
    finally:
        del Layer.forward.__globals__["eager_layer_forward"]
    assert _model_code.find_keywords(torch.nn.Module) is None
    assert "sinks" in _model_code.find_keywords(modeling_inkling2.Inkling2SlidingAttention)
    assert "anything" not in _model_code.find_keywords(modeling_llama.LlamaAttention)
