"""A GPT on bytes in plain NumPy and cattn: forward pass with caches, gradients, training.

speculative_decoding.py, compress_text.py and one_hash.py use it, and the live page of the site, with pieces of words in
place of bytes. Every number of the model comes from functions of cattn, whose bits do not depend on the machine, the
number of threads or the other rows, and from sums, products, quotients and roots of NumPy that IEEE 754 rounds alike
everywhere. NumPy adds no array up, for the order in which it does depends on the processor, and draws no numbers, for
its generators may change. The mean loss, which training never reads, is the only number with a logarithm.
"""

from __future__ import annotations

import argparse
import hashlib
import inspect
import math
import re
import statistics
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

import cattn
from cattn.functional import gelu, gelu_backward, layer_norm, layer_norm_backward, linear, linear_backward

Array = np.ndarray[Any, np.dtype[Any]]
Attend = Callable[[Array, cattn.KVCache], Array]


def text() -> bytes:
    """Return the sources of two modules of the standard library."""
    return "\n".join(inspect.getsource(module) for module in (argparse, statistics)).encode()


def random_bits(seed: str, *shape: int) -> Array:
    """Return an array of uint64 from SHAKE-256 of the seed; eight bytes make a number, the lowest first."""
    count = math.prod(shape)
    return np.frombuffer(hashlib.shake_256(seed.encode()).digest(8 * count), "<u8").reshape(shape)


def attend_to_all(query: Array, cache: cattn.KVCache) -> Array:
    """Attend to the tokens of the cache, causally."""
    return cattn.causal_attention(query, cache.k, cache.v)


class GPT:
    """A GPT on bytes: layer norms before attention and the feed-forward layer, and the embedding as the last layer.

    `vocabulary` is the number of its tokens, if these are no bytes.
    """

    def __init__(
        self, d: int = 48, heads: int = 4, layers: int = 2, context: int = 128, seed: int = 0, vocabulary: int = 256
    ) -> None:
        self.heads, self.layers, self.context = heads, layers, context

        def draw(name: str, *shape: int, scale: float) -> Array:
            # integers of 16 bits, and not normal numbers, whose logarithms are those of a C library
            integers = (random_bits(f"{seed} {name}", *shape) >> np.uint64(48)).astype(np.float32)
            return (integers - np.float32(2**15)) * np.float32(scale / 2**15)

        self.weights = {
            "token": draw("token", vocabulary, d, scale=0.25),
            "position": draw("position", context, d, scale=0.125),
            "norm": np.ones(d, np.float32),
        }
        for i in range(layers):
            self.weights |= {
                f"{i} norm 1": np.ones(d, np.float32),
                (name := f"{i} qkv"): draw(name, 3 * d, d, scale=0.25),
                (name := f"{i} out"): draw(name, d, d, scale=0.25),
                f"{i} norm 2": np.ones(d, np.float32),
                (name := f"{i} up"): draw(name, 4 * d, d, scale=0.25),
                f"{i} up bias": np.zeros(4 * d, np.float32),
                (name := f"{i} down"): draw(name, d, 4 * d, scale=0.125),
            }

    def new_caches(self, room: int = 0) -> list[cattn.KVCache]:
        """Return an empty cache for each layer, with room for so many tokens more than the context."""
        head_dim = self.weights["token"].shape[1] // self.heads
        return [cattn.KVCache((), self.heads, self.context + room, head_dim) for _ in range(self.layers)]

    def __call__(
        self,
        ids: Sequence[int] | Array,
        caches: list[cattn.KVCache] | None = None,
        positions: Sequence[int] | Array | None = None,
        attend: Attend = attend_to_all,
        saved: list[tuple[Any, ...]] | None = None,
    ) -> Array:
        """Return the logits (..., T, vocabulary) of the token after each of ids (..., T).

        Keys and values go into the caches, whose tokens come before ids; `attend` attends to them. What the gradients
        need goes into `saved`.
        """
        ids, W = np.asarray(ids, np.int64), self.weights
        if positions is None:
            start = 0 if caches is None else caches[0].query_offset()
            positions = np.arange(ids.shape[-1]) + start
        x = W["token"][ids] + W["position"][np.asarray(positions)]
        for i in range(self.layers):
            h = layer_norm(x, W[f"{i} norm 1"])
            qkv = linear(h, W[f"{i} qkv"])
            q, k, v = np.moveaxis(qkv.reshape(*qkv.shape[:-1], 3, self.heads, -1), -3, 0).swapaxes(-2, -3)
            result = None
            if caches is None:
                result = cattn.causal_attention(q, k, v, return_lse=True)
                out = result.out
            else:
                caches[i].append(k, v)
                out = attend(q, caches[i])
            joined = out.swapaxes(-2, -3).reshape(x.shape)
            y = x + linear(joined, W[f"{i} out"])
            h2 = layer_norm(y, W[f"{i} norm 2"])
            u = linear(h2, W[f"{i} up"], W[f"{i} up bias"])
            g = gelu(u)
            if saved is not None:
                saved.append((x, h, q, k, v, result, joined, y, h2, u, g))
            x = y + linear(g, W[f"{i} down"])
        if saved is not None:
            saved.append((x,))
        return linear(layer_norm(x, W["norm"]), W["token"])

    def attention_weights(self, ids: Sequence[int] | Array) -> Array:
        """Return the weights (layers, ..., heads, T, T) of ids (..., T)."""
        saved = list[tuple[Any, ...]]()
        self(ids, saved=saved)
        return np.stack([cattn.attention_weights(q, k, is_causal=True) for _, _, q, k, *_ in saved[:-1]])

    def gradients(self, ids: Array) -> tuple[float, dict[str, Array]]:
        """Return the mean loss in nats of ids (B, T + 1), and its gradients."""
        W, saved, grads = self.weights, list[Any](), dict[str, Array]()
        inputs, targets = ids[:, :-1], ids[:, 1:]
        probabilities = cattn.softmax(self(inputs, saved=saved))
        picked = np.take_along_axis(probabilities, targets[..., None], -1)
        grad = probabilities
        np.put_along_axis(grad, targets[..., None], picked - np.float32(1), -1)
        grad /= np.float32(targets.size)
        (x,) = saved.pop()
        grad, from_head, _ = linear_backward(grad, layer_norm(x, W["norm"]), W["token"])
        grad, grads["norm"], _ = layer_norm_backward(grad, x, W["norm"])
        for i in reversed(range(self.layers)):
            x, h, q, k, v, result, joined, y, h2, u, g = saved.pop()
            grad_g, grads[f"{i} down"], _ = linear_backward(grad, g, W[f"{i} down"])
            grad_h, grads[f"{i} up"], grads[f"{i} up bias"] = linear_backward(
                gelu_backward(grad_g, u), h2, W[f"{i} up"]
            )
            grad_y, grads[f"{i} norm 2"], _ = layer_norm_backward(grad_h, y, W[f"{i} norm 2"])
            grad = grad + grad_y
            grad_joined, grads[f"{i} out"], _ = linear_backward(grad, joined, W[f"{i} out"])
            of_heads = grad_joined.reshape(*joined.shape[:-1], self.heads, -1).swapaxes(-2, -3)
            found = cattn.attention_backward(of_heads, q, k, v, result.out, result.lse, is_causal=True)
            of_qkv = np.stack([found.query, found.key, found.value]).swapaxes(-2, -3)
            grad_h, grads[f"{i} qkv"], _ = linear_backward(
                np.moveaxis(of_qkv, 0, -3).reshape(*h.shape[:-1], -1), h, W[f"{i} qkv"]
            )
            grad_x, grads[f"{i} norm 1"], _ = layer_norm_backward(grad_h, x, W[f"{i} norm 1"])
            grad = grad + grad_x
        grads["token"], grads["position"] = from_head, np.zeros_like(W["position"])
        for tokens, of_text in zip(inputs, grad, strict=True):  # one by one: the order of a sum decides its bits
            grads["position"][: len(tokens)] += of_text
            for token, of_place in zip(tokens, of_text, strict=True):
                grads["token"][token] += of_place
        return float(-np.log(picked.astype(np.float64)).mean()), grads

    def train(self, data: bytes, steps: int, rows: int = 16, rate: float = 4e-3, seed: int = 0) -> list[float]:
        """Train by Adam on random pieces of the data; return the losses."""
        training = Training(self, data, steps, rows, rate, seed)
        return [training.step() for _ in range(steps)]


class Training:
    """The training of a model by Adam on random pieces of the data: `rows` of them in each step.

    A step reads `done`, the number of steps before it, the weights, and the means of the gradients and of their
    squares, `first` and `second`; all else follows from the arguments.
    """

    def __init__(self, model: GPT, data: bytes, steps: int, rows: int = 16, rate: float = 4e-3, seed: int = 0) -> None:
        self.model, self.steps, self.rows, self.rate, self.seed = model, steps, rows, rate, seed
        self.ids, self.done = np.frombuffer(data, np.uint8).astype(np.int64), 0
        self.first = {name: np.zeros_like(w) for name, w in model.weights.items()}
        self.second = {name: np.zeros_like(w) for name, w in model.weights.items()}

    def batch(self) -> Array:
        """Return the pieces (rows, context + 1) of the next step."""
        places, length = len(self.ids) - self.model.context, self.model.context + 1
        starts = (random_bits(f"{self.seed} {self.done}", self.rows) % np.uint64(places)).astype(np.int64)
        return self.ids[starts[:, None] + np.arange(length)]

    def step(self) -> float:
        """Make the next step and return its loss, the mean in nats."""
        loss, grads = self.model.gradients(self.batch())
        left = [1.0, 1.0]  # of the first gradients in the two means; a power would be that of a C library
        for _ in range(self.done + 1):
            left = [left[0] * 0.9, left[1] * 0.99]
        rate = np.float32(self.rate * min(1.0, (self.steps - self.done) / (0.3 * self.steps)))
        for name, grad in grads.items():
            first, second = self.first[name], self.second[name]
            first += (grad - first) * np.float32(0.1)
            second += (grad * grad - second) * np.float32(0.01)
            size = np.sqrt(second / np.float32(1 - left[1])) + np.float32(1e-8)
            self.model.weights[name] -= rate * (first / np.float32(1 - left[0])) / size
        self.done += 1
        return loss


# A word with the space before it, a number, other signs, or white space. JavaScript reads the pattern alike, in UTF-16.
WORD = r" ?[A-Za-z]+| ?[0-9]+| ?[^ \t\n\r\f\vA-Za-z0-9]+|[ \t\n\r\f\v]+"
LINE = r"(^|\n)(?=[A-Za-z])"


class Pieces(list[bytes]):
    """The bytes of each token; the first 256 are the single bytes.

    A letter that begins a line gets a space before it: the first word is the piece that it is elsewhere. A text is cut
    into words by `WORD`. A word that is a piece is one token; another is cut into bytes in UTF-8: of the pairs of
    `merges` that are neighbours in the word, the first in that list is joined, wherever it is in the word, from left to
    right; and again, until no pair is left.
    """

    def __init__(self, pieces: Sequence[bytes], merges: Sequence[Sequence[int]]) -> None:
        super().__init__(pieces)
        self._index = index = {piece: i for i, piece in enumerate(pieces)}
        self.merges = [(int(a), int(b)) for a, b in merges]
        self._joined = {pair: (rank, index[self[pair[0]] + self[pair[1]]]) for rank, pair in enumerate(self.merges)}

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text."""
        tokens = list[int]()
        for word in re.findall(WORD, re.sub(LINE, r"\1 ", text)):
            whole = self._index.get(word.encode())
            ids = list(word.encode()) if whole is None else [whole]
            while pairs := [pair for pair in pairwise(ids) if pair in self._joined]:
                first = min(pairs, key=self._joined.__getitem__)
                i, joined = 0, self._joined[first][1]
                while i < len(ids) - 1:
                    if (ids[i], ids[i + 1]) == first:
                        ids[i : i + 2] = [joined]
                    i += 1
            tokens += ids
        return tokens

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of tokens."""
        return b"".join(self[i] for i in ids).decode(errors="replace")


def save(path: str | Path, model: GPT, pieces: Pieces) -> None:
    """Write a model and its tokens as an .npz file: matrices in 8 bits, with a scale for each row."""
    arrays = {"heads": np.int32(model.heads), "merges": np.array(pieces.merges, np.int16)}
    arrays["pieces"] = np.frombuffer(b"".join(pieces), np.uint8)
    arrays["lengths"] = np.array([len(piece) for piece in pieces], np.uint8)
    for name, weight in model.weights.items():
        arrays[name] = weight
        if weight.ndim == 2:
            arrays[name], arrays[f"{name} scale"] = cattn.quantize(weight)
    np.savez_compressed(path, **arrays)


def load(path: str | Path) -> tuple[GPT, Pieces]:
    """Return a model and its tokens."""
    with np.load(path) as arrays:
        read = dict(arrays)
    heads, merges, joined, lengths = (read.pop(name) for name in ("heads", "merges", "pieces", "lengths"))
    scales = {name: read.pop(f"{name} scale") for name in list(read) if f"{name} scale" in read}
    (vocabulary, d), context = read["token"].shape, len(read["position"])
    model = GPT(d, int(heads), sum(name.endswith("qkv") for name in read), context, vocabulary=vocabulary)
    for name, weight in read.items():
        model.weights[name] = cattn.dequantize(weight, scales[name]) if name in scales else weight
    pieces = [joined[end - n : end].tobytes() for n, end in zip(lengths, np.cumsum(lengths), strict=True)]
    return model, Pieces(pieces, merges)


if __name__ == "__main__":
    losses = GPT().train(text(), 200)
    print(f"bits per byte: {losses[0] / np.log(2):.2f} before, {np.mean(losses[-10:]) / np.log(2):.2f} after 200 steps")
