"""Language models of transformers inside batch_invariant(): a text has the same bits alone and in any padded batch."""

from __future__ import annotations

import inspect
import runpy
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
if not hasattr(torch.library, "get_kernel"):
    pytest.skip("batch_invariant needs PyTorch 2.9", allow_module_level=True)

from test_transformers import make  # noqa: E402

import cattn  # noqa: E402
from cattn.integrations.torch import batch_invariant  # noqa: E402
from support import ROOT  # noqa: E402
from support.hf_models import MODELS, VOCABULARY  # noqa: E402

SHORT = ("llama", "gpt2", "qwen2", "mistral", "gpt_neox", "phi")
MORE = (
    "gemma2",
    "gemma3",
    "gpt_oss",
    "mixtral",
    "deepseek_v3",
    "phi3",
    "qwen3",
    "olmo2",
    "cohere",
    "starcoder2",
    "opt",
)
each = pytest.mark.parametrize("name", [*SHORT, *(pytest.param(name, marks=pytest.mark.long) for name in MORE)])
_generator = torch.Generator().manual_seed(1)
TEXTS = [torch.randint(3, VOCABULARY, (n,), generator=_generator) for n in (5, 17, 40, 23)]


@pytest.fixture(autouse=True)
def own_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def make_ours(name: str) -> Any:
    model = make(name)
    model.set_attn_implementation("cattn")
    return model


def pad(texts: list[Any], side: str) -> dict[str, Any]:
    """Return the inputs of a model for these texts."""
    longest = max(map(len, texts))
    ids = torch.zeros(len(texts), longest, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, text in enumerate(texts):
        at = slice(0, len(text)) if side == "right" else slice(longest - len(text), longest)
        ids[row, at], mask[row, at] = text, 1
    return {"input_ids": ids, "attention_mask": mask}


def logits_of(model: Any, texts: list[Any], side: str, threads: int) -> list[Any]:
    """Return the logits of each text's own tokens. A model counts padding as positions, unless it gets them."""
    inputs = pad(texts, side)
    mask = inputs["attention_mask"]
    torch.set_num_threads(threads)
    with cattn.num_threads(threads):
        logits = model(**inputs, position_ids=(mask.cumsum(-1) - 1).clamp(min=0)).logits
    return [row[own] for row, own in zip(logits, mask.bool(), strict=True)]


@pytest.mark.promise("projections' bits")
@each
def test_logits_do_not_depend_on_the_batch_its_padding_or_threads(name: str) -> None:
    model = make_ours(name)
    if "position_ids" not in inspect.signature(model.forward).parameters:
        pytest.skip("it takes no positions")
    with torch.inference_mode(), batch_invariant() as seen:
        alone = [logits_of(model, [text], "right", 1)[0] for text in TEXTS]
        for side, threads, chosen in (("right", 1, [0, 1, 2, 3]), ("left", 4, [3, 0, 2, 1]), ("left", 1, [0, 0, 1])):
            batch = logits_of(model, [TEXTS[i] for i in chosen], side, threads)
            for i, logits in zip(chosen, batch, strict=True):
                assert torch.equal(logits, alone[i]), (side, threads, i)
    assert (seen.passed_on, seen.products_passed_on) == (0, 0)
    assert seen.products > 0


@pytest.mark.promise("projections' bits")
@each
def test_generation_with_padding_is_that_of_each_prompt_alone(name: str) -> None:
    model = make_ours(name)

    def generate(texts: list[Any]) -> tuple[Any, Any]:
        inputs = pad(texts, "left")
        result = model.generate(
            **inputs, max_new_tokens=6, do_sample=False, eos_token_id=None, disable_compile=True, output_logits=True,
            return_dict_in_generate=True,
        )  # fmt: skip
        return result.sequences[:, inputs["input_ids"].shape[1] :], torch.stack(result.logits, 1)

    assert MODELS[name].kind == "decoder"
    with batch_invariant() as seen:
        tokens, logits = generate(TEXTS)
        for i, text in enumerate(TEXTS[:3]):
            own_tokens, own_logits = generate([text])
            assert own_tokens[0].tolist() == tokens[i].tolist()
            assert torch.equal(own_logits[0], logits[i])
    assert (seen.passed_on, seen.products_passed_on) == (0, 0)


@pytest.mark.promise("projections' bits")
def test_the_example_finds_equal_embeddings(capsys: pytest.CaptureFixture[str]) -> None:
    example = runpy.run_path(str(ROOT / "examples" / "embeddings.py"))
    assert example["main"](count=12, batches=2, rounds=1, layers=1) == 0
    out = capsys.readouterr().out
    assert out.startswith("12 texts in 2 batches, rows with other bits than the text alone: PyTorch ")
    assert "batch_invariant(): " in out
