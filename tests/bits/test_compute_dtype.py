"""Products of bfloat16: the bits of one arithmetic, on every path and table, for every way to the same numbers."""

import functools
import subprocess
import sys
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cattn
from cattn import reference
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
    looped,
    product,
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
