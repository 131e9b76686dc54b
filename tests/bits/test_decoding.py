"""Decoding with a cache, token by token, gives the bits of the full pass, with every option of attention."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cattn
from support import assert_same_bits

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
