"""Train the GPT of the site's live page, and check what it learned: `train_gpt.py --page docs/live_gpt.npz`.

It reads three kinds of passages: sentences from the docstrings of installed packages, short stories from a few patterns
of sentences, and random words that are repeated. To tell these, a head must know the token before each token, and a
head of the next layer look at what came after the same word. Such heads form in long trainings; here the loss has a
term that asks the first head of each layer for it, less and less until half of the steps, and hardly from there on. The
training is the same each time with the same versions of the packages. It needs PyTorch, tokenizers and wordfreq, which
tells the commonest words of English: these are whole pieces, so that a sentence of a teacher keeps its words.
"""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import inspect
import json
import random
import re
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from small_gpt import GPT, WORD, Pieces, load, save
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers
from torch.nn.functional import cross_entropy, gelu, layer_norm, linear, scaled_dot_product_attention

import cattn

PACKAGES = "numpy scipy matplotlib torch jax sphinx docutils sympy networkx IPython dask transformers"
SENTENCE = re.compile(r"[A-Z][a-z]*,? [A-Za-z0-9 ,;:'\"()-]*[A-Za-z)][.!?]")
NOUNS = {
    "it": "cat dog bird fox bear mouse horse rabbit frog duck lion cow fish",
    "she": "girl woman queen teacher mother sister",
    "he": "boy man king farmer father brother",
}
NAMES = {"she": "Anna Mary Lucy Sara", "he": "Tom John Ben Max"}
FILLED = {
    "mood": "happy sad tired hungry angry cold small big old young afraid quiet kind brave",
    "place": "mat chair table bed floor roof hill grass wall box bench",
    "room": "house garden kitchen school forest park river village town sea",
    "thing": "ball book hat key letter cup apple cake flower stone bread box",
    "color": "red blue green black white yellow",
    "did": "saw liked found heard met helped followed called chased",
    "went": "ran walked went came jumped",
    "time": "morning evening night day summer winter",
}
WORDS = re.compile("[A-Za-z]+")
MORE_WORDS = "matrix code attention Attention data Data model models query key value animal token tokens sentence"
PATTERNS = """
{A} sat on the {place}.|{A} sat on the {color} {place}.|{A} was {mood}.|{A} was very {mood}.|{A} {did} {b}.
{A} and {b} played with the {thing}.|{A} and {b} went to the {room}.|{A} {went} to the {room}.|Then {a} {went} away.
{A} was {mood} because the {thing} was lost.|{A} did not cross the street because {he} was too {mood}.
One {time}, {a} {went} into the {room}.|"Where is my {thing}?" said {a}.|"I do not know," said {b}.|{He} was {mood}.
The {thing} was on the {place}.|The {thing} was {color}.|{A} gave the {thing} to {b}.|{A} had a {color} {thing}.
{A} put the {thing} on the {place}.|{B} was {mood}, but {a} was {mood}.|"Thank you," said {b}.|{He} {did} {b}.
{A} wanted to eat the {thing}.|{A} looked at {b} and said, "You are {mood}."|In the {time}, {a} slept on the {place}.
{A} opened the door.|The sun was warm.|It was a cold {time}.|It was late, and {a} {went} home.|They were {mood}.
{A} lived in a {color} house near the {room}.|Once there was {one}.|{B} sat on the {place}, too.
There was {one} in the {room}.
When {a} {did} {b}, {he} was {mood}.|{A} could not find the {thing}.|{A} took the {thing} and {went} to the {room}.
The quick brown fox jumps over the lazy dog.|Your journey starts with one step.
""".strip().replace("\n", "|")


def prose(documentation: str) -> Iterator[str]:
    """Return the sentences of each paragraph that have no code, signature or formula, without markup."""
    for paragraph in re.split(r"\n\s*\n", inspect.cleandoc(documentation)):
        plain = re.sub(r":[a-z:+]+:`~?(?:[^`<]*\.)?([^`<]*?)(?: <[^`>]*>)?`", r"\1", " ".join(paragraph.split()))
        plain = re.sub(r"`+([^`]*)`+_*", r"\1", plain).replace("*", "")
        kept = []
        for sentence in re.split(r"(?<=[.!?]) (?=[A-Z])", plain):
            words = re.sub(r"[^A-Za-z0-9 ]", "", sentence).split()
            ordinary = 1 + sum(word.islower() or word.isdigit() for word in words[1:])
            if SENTENCE.fullmatch(sentence) and "--" not in sentence and 4 <= len(words) <= 40:
                kept += [sentence] * (ordinary >= 0.85 * len(words))
        if kept:
            yield " ".join(kept)


def documentation() -> Iterator[str]:
    """Return the docstrings of the standard library and PACKAGES, file by file, and the topics of `help`."""
    folders = [Path(sysconfig.get_path("stdlib"))]
    for name in PACKAGES.split():
        found = importlib.util.find_spec(name)
        folders += [Path(found.origin).parent] if found and found.origin else []
    for folder in folders:
        for path in sorted(folder.rglob("*.py")):
            if not {"site-packages", "tests", "test", "idlelib"}.isdisjoint(path.relative_to(folder).parts):
                continue
            with contextlib.suppress(SyntaxError):  # some files are for other versions of Python
                for node in ast.walk(ast.parse(path.read_bytes())):
                    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                        yield ast.get_docstring(node, clean=False) or ""
    from pydoc_data.topics import topics

    yield from topics.values()


def stories(count: int, rng: random.Random) -> Iterator[str]:
    """Return short stories about two beings, which tell some of their sentences again."""
    patterns, filled = PATTERNS.split("|"), {name: words.split() for name, words in FILLED.items()}

    def being() -> tuple[str, str, str]:
        kind = rng.choice(["it", "it", "she", "he"])
        if kind in NAMES and rng.random() < 0.5:
            name = rng.choice(NAMES[kind].split())
            return name, kind, name
        noun = rng.choice(NOUNS[kind].split())
        one = f"{rng.choice(filled['mood'])} {noun}" if rng.random() < 0.3 else noun
        return f"the {noun}", kind, f"an {one}" if one[0] in "aeiou" else f"a {one}"

    for _ in range(count):
        (a, he, one), (b, _, _) = being(), being()
        beings = {"a": a, "A": a[0].upper() + a[1:], "b": b, "B": b[0].upper() + b[1:], "he": he, "He": he.title()}
        words = {name: rng.sample(choices, 2) for name, choices in filled.items()}
        told = []
        for pattern in rng.sample(patterns, rng.randint(2, 12)):
            told.append(pattern.format(**beings, one=one, **{name: rng.choice(pair) for name, pair in words.items()}))
            if rng.random() < 0.3:
                told.append(rng.choice(told))
        yield " ".join(told)


def common_words() -> list[str]:
    """Return some thousand words of English in small letters, the commonest first."""
    import wordfreq

    return list(wordfreq.top_n_list("en", 4000))


def whole_words(told: list[str], read: list[str]) -> list[str]:
    """Return the words that are to be one piece each, the most important first: of the stories, then of English.

    The documentation tells whether a word has a capital letter, and leaves out what no page should show.
    """
    heard, seen = ({word: word for text in texts for word in WORDS.findall(text)} for texts in (told, read))
    common = [word for each in common_words() if (word := seen.get(each, seen.get(each.title(), "")))]
    words = dict.fromkeys([*heard, *(word.title() for word in common[:100]), *MORE_WORDS.split(), *common])
    return [f" {word}" for word in words]


def trained_pieces(texts: Iterable[str], words: list[str], merges: int, size: int) -> Pieces:
    """Return `size` pieces: the bytes, the most frequent pieces of words that are not in the list, and words of it.

    The tokenizer writes a byte as the character of its number.
    """
    tokenizer, whole = Tokenizer(models.BPE()), set(words)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(WORD), "isolated")
    alphabet = [chr(byte) for byte in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=256 + merges, initial_alphabet=alphabet, show_progress=False)
    others = (word for text in texts for word in re.findall(WORD, f" {text}") if word not in whole)
    tokenizer.train_from_iterator((word.encode().decode("latin-1") for word in others), trainer)
    found = json.loads(tokenizer.to_str())["model"]
    pieces = found["vocab"]
    parts = [piece.encode("latin-1") for piece in sorted(pieces, key=pieces.get)]
    parts += [word for word in map(str.encode, words) if word not in set(parts)][: size - len(parts)]
    return Pieces(parts, [[pieces[a], pieces[b]] for a, b in found["merges"]])


class Passages:
    """Texts as tokens, to draw pieces from that begin where a text begins."""

    def __init__(self, texts: list[str], pieces: Pieces) -> None:
        encoded = [pieces.encode(text + "\n") for text in texts]
        self.ids = np.concatenate([np.array(ids) for ids in encoded])
        self.starts = np.cumsum([0, *map(len, encoded)])[:-1]

    def draw(self, rows: int, tokens: int, rng: np.random.Generator) -> Any:
        """Return rows of tokens."""
        starts = self.starts[: np.searchsorted(self.starts, len(self.ids) - tokens, "right")]
        return self.ids[rng.choice(starts, rows)[:, None] + np.arange(tokens)]


def forward(W: dict[str, torch.Tensor], heads: int, ids: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return the logits of small_gpt.GPT with weights W, and the logarithms of the weights of each first head."""
    hidden, first = torch.ones(ids.shape[1], ids.shape[1]).triu(1).bool(), []
    x = W["token"][ids] + W["position"][: ids.shape[1]]
    d = x.shape[2:]
    for i in range(sum(name.endswith("qkv") for name in W)):
        qkv = linear(layer_norm(x, d, W[f"{i} norm 1"]), W[f"{i} qkv"])
        q, k, v = qkv.view(*ids.shape, 3, heads, -1).permute(2, 0, 3, 1, 4)
        scores = q[:, 0] @ k[:, 0].transpose(1, 2) / q.shape[-1] ** 0.5
        first.append(scores.masked_fill(hidden, -torch.inf).log_softmax(-1))
        context = scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + linear(context.transpose(1, 2).reshape(x.shape), W[f"{i} out"])
        h = layer_norm(x, d, W[f"{i} norm 2"])
        x = x + linear(gelu(linear(h, W[f"{i} up"], W[f"{i} up bias"])), W[f"{i} down"])
    return linear(layer_norm(x, d, W["norm"]), W["token"]), first


def check(path: str, texts: list[str]) -> None:
    """Print how well the model tells texts, and the heads that look at the token before and after the same word."""
    model, pieces = load(path)
    ids = Passages(texts, pieces).ids
    rows = ids[: len(ids) // (model.context + 1) * (model.context + 1)].reshape(-1, model.context + 1)[:64]
    probabilities = np.take_along_axis(cattn.softmax(model(rows[:, :-1])), rows[:, 1:, None], -1)
    size = sum(len(pieces[token]) for token in rows[:, 1:].ravel())
    print(f"bits per byte of other documentation: {-np.log2(probabilities, dtype=np.float64).sum() / size:.3f}")
    sentences = [pieces.encode(text)[: model.context] for text in texts[:100]]
    before = np.mean([model.attention_weights(ids).diagonal(-1, -2, -1).mean(-1) for ids in sentences], axis=0)
    words = [i for i, piece in enumerate(pieces) if re.fullmatch(rb" [a-z]{3,}", piece)][::32]
    after = model.attention_weights(words * 2).diagonal(1 - len(words), -2, -1)[..., 1:].mean(-1)
    for what, weights in (("the token before", before), ("what came after the same word", after)):
        layer, head = np.unravel_index(weights.argmax(), weights.shape)
        print(f"layer {layer}, head {head} looks at {what}: mean weight {weights[layer, head]:.2f}")


def train(path: str, steps: int, vocabulary: int = 2048, merges: int = 256, tales: int = 20_000, seed: int = 0) -> None:
    """Train on one thread, save the model, and print what it learned. Of the documentation, 2 % are for the check."""
    torch.set_num_threads(1)
    order = random.Random(seed)
    sentences = list(dict.fromkeys(passage for text in documentation() for passage in prose(text)))
    order.shuffle(sentences)
    told = list(stories(tales, order))
    aside = len(sentences) // 50
    words = whole_words(told, sentences)
    pieces = trained_pieces(sentences[aside:] + told[:4000], words, merges, vocabulary)
    read, heard = Passages(sentences[aside:], pieces), Passages(told, pieces)
    print(f"{len(read.ids)} tokens of documentation, {len(heard.ids)} of stories, {len(pieces)} different ones")
    known = np.array([i for i, piece in enumerate(pieces) if re.fullmatch(rb" [a-z]+", piece)])

    model = GPT(64, 4, 2, 128, seed, vocabulary)
    W = {name: torch.tensor(weight, requires_grad=True) for name, weight in model.weights.items()}
    matrices, vectors = ([w for w in W.values() if w.ndim == n] for n in (2, 1))
    groups = [{"params": matrices, "weight_decay": 0.05}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.98))
    rng, tokens = np.random.default_rng(seed), model.context + 1
    for step in range(steps):
        rate = 5e-3 * min(1, (step + 1) / 200) * (0.51 + 0.49 * np.cos(np.pi * step / steps))
        for group in optimizer.param_groups:
            group["lr"] = rate
        periods = rng.integers(3, tokens // 2, 6)
        repeated = [np.resize(rng.choice(known, n), (1, tokens)) for n in periods]
        ids = torch.tensor(np.concatenate([read.draw(9, tokens, rng), heard.draw(9, tokens, rng), *repeated]))
        logits, (back, same) = forward(W, model.heads, ids[:, :-1])
        losses = cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none")
        after = [weights.diagonal(1 - int(n))[1:] for weights, n in zip(same[-6:], periods, strict=True)]
        taught = -back.diagonal(-1, 1, 2).mean() - torch.cat(after).mean()
        optimizer.zero_grad()
        (losses.mean() + max(0.02, 0.3 - 0.6 * step / steps) * taught).backward()
        torch.nn.utils.clip_grad_norm_(W.values(), 1.0)
        optimizer.step()
        if (step + 1) % 200 == 0:
            kinds = [f"{part.mean():.3f}" for part in losses.detach().split([9, 9, 6])]
            print(f"step {step + 1}: losses of the three kinds {', '.join(kinds)}", flush=True)
    model.weights = {name: weight.detach().numpy() for name, weight in W.items()}
    save(path, model, pieces)
    check(path, sentences[:aside])
