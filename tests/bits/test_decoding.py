"""Decoding has the bits of the full pass: token by token with a cache, and in the examples."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cattn
from support import ROOT, assert_same_bits

CHUNK = cattn._cattn._chunk_keys()
TOKENS = 3 * CHUNK + 40
HEADS, KV_HEADS, DEPTH = 4, 2, 8
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "softcap": {"softcap": 3.0},
    "sinks": {"sinks": [0.5, -1.0, 2.0, 0.0]},
    "slopes": {"alibi_slopes": cattn.get_alibi_slopes(HEADS)},
    "window inside a chunk": {"window_size": (700, 0)},
    "window beyond a chunk": {"window_size": (CHUNK + 500, 0)},
    "dropout": {"dropout_p": 0.3, "rng": 7},
    "everything": {
        "softcap": 3.0,
        "sinks": [0.5, -1.0, 2.0, 0.0],
        "alibi_slopes": cattn.get_alibi_slopes(HEADS) / 16,
        "window_size": (CHUNK + 500, 0),
        "dropout_p": 0.3,
        "rng": 7,
    },
}


def sequence(dtype: type) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    shapes = (1, HEADS, TOKENS, DEPTH), (1, KV_HEADS, TOKENS, DEPTH), (1, KV_HEADS, TOKENS, DEPTH)
    query, key, value = (rng.standard_normal(shape).astype(dtype) for shape in shapes)
    return query, key, value


@pytest.mark.promise("decoding")
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("name", OPTIONS)
def test_decoding_token_by_token_has_the_bits_of_one_pass(name: str, dtype: type) -> None:
    """Through a cache: the first 257 tokens, and the last 300 of a sequence longer than three key chunks."""
    query, key, value = sequence(dtype)
    full = cattn.causal_attention(query, key, value, **OPTIONS[name])
    cache = cattn.KVCache(1, KV_HEADS, TOKENS, DEPTH, dtype=dtype)
    for first, last in ((0, 257), (TOKENS - 300, TOKENS)):
        skipped = slice(cache.k.shape[-2], first)
        cache.append(key[..., skipped, :], value[..., skipped, :])
        for t in range(first, last):
            here = slice(t, t + 1)
            cache.append(key[..., here, :], value[..., here, :])
            step = cattn.causal_attention(query[..., here, :], cache.k, cache.v, **OPTIONS[name])
            assert_same_bits(step, full[..., here, :], f"token {t}")


@pytest.mark.parametrize("name", OPTIONS)
def test_decoding_several_tokens_at_a_time_has_the_bits_of_one_pass(name: str, isa: str) -> None:
    """Steps of 2, 5 and 33 tokens, on two threads."""
    query, key, value = sequence(np.float32)
    last = slice(TOKENS - 64, TOKENS)
    full = cattn.causal_attention(query[..., last, :], key, value, **OPTIONS[name])
    for size in (2, 5, 33):
        for start in range(TOKENS - 64, TOKENS, size):
            end = min(start + size, TOKENS)
            with cattn.num_threads(2):
                piece = cattn.causal_attention(
                    query[..., start:end, :], key[..., :end, :], value[..., :end, :], **OPTIONS[name]
                )
            at = slice(start - (TOKENS - 64), end - (TOKENS - 64))
            assert_same_bits(piece, np.ascontiguousarray(full[..., at, :]), f"{size} from {start}")


# ---- the examples: speculative decoding, and a text compressed by a model --------------------------------------------
EXAMPLES = ROOT / "examples"


def load(name: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return runpy.run_path(str(EXAMPLES / f"{name}.py"))


def test_the_gradients_of_the_small_gpt_are_its_derivatives(monkeypatch: pytest.MonkeyPatch) -> None:
    model = load("small_gpt", monkeypatch)["GPT"](16, 2, 2, 12)
    ids = np.random.default_rng(1).integers(0, 256, (3, 13))
    _, grads = model.gradients(ids)
    assert grads.keys() == model.weights.keys()
    rng = np.random.default_rng(2)
    for name, weight in model.weights.items():
        direction = rng.integers(-1, 2, weight.shape).astype(np.float32)
        losses = []
        for sign in (1, -1):
            model.weights[name] = weight + np.float32(sign * 2**-8) * direction
            losses.append(model.gradients(ids)[0])
        model.weights[name] = weight
        slope = (losses[0] - losses[1]) / 2**-7
        expected = float((grads[name] * direction).sum(dtype=np.float64))
        # float32 losses differ from the true ones by some 1e-6, and the third derivative is of order 1
        assert abs(slope - expected) <= 2e-3 + 0.02 * abs(expected), name


@pytest.mark.promise("decoding", "projections' bits")
def test_speculative_decoding_has_the_bits_of_greedy_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    names = load("speculative_decoding", monkeypatch)
    model, data = names["GPT"](), names["text"]()
    losses = model.train(data, 30, rows=4)
    assert losses[-1] < losses[0] - 1
    for prompt in (b"    def __init__(self, ", b"import "):
        runs = names["compare"](model, names["Drafts"](data), prompt, 60)
        right = runs["greedy"]
        assert right.logits.shape == (60, 256)
        for run in runs.values():
            assert run.tokens == right.tokens
            assert run.logits.tobytes() == right.logits.tobytes()
        assert runs["chain"].calls < right.calls  # some drafts were right
        assert runs["tree"].calls < right.calls
    # an untrained model refuses most drafts
    names["compare"](names["GPT"](seed=3), names["Drafts"](data), b"the ", 20)


@pytest.mark.promise("decoding", "projections' bits")
def test_a_text_is_decompressed_by_another_process_on_another_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = load("compress_text", monkeypatch)
    data = names["text"]()[:500] + bytes(range(256))[::7]  # several pieces, bytes that are no text
    size = names["demonstrate"](tmp_path, 30, data)
    assert size < 500
    model = names["load"](str(tmp_path / "model.npz"))
    for short in (b"", b"x", data[:128]):
        assert names["decompress"](model, names["compress"](model, short)) == short
    model.weights["0 qkv"] += np.float32(0.01)
    with pytest.raises(SystemExit, match="other bits"):
        names["decompress"](model, (tmp_path / "text.code").read_bytes())


def test_ranges_are_integers_of_every_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    names = load("compress_text", monkeypatch)
    for logits in (np.zeros(256), np.eye(256)[7] * 1e4, np.linspace(-90, 90, 256)):
        edges = names["ranges"](logits.astype(np.float32))
        assert edges[0] == 0
        assert (np.diff(edges) >= 1).all()
        assert edges[-1] <= names["TOTAL"]
