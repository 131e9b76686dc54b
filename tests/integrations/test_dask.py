"""cattn.integrations.dask: any chunks give what cattn gives on the whole arrays, wherever the tasks run."""

import doctest
import importlib
import inspect
import itertools
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import cattn
from cattn.reference._masks import Ranges, visible_keys

dask = pytest.importorskip("dask")
da = pytest.importorskip("dask.array")

from cattn.integrations import dask as bridge  # noqa: E402
from cattn.integrations.dask import attention  # noqa: E402
from support import assert_same_bits  # noqa: E402
from support.calls import calls  # noqa: E402


def compute(result: Any, **options: Any) -> Any:
    """Return NumPy arrays, by default from this thread."""
    if isinstance(result, cattn.AttentionOutput):
        return dask.compute(result.out, result.lse, **{"scheduler": "synchronous", **options})
    return result.compute(**{"scheduler": "synchronous", **options})


def test_a_function_of_arrays_warns_that_it_loads_an_array_whole_and_the_module_says_what_it_has() -> None:
    x = np.ones((2, 3))
    with pytest.warns(UserWarning, match=r"^query is a dask array .* cattn\.integrations\.dask\.attention and linear"):
        cattn.causal_attention(da.from_array(x), x, x)
    with pytest.raises(AttributeError, match=r"no attribute 'causal_attention': it has attention, linear_attention$"):
        _ = bridge.causal_attention


def draw_chunks(draw: Callable[[Any], Any], n: int) -> tuple[int, ...]:
    ends = sorted({*draw(st.lists(st.integers(0, n), max_size=3)), n})
    return tuple(np.diff([0, *ends]).tolist())


def normal(*shape: int, dtype: Any = np.float32, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def pairs(result: Any) -> set[tuple[int, ...]]:
    """Return the indices (..., chunk of queries, chunk of keys) of the pairs that have a task."""
    return {key[1:] for key in dict(result.__dask_graph__()) if isinstance(key, tuple) and "cattn-pair" in key[0]}


# ---- values ----------------------------------------------------------------------------------------------------------
@pytest.mark.promise("dask")
@given(st.data())
def test_any_chunks_and_options_give_the_values_of_one_call(data: st.DataObject) -> None:
    """The reference is one call of the core. An error of rounding is a few units of the dtype's last place."""
    call, _ = data.draw(calls())
    for name in ("dropout_p", "rng", "gate"):
        call.pop(name, None)
    expected = cattn.scaled_dot_product_attention(**call, return_lse=True)
    chunked = dict(call)
    for name in ("query", "key", "value", "attn_mask", "bias", "alibi_slopes", "sinks"):
        if name in call and data.draw(st.booleans()):
            chunks = tuple(draw_chunks(data.draw, n) for n in call[name].shape)
            chunked[name] = da.from_array(call[name], chunks=chunks)
    result = attention(**chunked, return_lse=True)
    for lazy, actual, wanted in zip((result.out, result.lse), compute(result), expected[::2], strict=False):
        assert lazy.shape == actual.shape == wanted.shape
        assert lazy.dtype == actual.dtype == wanted.dtype
        tolerance = {2: 2e-2, 4: 2e-5, 8: 1e-12}[wanted.dtype.itemsize]
        np.testing.assert_allclose(actual.astype("d"), wanted.astype("d"), rtol=tolerance, atol=tolerance)


def test_a_mask_with_an_empty_chunk_joins_a_block_mask() -> None:
    query, mask = normal(4, 3), normal(4, 4)
    blocks = {"block_mask": cattn.BlockMask(np.eye(2, dtype=bool), 2)}
    lazy = da.from_array(mask, chunks=((4,), (0, 1, 0, 3)))
    result = attention(query, query, query, lazy, **blocks)
    expected = cattn.scaled_dot_product_attention(query, query, query, mask, **blocks)
    np.testing.assert_allclose(compute(result), expected, rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize(("options", "dtype"), [(False, np.float16), (True, np.float64)])
def test_axes_of_length_0_give_what_one_call_gives(options: bool, dtype: Any) -> None:
    """Batch, heads, queries, keys, columns of keys and of values, each of them empty or not."""
    for B, H, T_q, T_k, D, d_v in itertools.product(*[(0, n) for n in (2, 2, 5, 4, 3, 2)]):
        shapes = [(B, H, T_q, D), (B, H, T_k, D), (B, H, T_k, d_v)]
        call: dict[str, Any] = {
            name: normal(*shape, dtype=dtype) for name, shape in zip(("query", "key", "value"), shapes, strict=True)
        }
        if options:
            call |= {"attn_mask": np.ones((T_q, T_k), bool), "bias": normal(H, T_q, T_k, dtype=dtype)}
            call |= {"alibi_slopes": np.ones(H, dtype), "sinks": np.ones(H, dtype), "is_causal": "upper_left"}
        chunked = {
            name: da.from_array(x, chunks=tuple(max(1, n // 2) for n in x.shape)) if isinstance(x, np.ndarray) else x
            for name, x in call.items()
        }
        expected = cattn.scaled_dot_product_attention(**call, return_lse=True)
        result = attention(**chunked, return_lse=True)
        for lazy, actual, wanted in zip((result.out, result.lse), compute(result), expected[::2], strict=False):
            assert lazy.shape == actual.shape == wanted.shape
            assert lazy.dtype == actual.dtype == wanted.dtype
            tolerance = {2: 2e-3, 4: 2e-6, 8: 1e-12}[wanted.dtype.itemsize]
            np.testing.assert_allclose(actual.astype("d"), wanted.astype("d"), rtol=tolerance)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_one_chunk_of_keys_gives_the_bits_of_one_call(dtype: Any) -> None:
    query, sinks = normal(3, 4, 700, 16, dtype=dtype), normal(4)
    key, value = normal(2, 3, 2, 700, 16, dtype=dtype, seed=1)  # a chunk of queries must not cut a group of two heads
    expected = cattn.causal_attention(query, key, value, softcap=3.0, sinks=sinks, return_lse=True)
    chunked = da.from_array(query, chunks=(1, (3, 1), (100, 250, 350), 8))
    result = attention(
        chunked, key, value, is_causal="lower_right", softcap=3.0, sinks=da.from_array(sinks, 2), return_lse=True
    )
    out, lse = compute(result)
    assert_same_bits(out, expected.out)
    assert_same_bits(lse, expected.lse)
    assert result.out.chunks[:3] == ((1, 1, 1), (2, 1, 1), (100, 250, 350))


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_rows_whose_keys_are_in_one_chunk_at_a_multiple_of_1536_have_the_bits_of_one_call(dtype: Any) -> None:
    query, key, value = normal(3, 4000, 8, dtype=dtype)
    expected = cattn.causal_attention(query, key, value, window_size=(500, 0), return_lse=True)
    chunked = [da.from_array(x, chunks=(1536, 8)) for x in (query, key, value)]
    out, lse = compute(attention(*chunked, is_causal=True, window_size=(500, 0), return_lse=True))
    inside = np.arange(4000) % 1536 >= 500
    assert_same_bits(out[inside], expected.out[inside])
    assert_same_bits(lse[inside], expected.lse[inside])
    rounding = np.finfo(dtype).eps * 8
    np.testing.assert_allclose(out, expected.out, rtol=rounding, atol=rounding)


@pytest.mark.parametrize("chunks", [(1,) * 12, (1, 10, 1), (5, 7), (12,)], ids=str)
@pytest.mark.parametrize(("key_heads", "value_heads"), [(3, 3), (1, 3), (3, 1), (1, 1), (12, 12)])
def test_chunks_of_heads_may_cut_groups(chunks: tuple[int, ...], key_heads: int, value_heads: int) -> None:
    query, key, value = (normal(heads, 20, 4, seed=heads) for heads in (12, key_heads, value_heads))
    slopes, sinks = np.linspace(0, 1, 12), np.linspace(-2, 2, 12)
    options = {"enable_gqa": True, "alibi_slopes": slopes, "sinks": sinks}
    arrays = da.from_array(query, chunks=(chunks, 8, 4)), da.from_array(key, chunks=(2, 20, 4)), value
    expected = cattn.scaled_dot_product_attention(query, key, value, **options)
    assert_same_bits(compute(attention(*arrays, **options)), expected)


def test_forbidden_grouped_heads_are_refused() -> None:
    with pytest.raises(ValueError, match="enable_gqa=False forbids grouped heads"):
        attention(np.ones((1, 4, 3, 2)), np.ones((1, 2, 3, 2)), np.ones((1, 2, 3, 2)), enable_gqa=False)


def test_one_query_head_is_broadcast_to_the_heads_of_the_keys() -> None:
    query, key, value = normal(2, 1, 9, 4), *normal(2, 2, 6, 11, 4, seed=1)
    chunked = [da.from_array(key, chunks=(1, (1, 3, 2), 11, 4)), da.from_array(value, chunks=(2, 2, 4, 4))]
    result = attention(query, *chunked, enable_gqa=False)
    assert result.chunks == ((1, 1), (1, 1, 2, 2), (9,), (4,))
    assert_same_bits(compute(result), cattn.scaled_dot_product_attention(query, key, value))


def test_a_sink_counts_once() -> None:
    query, key, value = normal(3, 1, 2, 50, 4, dtype=np.float64)
    sinks = np.array([3.0, -1.0])
    chunked = [da.from_array(x, chunks=(1, 1, 10, 4)) for x in (query, key, value)]
    expected = cattn.scaled_dot_product_attention(query, key, value, sinks=sinks, return_lse=True)
    out, lse = compute(attention(*chunked, sinks=sinks, return_lse=True))
    np.testing.assert_allclose(out, expected.out, rtol=1e-13, atol=1e-14)
    np.testing.assert_allclose(lse, expected.lse, rtol=1e-13)


def test_chunks_of_an_additive_mask_that_hold_0_and_1_bring_no_warning() -> None:
    x = normal(6, 4)
    mask = np.where(np.arange(6) < 3, 1.0, -2.5)
    out = compute(attention(x, da.from_array(x, 3), x, attn_mask=mask))
    np.testing.assert_allclose(out, cattn.scaled_dot_product_attention(x, x, x, attn_mask=mask), rtol=1e-5, atol=1e-6)
    with pytest.warns(UserWarning, match="attn_mask holds only 0 and 1"):
        attention(x, x, x, attn_mask=np.eye(6))


def test_minus_infinity_in_one_of_two_additive_masks_hides_the_key() -> None:
    x = normal(6, 4)
    attn_mask, bias = np.zeros((6, 6), np.float32), np.full((6, 6), np.inf, np.float32)
    attn_mask[:, 1:] = -np.inf
    bias[:, 0] = 2
    out = compute(attention(x, da.from_array(x, 2), x, attn_mask=attn_mask, bias=bias))
    assert_same_bits(out, np.repeat(x[:1], 6, axis=0))


# ---- quantized keys and values -------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "shapes", [((2, 2, 350, 1), (2, 2, 350, 1)), ((2, 1, 16), (24,)), ((), None), (None, (350, 1))]
)
@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
def test_chunks_of_quantized_keys_have_their_scales(dtype: str, shapes: Any) -> None:
    """Tasks give the bits of tasks on the products."""
    type_ = np.int8 if dtype == "int8" else pytest.importorskip("ml_dtypes").float8_e4m3fn
    query = da.from_array(normal(2, 4, 100, 16), chunks=(1, 3, 40, 16))
    whole: list[Any] = []
    chunked: list[Any] = []
    for name, columns, shape in zip(("key", "value"), (16, 24), shapes, strict=True):
        array = normal(2, 2, 350, columns, seed=columns)
        if shape is not None:
            array = (array * 40).astype(type_)
            scale = np.exp(normal(*shape, seed=5)).astype(np.float32) / 40
        parts = da.from_array(array, chunks=(2, 1, 90, 8))
        pair = parts, None if shape is None else scale if name == "value" else da.from_array(scale, chunks=3)
        chunked.append(parts if shape is None else pair)
        whole.append(array if shape is None else array.astype(np.float32) * scale)
    out = attention(query, *chunked, is_causal="lower_right")
    right = attention(query, *(da.from_array(x, chunks=(2, 1, 90, 8)) for x in whole), is_causal="lower_right")
    assert out.dtype == np.float32
    assert_same_bits(compute(out), compute(right))


# ---- blocks --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("size", [1, 16, 50, 1000])
@pytest.mark.parametrize("given", [None, "bool", "float"])
def test_blocks_are_the_mask_that_they_stand_for(size: int, given: str | None) -> None:
    x = [da.from_array(normal(2, 4, n, 16, seed=n), chunks=(2, 3, 70, 16)) for n in (100, 150, 150)]
    rng = np.random.default_rng(size)
    blocks = rng.random((4, -(-100 // size), -(-150 // size))) < 0.5
    wide = blocks.repeat(size, -2)[:, :100].repeat(size, -1)[..., :150]
    mask = {None: None, "bool": rng.random((100, 150)) < 0.7, "float": normal(100, 150)}[given]
    out = attention(*x, attn_mask=mask, block_mask=(da.from_array(blocks, chunks=(3, 50, 60)), size))
    whole_blocks = attention(*x, attn_mask=mask, block_mask=cattn.BlockMask(blocks, size))
    assert_same_bits(compute(whole_blocks), compute(out))
    whole = wide if mask is None else wide & mask if given == "bool" else np.where(wide, mask, np.float32(-np.inf))
    assert_same_bits(compute(out), compute(attention(*x, attn_mask=whole)))


@pytest.mark.parametrize("size", [1, 16, 50, 200])
def test_blocks_add_few_tasks(size: int) -> None:
    """A mask has a chunk for each pair of chunks of queries and keys. dask's own ``take`` makes thousands of them."""
    query, key = da.ones((2, 300, 8), chunks=(2, 70, 8)), da.ones((2, 400, 8), chunks=(2, 110, 8))
    blocks = da.ones((-(-300 // size), -(-400 // size)), dtype=bool, chunks=(2, -1))
    mask = da.ones((300, 400), dtype=bool, chunks=(70, 110))
    out, plain = attention(query, key, key, block_mask=(blocks, size)), attention(query, key, key, attn_mask=mask)
    assert out.chunks == plain.chunks
    assert pairs(out) == pairs(plain)
    assert len(out.__dask_graph__()) <= 3 * len(plain.__dask_graph__()) + 2 * len(blocks.__dask_graph__())


# ---- schedules -------------------------------------------------------------------------------------------------------
def problem() -> tuple[list[Any], dict[str, Any]]:
    """Return a call that uses every operand: grouped heads, masks, sinks, slopes, lengths, dropout."""
    query, key, value = normal(2, 4, 300, 16), normal(2, 2, 350, 16, seed=1), normal(2, 2, 350, 24, seed=2)
    arrays = [
        da.from_array(query, chunks=(1, 3, 70, 16)),
        da.from_array(key, chunks=(2, 1, 90, 8)),
        da.from_array(value, chunks=(2, 2, 100, 24)),
    ]
    options = {
        "is_causal": "lower_right",
        "attn_mask": da.from_array(normal(300, 350, seed=3) > -2, chunks=(150, 200)),
        "bias": normal(4, 1, 350, seed=4),
        "key_value_seq_lengths": [350, 200],
        "key_value_seq_starts": [100, 0],
        "window_size": (200, -1),
        "softcap": 20.0,
        "alibi_slopes": cattn.get_alibi_slopes(4),
        "sinks": normal(4, seed=5),
        "dropout_p": 0.25,
        "rng": 7,
        "return_lse": True,
    }
    return arrays, options


@pytest.mark.parametrize("word", ["bfloat16", "bfloat16_tiles"])
def test_products_of_bfloat16(word: Any) -> None:
    """Chunks of keys are merged, so that only the errors are those of the whole. float64 is refused at once."""
    arrays = [normal(2, 3, 200, 16, seed=i).astype(np.float32) for i in range(3)]
    chunked = [da.from_array(a, chunks=(1, 3, 90, 16)) for a in arrays]
    whole = cattn.scaled_dot_product_attention(*arrays, compute_dtype=word)
    (found,) = da.compute(attention(*chunked, compute_dtype=word))
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, whole, rtol=0, atol=2.0**-8)
    assert np.abs(found - cattn.scaled_dot_product_attention(*arrays)).max() > 1e-4
    with pytest.raises(TypeError, match=f"compute_dtype='{word}' is for float32 and bfloat16"):
        attention(*(a.astype(np.float64) for a in chunked), compute_dtype=word)


@pytest.mark.promise("dask")
def test_schedulers_and_numbers_of_workers_change_no_bit() -> None:
    arrays, options = problem()
    expected = compute(attention(*arrays, **options))
    for workers, threads in ((1, 1), (2, 1), (5, 3)):
        actual = compute(attention(*arrays, **options, num_threads=threads), scheduler="threads", num_workers=workers)
        assert_same_bits(actual[0], expected[0])
        assert_same_bits(actual[1], expected[1])


def test_a_task_uses_the_threads_that_were_given(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = set()
    function = cattn.scaled_dot_product_attention
    x = da.from_array(normal(8, 4), chunks=4)
    lazy = {n: attention(x, x, x, **options) for n, options in ((1, {}), (3, {"num_threads": 3}))}

    def record(*args: Any, **options: Any) -> Any:
        seen.add(cattn.get_num_threads())
        return function(*args, **options)

    monkeypatch.setattr(cattn, "scaled_dot_product_attention", record)
    for n, result in lazy.items():
        seen.clear()
        compute(result)
        assert seen == {n}


@pytest.fixture
def cluster() -> Iterator[Callable[[int], Any]]:
    """Start clusters of processes with one thread each, and end them."""
    distributed = pytest.importorskip("distributed")
    started: list[Any] = []

    def start(workers: int) -> Any:
        local = distributed.LocalCluster(
            n_workers=workers, threads_per_worker=1, dashboard_address=":0", silence_logs=50
        )
        started.extend([local, distributed.Client(local)])
        return started[-1]

    yield start
    for one in reversed(started):
        one.close()


@pytest.mark.long
@pytest.mark.filterwarnings("default")  # distributed leaves sockets to the garbage collector
def test_processes_change_no_bit(cluster: Callable[[int], Any]) -> None:
    arrays, options = problem()
    expected = compute(attention(*arrays, **options))
    for workers in (1, 2, 4):
        actual = compute(attention(*arrays, **options), scheduler=cluster(workers))
        assert_same_bits(actual[0], expected[0])
        assert_same_bits(actual[1], expected[1])


@pytest.mark.long
@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="this system has no SIGKILL")
@pytest.mark.filterwarnings("default")
def test_a_killed_worker_changes_no_bit(cluster: Callable[[int], Any]) -> None:
    query, key, value = normal(3, 2, 8192, 64)
    chunked = [da.from_array(x, chunks=(1, 1024, 64)) for x in (query, key, value)]
    lazy = attention(*chunked, is_causal=True)
    expected = compute(lazy)
    client = cluster(2)
    before = client.run(os.getpid)
    running = client.compute(lazy)
    while not any("cattn-pair" in str(key) for keys in client.has_what().values() for key in keys):
        assert not running.done(), "no pair was seen"
        time.sleep(0.005)
    assert not running.done()
    os.kill(next(iter(before.values())), signal.SIGKILL)
    assert_same_bits(running.result(), expected)
    assert set(client.run(os.getpid).values()) != set(before.values())


# ---- pairs -----------------------------------------------------------------------------------------------------------
@given(st.data())
def test_only_visible_pairs_have_a_task(data: st.DataObject) -> None:
    draw = data.draw
    T_q, T_k = draw(st.integers(1, 40)), draw(st.integers(1, 40))
    causal = draw(st.sampled_from([False, "upper_left", "lower_right", "offset"]))
    options: dict[str, Any] = {"is_causal": True if causal == "offset" else causal}
    options["window_size"] = tuple(draw(st.sampled_from([-1, None, 0, 1, 5, 20])) for _ in range(2))
    if causal != "lower_right":
        options["query_offset"] = draw(st.integers(-20, 40)) if causal == "offset" else 0
    if draw(st.booleans()):
        options["query_seq_lengths"] = draw(st.lists(st.integers(0, T_q), min_size=3, max_size=3))
        options["key_value_seq_lengths"] = draw(st.lists(st.integers(0, T_k), min_size=3, max_size=3))
    if draw(st.booleans()):
        options["key_value_seq_starts"] = draw(st.lists(st.integers(0, T_k), min_size=3, max_size=3))
    chunks = [draw_chunks(draw, n) for n in (3, T_q, T_k)]
    query = da.ones((3, T_q, 4), chunks=(*chunks[:2], 4))
    key = da.ones((3, T_k, 4), chunks=(chunks[0], chunks[2], 4))
    made = pairs(attention(query, key, key, **options))
    visible = np.broadcast_to(visible_keys(T_q, T_k, Ranges(**options))[0], (3, T_q, T_k))
    starts = [[0, *itertools.accumulate(n for n in axis if n)] for axis in chunks]
    expected = {
        index
        for index in itertools.product(*(range(len(axis) - 1) for axis in starts))
        if visible[tuple(slice(axis[i], axis[i + 1]) for axis, i in zip(starts, index, strict=True))].any()
    }
    assert made == expected


def test_causality_makes_half_of_the_pairs_in_a_tree() -> None:
    x = da.ones((64, 4), chunks=(8, 4))
    graph = dict(attention(x, x, x, is_causal=True).__dask_graph__())
    names = [key[0].rpartition("-")[0] for key in graph if isinstance(key, tuple)]
    assert names.count("cattn-pair") == 36
    # 2 to 4 parts take one merge. 5 parts take two: four of them, then both results. 6 to 8 parts take three.
    assert names.count("cattn-merge") == 3 * 1 + 2 + 3 * 3
    assert names.count("cattn-attention") == 8


def test_nothing_is_computed_before_it_is_asked() -> None:
    def fail(_block: Any) -> Any:
        raise AssertionError("a chunk was computed")

    x = da.ones((4, 4), chunks=2).map_blocks(fail, dtype=float)
    assert attention(x, x, x, attn_mask=x > 0, sinks=x[0, :1]).shape == (4, 4)


# ---- dropout ---------------------------------------------------------------------------------------------------------
def dropped(chunks: Any, rng: Any, p: float = 0.5, **options: Any) -> np.ndarray:
    """Return the dropout mask of zero scores: with the identity as values, the output is the weights."""
    scores = da.zeros((2, 2, 64, 4), chunks=chunks)
    values = da.from_array(np.broadcast_to(np.eye(64), (2, 2, 64, 64)), chunks=(*chunks[:3], 64))
    weights = compute(attention(scores, scores, values, dropout_p=p, rng=rng, **options))
    assert set(np.unique(weights * 64 * (1 - p)).round(12)) == {0.0, 1.0}
    return weights == 0


# With slopes or an offset each chunk of queries has positions of its own; the weights stay equal.
@pytest.mark.parametrize("options", [{}, {"alibi_slopes": [0.0, 0.0]}, {"alibi_slopes": [0.0, 0.0], "query_offset": 7}])
def test_no_two_chunks_share_a_dropout_mask(options: dict[str, Any]) -> None:
    mask = dropped((1, 1, 16, 4), rng=3, **options)
    blocks = mask.reshape(4, 4, 16, 4, 16).swapaxes(2, 3).reshape(64, 256)
    agreement = (blocks[:, None] == blocks).mean(axis=-1)[np.triu_indices(64, 1)]
    assert agreement.max() < 0.5 + 6 * 0.5 / 16  # six standard deviations of 256 coins; the same mask would give 1
    assert abs(mask.mean() - 0.5) < 6 * 0.5 / 128
    assert (mask == dropped((1, 1, 16, 4), rng=3, **options)).all()
    assert (mask != dropped((1, 1, 16, 4), rng=4, **options)).any()


def test_one_chunk_has_the_dropout_mask_of_one_call() -> None:
    query, key, value = normal(3, 2, 3, 40, 8)
    expected = cattn.scaled_dot_product_attention(query, key, value, dropout_p=0.5, rng=11)
    assert_same_bits(compute(attention(query, key, value, dropout_p=0.5, rng=11)), expected)


@pytest.mark.parametrize("rng", [None, "generator"])
def test_the_seed_is_drawn_when_the_graph_is_made(rng: Any) -> None:
    generator = np.random.default_rng(0) if rng == "generator" else None
    x = da.from_array(normal(40, 4), chunks=(10, 4))
    result = attention(x, x, x, dropout_p=0.5, rng=generator, return_lse=True)
    assert_same_bits(compute(result)[0], compute(result)[0])
    again = attention(x, x, x, dropout_p=0.5, rng=result.dropout_seed)
    assert_same_bits(compute(again), compute(result)[0])
    assert (compute(attention(x, x, x, dropout_p=0.5, rng=generator)) != compute(result)[0]).any()


# ---- arguments -------------------------------------------------------------------------------------------------------
def test_it_has_every_option_of_the_function_of_numpy_arrays() -> None:
    own, others = (list(inspect.signature(f).parameters) for f in (attention, cattn.scaled_dot_product_attention))
    assert own == [*others, "num_threads"]


X = np.ones((2, 6, 4))
D = da.from_array(X, chunks=(1, 3, 4))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"return_weights": True}, NotImplementedError, "return_weights is not available for dask arrays"),
        ({"return_dropout_mask": True}, NotImplementedError, "return_dropout_mask is not available"),
        ({"out": np.ones((2, 6, 4))}, NotImplementedError, "out is not available"),
        ({"key_indices": [[0, 1]]}, NotImplementedError, "key_indices is not available for dask arrays: the keys of a"),
        ({"rng": cattn.TorchGenerator(0), "dropout_p": 0.5}, TypeError, "rng is a TorchGenerator"),
        ({"rng": 2**64, "dropout_p": 0.5}, ValueError, "rng must be in"),
        ({"query_offset": da.zeros(2, dtype=int)}, TypeError, r"pass query_offset\.compute\(\)"),
        ({"key_value_seq_lengths": da.zeros(2, dtype=int)}, TypeError, "key_value_seq_lengths must be an int"),
        ({"key_value_seq_starts": da.zeros(2, dtype=int)}, TypeError, r"pass key_value_seq_starts\.compute\(\)"),
        ({"key_value_seq_starts": [1, 7]}, ValueError, "key_value_seq_starts must be between 0 and 6"),
        ({"query_seq_lengths": [1, 7]}, ValueError, "query_seq_lengths must be between 0 and 6"),
        ({"num_threads": 0}, ValueError, "num_threads must be at least 1"),
        ({"attn_mask": da.ones((6, 6), dtype=int)}, TypeError, "attn_mask has dtype int64"),
        ({"bias": da.ones((6, 5))}, ValueError, "bias has shape"),
        ({"sinks": da.ones(3)}, ValueError, "sinks has shape"),
        ({"alibi_slopes": [-1.0]}, ValueError, "alibi_slopes must be finite and not negative"),
        ({"block_mask": [[True]]}, TypeError, r"block_mask must be a cattn.BlockMask or a pair .*, got list"),
        ({"block_mask": ([[True]], 0)}, ValueError, "size must be at least 1"),
        ({"block_mask": ([[1.0]], 3)}, TypeError, "block_mask has dtype float64"),
        ({"block_mask": cattn.BlockMask(np.ones((3, 3), bool), 3)}, ValueError,
         r"does not broadcast to the blocks.*\(2, 2, 2\)"),
        ({"key": (D, 1.0)}, TypeError, "key has dtype float64 and a scale; scales belong to int8"),
        ({"key": (D, 1.0, 2.0)}, TypeError, r"key must be an array, .* a pair \(values, scale\), got a tuple of 3"),
        ({"value": (D.astype("i1"), np.ones((6, 2)))}, ValueError,
         r"value.scale has shape \(6, 2\), which does not broadcast to the shape of value \(2, 6, 4\)"),
        ({"value": (D.astype("i1"), D > 0)}, TypeError, "value.scale has dtype bool"),
        ({"softcap": -1}, ValueError, "softcap"),
        ({"scale": np.inf}, ValueError, "scale"),
        ({"dropout_p": 2}, ValueError, "dropout_p"),
        ({"is_causal": "left"}, ValueError, "is_causal"),
        ({"window_size": 3}, TypeError, "window_size"),
        ({"key": D.astype(complex)}, TypeError, "key has dtype complex128"),
        ({"value": D[:, :5]}, ValueError, "value"),
        ({"query": D[D[:, 0, 0] > 0]}, ValueError, "query has chunks of unknown sizes"),
        ({"query": np.ma.masked_array(X)}, TypeError, "query is a masked array"),
        ({"causal": True}, TypeError, "is_causal"),
    ],
    ids=str,
)  # fmt: skip
def test_an_error_names_the_argument_at_once(options: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        attention(**{"query": D, "key": D, "value": D, **options})


def test_an_ambiguous_alignment_brings_the_warning_of_cattn() -> None:
    with pytest.warns(cattn.CausalAlignmentWarning):
        attention(D[:, :2], D, D, is_causal=True)


def test_numbers_in_dask_arrays_are_checked_by_the_task() -> None:
    result = attention(D, D, D, sinks=da.full(1, np.nan))
    with pytest.raises(ValueError, match="sinks must be finite"):
        compute(result)
    result = attention(D, (D.astype("i1"), da.zeros(4)), D)
    with pytest.raises(ValueError, match="scale must be positive"):
        compute(result)


def test_the_import_names_the_extra_if_dask_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "dask.array", None)  # an import of it raises
    monkeypatch.delitem(sys.modules, "cattn.integrations.dask")
    with pytest.raises(ImportError, match=r"pip install 'cattn\[dask\]'"):
        importlib.import_module("cattn.integrations.dask")


def test_its_examples_run() -> None:
    assert doctest.testmod(bridge) == (0, 16)
