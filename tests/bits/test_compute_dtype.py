"""Products of bfloat16: the bits of one arithmetic, on every path and table, for every way to the same numbers."""

import functools
import itertools
import subprocess
import sys
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import cattn
from cattn import reference
from cattn.functional import linear, linear_backward
from support import (
    BF16,
    INF,
    NAN,
    WORDS,
    assert_same_bits,
    benchmarks_importable,
    every_way,
    everything,
    flushed,
    forced,
    in_contract,
    layouts,
    looped,
    pairs,
    product,
    sum_of_groups,
    sum_of_pairs,
    table,
)
from support.bit_cases import BLOCK, CASES, Call, Normal, build, yardstick

with benchmarks_importable():
    from benchmarks.accuracy import BOUNDS


@pytest.fixture(params=WORDS)
def products(request: pytest.FixtureRequest) -> Any:
    """The options of a call with products of bfloat16."""
    return {"compute_dtype": request.param}


def tiles_are_usable() -> bool:
    tables: Any = cattn.show_config("dicts")["tables"]
    return any(entry["name"] == "avx512_amx" and entry["usable"] for entry in tables)


@functools.cache
def yardstick_of(name: str, isa: str, word: Any) -> cattn.AttentionOutput:
    return yardstick(build(name, np.float32) | {"compute_dtype": word}, isa)


@pytest.mark.promise("products of bfloat16", "paths and tables")
@looped("name", CASES)
def test_every_path_and_table_gives_the_same_bits(name: str, isa: str, products: Any) -> None:
    call = build(name, np.float32) | products
    right = yardstick_of(name, "scalar" if in_contract(isa) else isa, products["compute_dtype"])
    for way, result in every_way(lambda: everything(**call), tiny=call["key"].shape[-2] <= BLOCK, threads=(3,)):
        assert_same_bits(result, right, way)


@pytest.mark.parametrize("rows", [1, 5, 98])
@pytest.mark.parametrize(("T_k", "d", "d_v"), [(0, 0, 0), (0, 3, 2), (250, 0, 3), (250, 5, 0), (250, 0, 0), (1, 0, 1)])
def test_sizes_of_zero(rows: int, T_k: int, d: int, d_v: int, isa: str, normal: Normal, products: Any) -> None:
    """Without columns all scores are 0, and the output is the mean of the values."""
    call: Call = {"query": normal(2, rows, d), "key": normal(2, T_k, d), "value": normal(2, T_k, d_v)} | products
    call["value"][...] = call["value"].astype(BF16)
    right = yardstick(call, isa)
    assert right.out.shape == (2, rows, d_v)
    if d == 0 and T_k:
        np.testing.assert_allclose(right.out, np.repeat(call["value"].mean(1, keepdims=True), rows, 1), atol=2.0**-8)
    for way, result in every_way(lambda: everything(**call), tiny=T_k <= BLOCK):
        assert_same_bits(result, right, way)


# ---- the arithmetic ------------------------------------------------------------------------------------------------
@pytest.mark.promise("products of bfloat16")
@pytest.mark.parametrize("power", [0, 20, -60, -63, -75])
@pytest.mark.parametrize("columns", [1, 7, 45])
def test_scores_are_sums_of_pairs(columns: int, power: int, isa: str, rng: np.random.Generator, products: Any) -> None:
    """Numbers of many sizes, whose sums cancel; with negative powers also sums below the smallest normal number."""
    if not in_contract(isa):
        pytest.skip("without an FMA")
    shape = (17, columns)
    query, key = (
        flushed(np.ldexp(rng.standard_normal(shape), power + rng.integers(-6, 7, shape)).astype(BF16).astype(float))
        for _ in range(2)
    )  # fmt: skip
    key[::3] = -key[1::3][: len(key[::3])] if len(key[1::3]) == len(key[::3]) else key[::3]
    right = np.array([[product(q, k, products["compute_dtype"]) for k in key] for q in query])
    for path in ("tile", "rows"):
        with forced(path):
            scores = cattn.attention_weights(
                query.astype(np.float32), key.astype(np.float32), scale=1.0, stage="qk", **products
            )
        np.testing.assert_array_equal(scores, right.astype(np.float32), err_msg=path)


def test_subnormal_numbers_and_sums_are_zeros(isa: str, products: Any) -> None:
    tiny = float(np.finfo(np.float32).tiny)
    one = np.ones((1, 2), np.float32)

    def score(query: float, key: float = 1.0) -> float:
        at = np.array([[query, 0.0]], np.float32), np.float32([[key, 0.0]])
        return float(cattn.attention_weights(*at, scale=1.0, stage="qk", **products)[0, 0])

    assert score(tiny) == tiny
    assert score(tiny * (1 - 2**-20)) == 0, "a number that would be rounded to the smallest normal one"
    assert score(tiny, 0.5) == 0
    assert score(2 * tiny, 0.5) == tiny
    assert score(-tiny * 0.99) == 0
    value = np.full((1, 1), tiny / 2, np.float32)
    assert cattn.scaled_dot_product_attention(one, one, value, **products) == 0


def test_values_agree_with_the_reference(isa: str, normal: Normal, products: Any) -> None:
    """Weights and lse with the errors of float32; the output with the rounding of the weights, 2**-9 of each."""
    call = {"query": normal(2, 3, 150, 40), "key": normal(2, 3, 400, 40), "value": normal(2, 3, 400, 24)}
    call |= products | {"is_causal": "lower_right", "softcap": 3.0, "sinks": [0.5, 1.0, -2.0]}
    found = everything(**call)
    right = reference.scaled_dot_product_attention(**call, return_weights=True, return_lse=True)
    np.testing.assert_allclose(found.weights, right.weights, rtol=0, atol=1e-6)
    np.testing.assert_allclose(found.lse, right.lse, rtol=0, atol=1e-5)
    error = np.abs(found.out - right.out)
    assert 1e-5 < error.max() < 2.0**-8
    assert (error <= 2.0**-8.5 * (right.weights @ np.abs(call["value"])) + 1e-6).all()


@pytest.mark.promise("accuracy")
@pytest.mark.parametrize("is_causal", [False, True])
def test_errors_are_like_those_of_pytorch(is_causal: bool, normal: Normal, products: Any) -> None:
    """On bfloat16 numbers, against float64."""
    torch = pytest.importorskip("torch")
    arrays = [normal(2, 4, 500, 64).astype(BF16) for _ in range(3)]
    right = reference.scaled_dot_product_attention(*(a.astype(float) for a in arrays), is_causal=is_causal)
    tensors = [torch.from_numpy(a.view(np.int16)).view(torch.bfloat16) for a in arrays]
    theirs = torch.nn.functional.scaled_dot_product_attention(*tensors, is_causal=is_causal).double().numpy()
    ours = cattn.scaled_dot_product_attention(*arrays, is_causal=is_causal, **products).astype(float)
    wide = [a.astype(np.float32) for a in arrays]
    unrounded = cattn.scaled_dot_product_attention(*wide, is_causal=is_causal, **products)
    for norm, most in zip((lambda e: np.sqrt(np.mean(e**2)), np.max), BOUNDS["products of bfloat16"], strict=True):
        error = norm(np.abs(theirs - right))
        assert norm(np.abs(ours - right)) < most * error
        assert norm(np.abs(unrounded - right)) < error, "in float32 the result itself is not rounded"


# ---- a row and its surroundings ------------------------------------------------------------------------------------
# Calls with enough queries that keys and values are rounded once for all of them.
COPIED: dict[str, Any] = {
    "odd sizes": lambda normal: {"query": normal(2, 3, 500, 17), "key": normal(2, 3, 700, 17),
                                 "value": normal(2, 3, 700, 21)},
    "groups": lambda normal: {"query": normal(2, 6, 130, 16), "key": normal(2, 2, 700, 16),
                              "value": normal(2, 2, 700, 40), "is_causal": "lower_right"},
    "shared keys": lambda normal: {"query": normal(4, 3, 300, 16), "key": normal(1, 3, 300, 16),
                                   "value": normal(4, 1, 300, 16), "is_causal": True},
    "shared keys, lengths": lambda normal: {
        "query": normal(4, 3, 300, 16), "key": normal(1, 3, 300, 16), "value": normal(1, 3, 300, 16),
        "is_causal": True, "key_value_seq_lengths": [3, 300, 200, 0]},
    "starts and lengths": lambda normal: {
        "query": normal(4, 3, 300, 16), "key": normal(4, 3, 300, 16), "value": normal(4, 3, 300, 16),
        "is_causal": True, "key_value_seq_lengths": [30, 300, 200, 0], "key_value_seq_starts": [3, 5, 0, 0]},
    "strides": lambda normal: {
        "query": normal(2, 300, 3, 16).swapaxes(1, 2), "key": normal(2, 300, 3, 16).swapaxes(1, 2)[..., ::-1],
        "value": normal(2, 3, 16, 600)[..., ::-2].swapaxes(2, 3)},
    "window": lambda normal: {"query": normal(2, 300, 16), "key": normal(2, 900, 16), "value": normal(2, 900, 16),
                              "query_offset": 300, "window_size": (500, 80)},
    "narrow window": lambda normal: {"query": normal(2, 900, 16), "key": normal(2, 900, 16),
                                     "value": normal(2, 900, 16), "is_causal": True, "window_size": (40, 0)},
}  # fmt: skip


@pytest.mark.promise("products of bfloat16", "threads and batch")
@pytest.mark.parametrize("name", COPIED)
def test_rows_have_the_bits_that_they_have_alone(name: str, isa: str, normal: Normal, products: Any) -> None:
    """Few queries read keys and values as they are, many read copies."""
    call = COPIED[name](normal) | products
    whole = everything(**call)
    T_q, T_k = call["query"].shape[-2], call["key"].shape[-2]
    lengths = np.asarray(call.get("key_value_seq_lengths", T_k))
    offset = call.get("query_offset", lengths - T_q if call.get("is_causal") == "lower_right" else 0)
    step = call | ({"is_causal": True} if call.get("is_causal") else {})
    for rows in (slice(0, 1), slice(90, 190), slice(T_q - 3, T_q)):
        few = step | {"query": call["query"][..., rows, :], "query_offset": np.asarray(offset) + rows.start}
        found = everything(**few)
        for field in ("out", "weights"):
            assert_same_bits(getattr(found, field), getattr(whole, field)[..., rows, :].copy(), f"{field} {rows}")
        assert_same_bits(found.lse, whole.lse[..., rows].copy(), f"lse {rows}")
    for way, result in every_way(lambda: everything(**call), tiny=False, threads=(1, 2, 4)):
        assert_same_bits(result, whole, way)


@pytest.mark.promise("decoding")
@pytest.mark.parametrize("is_causal", [False, True])
def test_packed_sequences_have_the_bits_that_they_have_alone(
    is_causal: bool, isa: str, normal: Normal, products: Any
) -> None:
    """The first one is long enough for a copy of all keys in the order of tiles, where each has a place of its own."""
    edges, options = np.cumsum([0, 500, 3, 260]), products | {"is_causal": is_causal}
    query, key, value = (normal(int(edges[-1]), 2, 40).astype(np.float32) for _ in range(3))
    with table(isa):
        packed = cattn.varlen_attention(query, key, value, edges, edges, **options)
        for start, end in itertools.pairwise(edges):
            alone = (x[start:end].swapaxes(0, 1) for x in (query, key, value))
            result = cattn.scaled_dot_product_attention(*alone, **options)
            assert_same_bits(np.ascontiguousarray(packed[start:end].swapaxes(0, 1)), result)


@pytest.mark.parametrize("dtype", [np.float32, BF16, "int8"])
def test_decoding_has_the_bits_of_one_pass(dtype: Any, isa: str, normal: Normal, products: Any) -> None:
    query, key, value = normal(1, 4, 600, 16), normal(1, 2, 600, 16), normal(1, 2, 600, 16)
    cache = cattn.KVCache(1, 2, 600, 16, dtype=dtype)
    cache.append(key, value)
    options: Any = products | {"window_size": (450, 0), "sinks": [0.5, -1.0, 2.0, 0.0]}
    full = cattn.causal_attention(query, cache.k, cache.v, **options)
    step = cattn.KVCache(1, 2, 600, 16, dtype=dtype)
    done = 0
    for n in (500, 1, 1, 5, 33, 1, 59):
        new = slice(done, done + n)
        step.append(key[..., new, :], value[..., new, :])
        found = cattn.causal_attention(query[..., new, :], step, **options)
        assert_same_bits(found, full[..., new, :].copy(), f"tokens {new}")
        done += n


@pytest.mark.promise("hidden keys")
@pytest.mark.parametrize("poison", [NAN, -NAN, INF, -INF, 3e38, 1e-45])
@pytest.mark.parametrize("T_q", [7, 100, 400])
def test_hidden_keys_change_no_bit(poison: float, T_q: int, isa: str, normal: Normal, products: Any) -> None:
    """Single keys by a mask, a block, and the keys after the last one; visible NaN shows only where it is seen."""
    T_k = 500
    unseen = (np.arange(T_k) % 3 == 1) | (np.arange(T_k) > 460) | ((np.arange(T_k) > 90) & (np.arange(T_k) < 250))
    hidden = unseen | (np.arange(T_k) % 7 == np.arange(T_q)[:, None] % 7)
    call = {"query": normal(2, T_q, 9), "key": normal(2, T_k, 9), "value": normal(2, T_k, 19)} | products
    call |= {"attn_mask": ~hidden, "is_causal": True, "query_offset": 60}
    dirty = call | {name: np.where(unseen[:, None], np.float32(poison), call[name]) for name in ("key", "value")}
    right = everything(**call)
    for way, result in every_way(lambda: everything(**dirty), tiny=False):
        assert_same_bits(result, right, way)
    seen = call | {"value": call["value"].copy()}
    seen["value"][:, 30] = NAN
    sees = ~hidden[:, 30] & (np.arange(T_q) + 60 >= 30)
    for way, result in every_way(lambda: everything(**seen), tiny=False):
        assert np.isnan(result.out).all(-1).tolist() == [sees.tolist()] * 2, way
        assert_same_bits(result.out[:, ~sees].copy(), right.out[:, ~sees].copy(), way)


def test_huge_weights_sums_do_not_overflow(isa: str, products: Any) -> None:
    """Sums of values near the largest number are computed a second time, from smaller weights."""
    largest = np.float32(ml_dtypes.finfo(BF16).max)
    query, key = np.zeros((100, 4), np.float32), np.zeros((300, 4), np.float32)
    for T_q in (1, 100):
        out = cattn.scaled_dot_product_attention(query[:T_q], key, np.full((300, 3), largest), **products)
        np.testing.assert_allclose(out, np.full((T_q, 3), largest), rtol=2.0**-8)


# ---- gradients -----------------------------------------------------------------------------------------------------
@pytest.mark.promise("gradients")
@pytest.mark.parametrize("dtype", [np.float32, BF16])
def test_gradients_are_those_of_float32_at_the_rounded_inputs(
    dtype: Any, isa: str, normal: Normal, products: Any
) -> None:
    arrays = [normal(2, 3, 120, 16).astype(dtype) for _ in range(3)]
    options: Any = {"is_causal": True, "sinks": np.float32([0.5, 1, 2]), "dropout_p": 0.2, "rng": 5}
    result = cattn.scaled_dot_product_attention(*arrays, return_lse=np.float64, **options, **products)
    grad_out = normal(2, 3, 120, 16).astype(dtype)
    found = cattn.attention_backward(grad_out, *arrays, result.out, result.lse, **options, **products)
    near = [a.astype(BF16).astype(dtype) for a in arrays]
    right = cattn.attention_backward(grad_out, *near, result.out, result.lse, **options)
    for name in ("query", "key", "value", "sinks"):
        assert_same_bits(getattr(found, name), getattr(right, name), name)
        assert getattr(found, name).dtype == (np.float32 if name == "sinks" else dtype)


# ---- arguments -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("compute_dtype", ["bfloat16", ml_dtypes.bfloat16, BF16])
def test_it_is_a_word_or_a_dtype(compute_dtype: Any, normal: Normal) -> None:
    x, products = normal(2, 5, 8), {"compute_dtype": "bfloat16"}
    right = cattn.scaled_dot_product_attention(x, x, x, **products)
    assert_same_bits(cattn.scaled_dot_product_attention(x, x, x, compute_dtype=compute_dtype), right)
    assert not np.array_equal(cattn.scaled_dot_product_attention(x, x, x), right)
    np.testing.assert_array_equal(reference.scaled_dot_product_attention(x, x, x, compute_dtype=compute_dtype),
                                  reference.scaled_dot_product_attention(x, x, x, **products))  # fmt: skip


@pytest.mark.parametrize(
    "wrong", ["float32", "BFLOAT16", "", np.float32, np.dtype(np.float16), float, True, 16, [None]]
)
def test_anything_else_is_named(wrong: Any, normal: Normal) -> None:
    x = normal(2, 5, 8)
    with pytest.raises(ValueError, match="compute_dtype must be None, 'bfloat16' or 'bfloat16_tiles', got"):
        cattn.scaled_dot_product_attention(x, x, x, compute_dtype=wrong)


@pytest.mark.parametrize("dtype", [np.float64, np.float16, np.int64])
def test_wide_and_other_small_numbers_are_refused(dtype: Any, products: Any) -> None:
    x = np.ones((2, 5, 8), dtype)
    name = "float16" if dtype is np.float16 else "float64"
    word = products["compute_dtype"]
    message = f"compute_dtype='{word}' is for float32 and bfloat16, and query, key and value are {name}: convert"
    for call in (
        lambda: cattn.scaled_dot_product_attention(x, x, x, **products),
        lambda: cattn.attention_weights(x, x, **products),
        lambda: cattn.varlen_attention(x, x, x, [0, 2], [0, 2], **products),
        lambda: cattn.attention_backward(x, x, x, x, x, np.ones((2, 5)), **products),
    ):
        with pytest.raises(TypeError, match=message):
            call()


def test_quantized_numbers_have_no_gradient(normal: Normal, products: Any) -> None:
    x = normal(2, 5, 8)
    with pytest.raises(
        ValueError, match=f"compute_dtype='{products['compute_dtype']}' has no gradients of a Quantized key or value"
    ):
        cattn.attention_backward(x, x, cattn.quantize(x), x, x, np.ones((2, 5)), **products)


def test_derivatives_in_a_direction_refuse_it(normal: Normal, products: Any) -> None:
    x = normal(2, 5, 8)
    with pytest.raises(TypeError, match="keyword argument 'compute_dtype': leave it out, and round the inputs"):
        cattn.attention_jvp(x, x, x, x, **products)


def test_the_reference_rounds_in_the_same_way(rng: np.random.Generator, products: Any) -> None:
    x = np.ldexp(rng.standard_normal(5000), rng.integers(-130, 120, 5000)).astype(np.float32)
    near = reference._shared.rounded_to_bfloat16(x)
    np.testing.assert_array_equal(near, flushed(np.where(np.abs(x) < np.finfo(np.float32).tiny, 0, x).astype(BF16)
                                                .astype(float)))  # fmt: skip
    one = np.ones((1, 1), np.float32)
    scores = cattn.attention_weights(one, x[:, None], scale=1.0, stage="qk", **products)
    np.testing.assert_array_equal(scores[0], near)


def test_tables_name_the_same_kernels_elsewhere() -> None:
    """A table with the instruction has the other kernels of its neighbour: the bits of float32 are the same."""
    x = np.random.default_rng(0).standard_normal((3, 200, 16)).astype(np.float32)
    usable = {entry["name"] for entry in cattn.show_config("dicts")["tables"] if entry["usable"]}
    for name in usable:
        if "_bf16" in name or "_amx" in name:
            with table(name):
                found = cattn.scaled_dot_product_attention(x, x, x)
            with table(name.partition("_bf16")[0].removesuffix("_amx")):
                assert_same_bits(found, cattn.scaled_dot_product_attention(x, x, x))


def test_the_configuration_names_the_instructions_for_tiles(isa: str) -> None:
    found = cattn.show_config("dicts")["bfloat16_tiles"]
    assert found == "float32 instructions" or (found == "AMX" and isa == "avx512_amx")


IN_A_PROCESS = """
import os, signal, sys, threading, time
import numpy as np, cattn
from cattn import _cattn

x = np.random.default_rng(0).standard_normal((3, 400, 40)).astype(np.float32)
def attend(into=None):
    found = cattn.causal_attention(x, x, x, compute_dtype="bfloat16_tiles").tobytes()
    found += cattn.functional.linear(x, x[0], compute_dtype="bfloat16_tiles").tobytes()
    if into is not None:
        into.append(found)
    return found

_cattn._set_isa("scalar")
right = attend()
_cattn._set_isa("avx512_amx")
threading.stack_size(64 * 1024)
begin, results = threading.Event(), []
early = threading.Thread(target=lambda: (begin.wait(), attend(results)))
early.start()  # before the process has the permission
assert attend() == right
begin.set()
early.join()
late = threading.Thread(target=attend, args=(results,))
late.start()
late.join()
assert results == [right] * 2
child = os.fork()
if child == 0:
    os._exit(attend() != right)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
caught = []
signal.signal(signal.SIGALRM, lambda *_: caught.append(1))
signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
while len(caught) < 100:
    assert attend() == right
signal.setitimer(signal.ITIMER_REAL, 0)
"""


@pytest.mark.skipif(not tiles_are_usable(), reason="needs a processor with AMX and a system that saves its tiles")
@pytest.mark.parametrize("options", [(), ("-X", "faulthandler")], ids=str)
def test_tiles_of_the_processor_serve_threads_forks_and_signals(options: tuple[str, ...]) -> None:
    """Threads with stacks of 64 KiB, from before the permission and after it; handlers of signals meanwhile."""
    done = subprocess.run([sys.executable, *options, "-c", IN_A_PROCESS], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# ---- projections -----------------------------------------------------------------------------------------------------
# Sizes (T, K, N) around pairs, vectors, 16 chains, slabs of 1,024 columns, blocks of 96 and 192 rows, and 8 rows, up to
# which lanes are chains.
SIZES = [
    (1, 1, 1), (1, 32, 16), (2, 33, 3), (3, 1023, 5), (4, 1024, 1), (5, 1025, 18), (7, 5, 40), (8, 8400, 20), (9, 1, 9),
    (17, 1100, 17), (97, 67, 98), (100, 2080, 30), (193, 20, 7), (20, 3, 400), (8, 133, 300), (1, 20, 2100),
]  # fmt: skip


def sum_by_law(a: np.ndarray, b: np.ndarray, word: str) -> np.float32:
    """Add the pairs in the order of the bit contract: slabs of 512, 16 chains by index, the chains in order."""
    if word == "bfloat16_tiles":
        return np.float32(sum_of_groups(a, b)) + np.float32(0)
    total = np.float32(0)
    for start in range(0, -(-len(a) // 2), 512):
        slab = [pairs(row)[start : start + 512] for row in (a, b)]
        for chain in range(16):
            total += np.float32(sum_of_pairs(*(half[chain::16].ravel() for half in slab)))
    return total


# ---- values ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_linear_agrees_with_the_reference(
    isa: str, size: tuple[int, int, int], rng: np.random.Generator, products: Any
) -> None:
    t, k, n = size
    x, weight = rng.standard_normal((t, k), np.float32), rng.standard_normal((n, k), np.float32)
    near = [np.abs(a.astype(BF16).astype(np.float64)) for a in (x, weight)]
    bias = rng.standard_normal(n, np.float32)
    bound = (66 + 16 * -(-k // 1024)) * 2.0**-24 * (near[0] @ near[1].T)
    for b in (None, bias):
        actual, right = linear(x, weight, b, **products), reference.linear(x, weight, b, **products)
        assert actual.dtype == np.float32
        assert (np.abs(actual - right) <= bound + 2.0**-23 * np.abs(right)).all()


@pytest.mark.promise("projections' bits", "products of bfloat16")
@pytest.mark.parametrize("power", [0, -60])
@pytest.mark.parametrize(("t", "k", "n"), [(1, 2100, 2), (6, 75, 5), (20, 1027, 3), (3, 40, 20)])
def test_the_bits_follow_from_the_order_of_the_sums(
    isa: str, t: int, k: int, n: int, power: int, rng: np.random.Generator, products: Any
) -> None:
    """Numbers of many sizes, whose sums cancel; with a negative power also sums below the smallest normal number."""
    if not in_contract(isa):
        pytest.skip("without an FMA")
    x, weight = (
        flushed(np.ldexp(rng.standard_normal(s), power + rng.integers(-6, 7, s)).astype(BF16).astype(float))
        for s in ((t, k), (n, k))
    )
    weight[:, 1::2] = -weight[:, : k // 2 * 2 : 2]
    expected = np.array(
        [[sum_by_law(row, w, products["compute_dtype"]) for w in weight[: 4 if t > 1 else n]] for row in x[:4]]
    )
    found = linear(x.astype(np.float32), weight.astype(np.float32), **products)
    assert_same_bits(found[:4, : expected.shape[1]].copy(), expected)


def test_subnormal_numbers_and_sums_of_projections_are_zeros(isa: str, products: Any) -> None:
    tiny = np.finfo(np.float32).tiny
    for t in (1, 20):
        for x, weight, right in [
            (tiny, 1, tiny), (tiny * (1 - 2.0**-20), 1, 0), (tiny, 0.5, 0), (2 * tiny, 0.5, tiny), (-tiny * 0.99, 1, 0)
        ]:  # fmt: skip
            found = linear(np.full((t, 1), x, np.float32), np.float32([[weight]]), **products)
            assert_same_bits(found, np.full((t, 1), right, np.float32))


def test_special_numbers_spread_as_in_a_product(isa: str, products: Any) -> None:
    x = np.ones((30, 41), np.float32)
    x[3, 5], x[4, 6], x[5, 7:9] = NAN, INF, (INF, -INF)
    for t in (30, 6):
        y = linear(x[:t], np.ones((21, 41), np.float32), **products)
        assert_same_bits(y[3], np.full(21, NAN, np.float32))
        assert_same_bits(y[4], np.full(21, INF, np.float32))
        assert_same_bits(y[5], np.full(21, NAN, np.float32))
        assert_same_bits(np.delete(y, [3, 4, 5], 0), np.full((t - 3, 21), 41, np.float32))


def test_sizes_of_zero_in_projections(isa: str, products: Any) -> None:
    bias = np.float32([1.0, -2.0, NAN])
    for t in (4, 20):
        nothing = linear(np.zeros((t, 0), np.float32), np.zeros((3, 0), np.float32), bias, **products)
        assert_same_bits(nothing, np.tile(bias, (t, 1)))
    assert linear(np.zeros((0, 5), np.float32), np.zeros((3, 5), np.float32), **products).shape == (0, 3)


# ---- bits ------------------------------------------------------------------------------------------------------------
@pytest.mark.promise("projections' bits", "products of bfloat16")
@pytest.mark.parametrize("columns", [700, 1301])
def test_tables_threads_strides_storages_and_the_batch_change_no_bit(
    isa: str, columns: int, rng: np.random.Generator, products: Any
) -> None:
    x, weight = rng.standard_normal((210, columns), np.float32), rng.standard_normal((115, columns), np.float32)
    bias = rng.standard_normal(115, np.float32)
    with table("scalar" if in_contract(isa) else isa), cattn.num_threads(1):
        y = linear(x, weight, bias, **products)
    for threads in (1, 3):
        with cattn.num_threads(threads):
            assert_same_bits(linear(x, weight, bias, **products), y)
    for rows in (slice(0, 1), slice(5, 7), slice(11, 19), slice(3, 40), slice(100, 208)):
        assert_same_bits(linear(x[rows], weight, bias, **products), y[rows], str(rows))
        assert_same_bits(linear(x, weight[rows], bias[rows], **products), y[:, rows], str(rows))
    small_x, small_weight = x.astype(BF16), weight.astype(BF16)
    for given_x, given_weight in itertools.chain(
        ((other, weight) for other in (*layouts(x), *layouts(small_x), small_x)),
        ((x[:20], other) for other in (*layouts(weight), *layouts(small_weight), small_weight)),
        ((x[:3], other) for other in (*layouts(weight), *layouts(small_weight), small_weight)),
    ):
        assert_same_bits(linear(given_x, given_weight, bias, **products), y[: len(given_x)])
    rounded = linear(small_x, small_weight, bias.astype(BF16), **products)
    assert rounded.dtype == BF16
    wide = linear(x, weight, bias.astype(BF16).astype(np.float32), **products)
    assert_same_bits(rounded, wide.astype(BF16))


@pytest.mark.promise("projections' bits", "products of bfloat16")
@given(seed=st.integers(0, 2**32 - 1))
def test_rows_alone_have_the_bits_of_any_batch(seed: int, products: Any) -> None:
    rng = np.random.default_rng(seed)
    t, k, n = (int(rng.integers(1, most)) for most in (60, 2400, 60))
    x, weight = rng.standard_normal((t, k), np.float32), rng.standard_normal((n, k), np.float32)
    weight = weight.astype(BF16) if seed // 2 % 2 else weight
    weight = layouts(weight)[seed % 3] if seed % 2 else weight
    y = linear(x, weight, **products)
    with table("scalar"):
        for i in rng.integers(0, t, 3):
            assert_same_bits(linear(x[i], weight, **products), y[i])
        first, last = sorted(int(i) for i in rng.integers(0, t + 1, 2))
        assert_same_bits(linear(x[first:last], weight, **products), y[first:last])


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("columns", [24, 1060])
def test_large_results_have_the_bits_of_small_ones(
    isa: str, columns: int, bias: bool, rng: np.random.Generator, products: Any
) -> None:
    """A result of four megabytes bypasses the caches in whole lines, wherever it begins, and with any threads."""
    x, weight = (rng.standard_normal((n, columns), np.float32).astype(BF16) for n in (96, 1088))
    added = rng.standard_normal(1088, np.float32).astype(BF16) if bias else None
    right = np.tile(linear(x, weight, added, **products), (21, 1))
    many = np.tile(x, (21, 1))
    memory = np.empty(right.size + 32, BF16)
    for start, threads in ((0, 1), (7, 2), (8, 1), (31, 2)):
        out = memory[start : start + right.size].reshape(right.shape)
        with cattn.num_threads(threads):
            linear(many, weight, added, out=out, **products)
        assert_same_bits(out, right, f"from element {start} on")


@pytest.mark.parametrize("rows", [1, 5, 40])
@pytest.mark.parametrize("dtype", [np.float32, BF16], ids=str)
def test_what_an_earlier_call_left_in_scratch_has_no_influence(
    isa: str, rows: int, dtype: Any, rng: np.random.Generator, products: Any
) -> None:
    """The element that the last pair of an odd row lacks is 0, whatever lay there before."""
    x, weight = rng.standard_normal((rows, 33)).astype(dtype), rng.standard_normal((50, 33)).astype(dtype)
    weights = (weight, np.asfortranarray(weight))
    with cattn.num_threads(1):
        before = [linear(x, each, **products) for each in weights]
        for each, right in zip(weights, before, strict=True):
            for columns in (64, 34):
                nan = np.full((rows, columns), NAN, dtype)
                linear(nan, np.full((50, columns), NAN, dtype), **products)
                assert_same_bits(linear(x, each, **products), right)


@pytest.mark.parametrize("kind", ["int8", "float8_e4m3fn"])
def test_quantized_weights_are_multiplied_by_their_scales_first(
    kind: Any, isa: str, rng: np.random.Generator, products: Any
) -> None:
    weight, x = rng.standard_normal((45, 701), np.float32), rng.standard_normal((20, 701), np.float32)
    rows = cattn.quantize(weight, dtype=kind)
    columns = rng.random((1, 701), np.float32) + np.float32(0.1)
    for scale in (rows.scale, columns, np.float32(0.01), rows.scale * columns, np.float32(2.0**-100)):
        dense = rows.values.astype(np.float32) * scale
        for t in (20, 8, 1):
            expected = linear(x[:t], dense, **products)
            assert_same_bits(linear(x[:t], cattn.Quantized(rows.values, scale), **products), expected)
            other = cattn.Quantized(np.asfortranarray(rows.values), scale)
            assert_same_bits(linear(x[:t], other, **products), expected)


# ---- gradients -------------------------------------------------------------------------------------------------------
@pytest.mark.promise("gradients")
@pytest.mark.parametrize("dtype", [np.float32, BF16], ids=str)
def test_gradients_are_of_float32_at_the_rounded_factors(
    dtype: Any, isa: str, rng: np.random.Generator, products: Any
) -> None:
    grad, x = rng.standard_normal((2, 30, 37)).astype(dtype), rng.standard_normal((2, 30, 53)).astype(dtype)
    weight = rng.standard_normal((37, 53)).astype(dtype)
    near = [a.astype(BF16).astype(dtype) for a in (x, weight)]
    right = linear_backward(grad, *near)
    for actual, expected in zip(linear_backward(grad, x, weight, **products), right, strict=True):
        assert actual.dtype == dtype
        assert_same_bits(actual, expected)
    own = reference.linear_backward(grad, x, weight, **products)
    for actual, expected in zip(own, reference.linear_backward(grad, *near), strict=True):
        np.testing.assert_array_equal(actual, expected)
    quantized = cattn.quantize(weight.astype(np.float32))
    dense = cattn.dequantize(quantized).astype(BF16).astype(np.float32)
    grad = grad.astype(np.float32)
    assert_same_bits(linear_backward(grad, None, quantized, **products)[0], linear_backward(grad, None, dense)[0])


# ---- arguments -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("function", [linear, linear_backward])
@pytest.mark.parametrize("wrong", ["float32", "", np.float32, True, 16, [None]], ids=str)
def test_another_compute_dtype_is_named(function: Any, wrong: Any) -> None:
    one = np.ones((2, 2), np.float32)
    with pytest.raises(ValueError, match="compute_dtype must be None, 'bfloat16' or 'bfloat16_tiles', got"):
        function(one, one, one[0] if function is linear else one, compute_dtype=wrong)


@pytest.mark.parametrize("dtype", [np.float64, np.float16, np.int64])
def test_other_dtypes_are_refused(dtype: Any, products: Any) -> None:
    other, single = np.ones((2, 2), dtype), np.ones((2, 2), np.float32)
    name = "float16" if dtype is np.float16 else "float64"
    for x, weight in ((other, other), (single, other), (other, single)):
        with pytest.raises(TypeError, match=f"is for float32 and bfloat16, and x, weight and bias are {name}: convert"):
            linear(x, weight, **products)
        with pytest.raises(TypeError, match=f"float32 and bfloat16, and grad_out, x and weight are {name}: convert"):
            linear_backward(single, x, weight, **products)
