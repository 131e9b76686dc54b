"""A row of attention has the same bits on every path and kernel table, with any threads, batch, length and strides.

The calls and the yardstick come from bit_cases.py.
"""

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import cattn
from support import (
    INF,
    NAN,
    assert_same_bits,
    every_way,
    everything,
    examples,
    forced,
    in_contract,
    looped,
    part,
    table,
)
from support.bit_cases import BLOCK, CASES, CHUNK, Call, Normal, build, mask_of, plain, yardstick, yardstick_of


@pytest.fixture(params=[True, False], ids=["causal", "full"])
def causal(request: pytest.FixtureRequest) -> bool:
    return request.param


@pytest.mark.promise("paths and tables")
@looped("name", CASES)
def test_every_path_and_table_gives_the_same_bits(name: str, isa: str, dtype: type) -> None:
    call = build(name, dtype)
    right = yardstick_of(name, dtype, "scalar" if in_contract(isa) else isa)
    for way, result in every_way(lambda: everything(**call), tiny=call["key"].shape[-2] <= BLOCK):
        assert_same_bits(result, right, way)


def test_the_special_numbers_of_the_cases_reach_the_results(dtype: type) -> None:
    """The share of NaN, zero or -inf in the results of some cases."""
    nan, zero = np.isnan, lambda a: a == 0
    for name, field, share, wanted in [
        ("scores -inf", "out", 15 / 202, nan),
        ("scores -inf", "lse", 15 / 202, np.isneginf),
        ("all hidden by -inf", "out", 1, zero),
        ("all hidden by -inf", "lse", 1, np.isneginf),
        ("some rows hidden by -inf", "weights", 34 / 101, zero),
        ("NaN in a masked bias", "out", 0, nan),
        ("NaN in a visible bias", "out", 26 / 101, nan),
        ("NaN in a key", "out", 41 / 101, nan),
        ("NaN in a query", "out", 1 / 101, nan),
        ("NaN in a value", "out", 41 / 101 / 19, nan),
        ("all values -0", "out", 1, zero),
        ("results that underflow", "out", 1, zero),
        ("dropout of all", "out", 1, zero),
    ]:
        result = getattr(yardstick_of(name, dtype, "scalar"), field)
        assert abs(wanted(result).mean() - share) < 0.006, name
    values = np.abs(yardstick_of("subnormal values", dtype, "scalar").out)
    assert 0 < values.max() < np.finfo(dtype).tiny
    assert np.isnan(yardstick_of("scores that overflow", dtype, "scalar").out).any()
    for name in ("all finfo.min", "first block finfo.min", "huge values"):
        assert np.isfinite(yardstick_of(name, dtype, "scalar").out).all(), name
    least = yardstick_of("all finfo.min", dtype, "scalar")
    assert (least.weights == least.weights[0, 0, 0]).all(), "finfo.min absorbs every score, so all weights are equal"
    equal = yardstick_of("equal scores", dtype, "scalar")
    assert (equal.out == equal.out[:, :1]).all()


def test_results_never_hold_negative_zero(isa: str, dtype: type, path: str) -> None:
    for name in ("all values -0", "values -0", "results that underflow", "dropout of all", "tiny"):
        result = (
            everything(**build(name, dtype)) if path != "tiny" else everything(**first_keys(build(name, dtype), 50))
        )
        for field in (result.out, result.weights):
            assert not np.signbit(field[field == 0]).any(), name


def first_keys(call: Call, T_k: int) -> Call:
    """Return the call with its first T_k keys."""
    shorter = {name: call[name][..., :T_k, :] for name in ("key", "value")}
    shorter |= {name: call[name][..., :T_k] for name in ("attn_mask", "bias") if name in call}
    return call | shorter


# ---- many keys -----------------------------------------------------------------------------------------------------
def long_call(T_q: int, dtype: type, **options: Any) -> Call:
    rng = np.random.default_rng(T_q)
    T_k = 3 * CHUNK + 250
    return {
        "query": rng.standard_normal((2, T_q, 6)).astype(dtype),
        "key": rng.standard_normal((2, T_k, 6)).astype(dtype),
        "value": rng.standard_normal((2, T_k, 9)).astype(dtype),
    } | options


LONG: dict[str, tuple[int, dict[str, Any]]] = {
    "one query": (1, {}),
    "few queries": (5, {"is_causal": "lower_right"}),
    "ends in every chunk": (4, {"attn_mask": np.arange(3 * CHUNK + 250) < np.arange(1, 5)[:, None] * CHUNK - 77}),
    "starts in every chunk": (4, {"attn_mask": np.arange(3 * CHUNK + 250) > np.arange(4)[:, None] * CHUNK + 77}),
    "only the first chunk": (3, {"attn_mask": np.arange(3 * CHUNK + 250) < CHUNK}),
    "only the last chunk": (3, {"attn_mask": np.arange(3 * CHUNK + 250) >= 3 * CHUNK}),
    "first chunk -inf": (3, {"bias": np.where(np.arange(3 * CHUNK + 250) < CHUNK, -INF, 0.0)}),
    "window within a chunk": (5, {"is_causal": "lower_right", "window_size": (100, 0)}),
    "windows from chunk to chunk": (7, {"query_offset": 2 * CHUNK - 4, "window_size": (CHUNK + 3, 900)}),
    "lengths": (4, {"is_causal": "lower_right", "key_value_seq_lengths": [2 * CHUNK + 1, 77]}),
    "starts": (4, {"is_causal": "lower_right", "key_value_seq_starts": [2 * CHUNK + 1, 77]}),
    "softcap, slopes, sinks": (5, {"softcap": 3.0, "alibi_slopes": [1e-3], "sinks": [2.0], "query_offset": 2000}),
    "dropout": (9, {"dropout_p": 0.3, "rng": 3, "is_causal": "upper_left"}),
    "a tile of queries": (98, {"is_causal": "lower_right", "bias": np.sin(np.arange(3 * CHUNK + 250.0))}),
    "all causal": (3 * CHUNK + 250, {"is_causal": True}),
}


@functools.cache
def long_yardstick(name: str, dtype: type, isa: str) -> cattn.AttentionOutput:
    T_q, options = LONG[name]
    call = long_call(T_q, dtype, **options)
    with table("scalar" if in_contract(isa) else isa), forced("rows"), cattn.num_threads(1):
        if name == "all causal":  # only the last rows, without the matrix of weights
            call["query"] = call["query"][:, -300:]
            call["is_causal"] = "lower_right"
            return cattn.AttentionOutput(cattn.scaled_dot_product_attention(**call))
        return everything(**call)


@pytest.mark.parametrize("name", [name for name in LONG if name != "all causal"])
def test_every_path_and_table_gives_the_same_bits_past_three_key_chunks(name: str, isa: str, dtype: type) -> None:
    T_q, options = LONG[name]
    call = long_call(T_q, dtype, **options)
    right = long_yardstick(name, dtype, "scalar" if in_contract(isa) else isa)
    for way, result in every_way(lambda: everything(**call), tiny=False, threads=(1, 2, 3, 4)):
        assert_same_bits(result, right, way)


@pytest.mark.parametrize("which", ["avx2_4x2", "avx2", "avx512_256", "avx512", "gnu512"])
def test_a_long_causal_prefill_has_the_same_bits(which: str, dtype: type) -> None:
    """The last rows of a full pass over more than three key chunks, by the tile path on two threads."""
    usable = {entry["name"]: entry["usable"] for entry in cattn.show_config("dicts")["tables"]}
    if not usable.get(which, False):
        pytest.skip(f"this machine lacks {which}")
    T, options = LONG["all causal"]
    call = long_call(T, dtype, **options)
    with table(which), forced("tile"), cattn.num_threads(2):
        out = cattn.scaled_dot_product_attention(**call)
    assert_same_bits(out[:, -300:].copy(), long_yardstick("all causal", dtype, which).out)


# ---- the surroundings of a row -------------------------------------------------------------------------------------
def heads_call(normal: Normal, dtype: type, **options: Any) -> Call:
    shapes = {"query": (3, 4, 130, 11), "key": (3, 2, 250, 11), "value": (3, 2, 250, 7)}
    return {name: normal(*shape, dtype=dtype) for name, shape in shapes.items()} | options


@pytest.mark.promise("threads and batch")
def test_any_number_of_threads_gives_the_same_bits(
    isa: str, dtype: type, path: str, threads: int, normal: Normal
) -> None:
    call = heads_call(normal, dtype, is_causal="lower_right", dropout_p=0.2, rng=1)
    if path == "tiny":
        call = first_keys(call, BLOCK)
    result = everything(**call)
    with cattn.num_threads(1):
        assert_same_bits(result, everything(**call))


@pytest.mark.promise("threads and batch")
def test_slices_of_batch_and_heads_have_the_bits_of_the_whole(
    isa: str, dtype: type, causal: bool, normal: Normal
) -> None:
    call = heads_call(normal, dtype, is_causal="lower_right" if causal else False)
    call["bias"] = normal(3, 4, 130, 250, dtype=dtype)
    whole = everything(**call)
    for b in (slice(0, 1), slice(1, 3), slice(2, None, -2)):
        of_batch = {name: a[b] for name, a in call.items() if name != "is_causal"}
        for way, result in every_way(lambda of=of_batch: everything(**call | of), tiny=False):
            assert_same_bits(result, part(whole, b), f"batch {b}, {way}")
    for h in (slice(0, 2), slice(2, 4), slice(3, 4), slice(1, 2)):
        group = slice(h.start // 2, h.start // 2 + 1)
        of_head = {"query": call["query"][:, h], "bias": call["bias"][:, h]}
        of_head |= {name: call[name][:, group] for name in ("key", "value")}
        for way, result in every_way(lambda of=of_head: everything(**call | of), tiny=False):
            assert_same_bits(result, part(whole, np.s_[:, h]), f"heads {h}, {way}")
    # one sequence alone, two-dimensional
    alone = {name: call[name][1, 3] for name in ("query", "bias")}
    alone |= {name: call[name][1, 1] for name in ("key", "value")}
    assert_same_bits(everything(**call | alone), part(whole, (1, 3)))


def test_columns_of_value_have_the_bits_they_have_together(isa: str, dtype: type, path: str, normal: Normal) -> None:
    """A column of the output does not depend on the other columns."""
    call = plain(lambda *shape: normal(*shape, dtype=dtype), 20, 150)
    call["value"] = normal(2, 150, 70, dtype=dtype)
    whole = cattn.scaled_dot_product_attention(**call)
    for columns in (slice(0, 1), slice(69, 70), slice(3, 20), slice(17, 69)):
        one = cattn.scaled_dot_product_attention(**call | {"value": call["value"][..., columns]})
        assert_same_bits(one, whole[..., columns].copy(), str(columns))


@pytest.mark.promise("prefixes")
def test_keys_after_the_last_visible_one_change_no_bit(isa: str, dtype: type, normal: Normal) -> None:
    """A call without these keys gives the same bits."""
    call = plain(lambda *shape: normal(*shape, dtype=dtype), 60, 600, dropout_p=0.1, rng=4)
    for last in (0, 7, 59, 63, 64, 94, 95, 96, 127, 190, 191, 192, 383, 384, 500, 598):
        # with a causal offset, and with a mask; the last row sees keys 0 .. last
        causal_call = call | {"is_causal": True, "query_offset": last - 59}
        mask = np.broadcast_to(np.arange(600) <= last, (60, 600))
        masked = call | {"attn_mask": mask, "query_offset": last - 59}
        for longer, shorter in (
            (causal_call, first_keys(causal_call, last + 1)),
            (masked, first_keys(masked, last + 1)),
            (masked, {name: a for name, a in first_keys(masked, last + 1).items() if name != "attn_mask"}),
        ):
            right = everything(**longer)
            assert not right.weights[..., last + 1 :].any()
            right = right._replace(
                weights=right.weights[..., : last + 1].copy(), dropout_mask=right.dropout_mask[..., : last + 1].copy()
            )
            for way, result in every_way(lambda of=shorter: everything(**of), tiny=last < BLOCK, threads=(2,)):
                assert_same_bits(result, right, f"{last + 1} keys, {way}")


@pytest.mark.promise("threads and batch")
@pytest.mark.parametrize("options", [{}, {"dropout_p": 0.4, "rng": 8}, {"bias": True}], ids=["", "dropout", "bias"])
def test_a_subset_of_queries_has_the_bits_of_the_full_pass(
    isa: str, dtype: type, options: Call, normal: Normal
) -> None:
    """As in decoding steps: with all keys, and with only the keys up to the last query."""
    T = 2 * BLOCK + 16
    call = {name: normal(2, 3, T, 8, dtype=dtype) for name in ("query", "key", "value")} | {"is_causal": True} | options
    if "bias" in options:
        call["bias"] = normal(3, T, T, dtype=dtype)
    with forced("tile"):
        prefill = everything(**call)
    for first, n in ((0, 1), (1, 1), (95, 1), (191, 1), (192, 1), (T - 1, 1), (40, 5), (90, 100), (T - 30, 30)):
        rows = slice(first, first + n)
        step = call | {"query": call["query"][..., rows, :], "query_offset": first}
        if "bias" in options:
            step["bias"] = call["bias"][:, rows]
        for way, result in every_way(lambda of=step: everything(**of), tiny=False):
            assert_same_bits(result, part(prefill, np.s_[:, :, rows]), f"rows {rows}, {way}")
        # the same with only the keys that existed at that step
        cached = first_keys(step, first + n)
        if "bias" in options:
            cached["bias"] = step["bias"][..., : first + n]
        assert_same_bits(
            cattn.causal_attention(**{k: a for k, a in cached.items() if k != "is_causal"}),
            prefill.out[:, :, rows].copy(),
        )


def test_batch_entries_with_their_own_offsets_have_the_bits_of_each_alone(
    isa: str, dtype: type, path: str, normal: Normal
) -> None:
    """query_offset has one number for each batch entry."""
    call = {"query": normal(3, 2, 7, 8, dtype=dtype), "key": normal(3, 2, 150, 8, dtype=dtype)}
    call |= {"value": normal(3, 2, 150, 8, dtype=dtype), "is_causal": True, "query_offset": np.array([3, 143, -4])}
    whole = everything(**call)
    for b in range(3):
        alone = {name: call[name][b : b + 1] for name in ("query", "key", "value")}
        alone["query_offset"] = int(call["query_offset"][b])
        assert_same_bits(everything(**call | alone), part(whole, slice(b, b + 1)))


def layouts(a: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """Yield names and views: the same numbers in other memory layouts."""
    wide = np.full((*a.shape[:-2], 2 * a.shape[-2] + 1, 3 * a.shape[-1] + 1), 99).astype(a.dtype)
    for name, view in {
        "apart": wide[..., 1::2, 1::3],
        "rows backwards": wide[..., 2::2, 1 : 1 + a.shape[-1]][..., ::-1, :],
        "backwards": wide[..., : a.shape[-2], : a.shape[-1]][..., ::-1, ::-1],
        "off by one element": wide[..., 1 : 1 + a.shape[-2], 1 : 1 + a.shape[-1]],
        "Fortran": np.empty_like(a, order="F"),
    }.items():
        view[...] = a
        yield name, view


@pytest.mark.promise("strides")
@pytest.mark.parametrize("T_q", [2, 100])
def test_any_strides_give_the_same_bits(isa: str, dtype: type, T_q: int, normal: Normal) -> None:
    call = plain(lambda *shape: normal(*shape, dtype=dtype), T_q, 192, is_causal="lower_right")
    call["bias"] = normal(2, T_q, 192, dtype=dtype)
    for mask in ({}, {"attn_mask": mask_of(5, 2, T_q, 192)}, {"attn_mask": normal(T_q, 192, dtype=dtype)}):
        call |= mask
        right = yardstick(call, isa)
        for names in (["query"], ["key"], ["value"], ["attn_mask"], ["bias"], ["query", "key", "value", "bias"]):
            if not set(names) <= set(call):
                continue
            for views in zip(*(layouts(call[name]) for name in names), strict=True):
                strided = call | {name: view for name, (_, view) in zip(names, views, strict=True)}
                for way, result in every_way(lambda of=strided: everything(**of), tiny=False, threads=(1,)):
                    assert_same_bits(result, right, f"{names} {views[0][0]}, {way}")


def test_earlier_calls_change_no_bit(isa: str, dtype: type, path: str) -> None:
    """Scratch is reused by the next call, which must not read the old contents."""
    names = ["NaN in a value", "dropout", "scores that overflow", "plain", "all hidden by -inf", "equal scores"]
    calls = [build(name, dtype) for name in names]
    if path == "tiny":
        calls = [first_keys(call, 150) for call in calls]
    right = [everything(**call) for call in calls]
    for i in (4, 2, 0, 3, 1, 5, 3, 3):
        assert_same_bits(everything(**calls[i]), right[i], names[i])


# ---- random calls --------------------------------------------------------------------------------------------------
NUMBERS = [0.0, -0.0, 1.0, -1.0, 1e-40, -1e-45, 1e-30, 1e30, -1e38, 3e38, 90.0, -90.0]


@pytest.mark.promise("paths and tables")
@given(st.data())
@examples(40)
def test_random_calls_give_the_same_bits_on_every_path_and_table(isa: str, data: st.DataObject) -> None:
    """Random shapes and options; some numbers are replaced by very large and small ones, NaN or infinity."""
    draw = data.draw
    dtype = draw(st.sampled_from([np.float32, np.float64]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    T_q = draw(st.sampled_from([1, 2, 5, 8, 9, 16, 17, 95, 97, 130]))
    T_k = draw(st.sampled_from([1, 3, 8, 15, 64, 97, 191, 192, 193, 400, 1540]))
    D, D_v = draw(st.sampled_from([1, 2, 7, 8, 16, 17, 40])), draw(st.sampled_from([1, 4, 8, 15, 16, 33, 65]))

    def array(*shape: int) -> np.ndarray:
        a = rng.standard_normal(shape).astype(dtype)
        if draw(st.booleans()):
            replaced = rng.random(shape) < draw(st.sampled_from([0.001, 0.1]))
            a[replaced] = rng.choice(np.array(NUMBERS + [NAN, INF, -INF] * draw(st.booleans()), dtype), replaced.sum())
        return a

    call: Call = {"query": array(2, T_q, D), "key": array(2, T_k, D), "value": array(2, T_k, D_v)}
    if draw(st.booleans()):
        call["attn_mask"] = rng.random((T_q, T_k)) < draw(st.sampled_from([0.1, 0.9]))
    if draw(st.booleans()):
        call["bias"] = array(2, T_q, T_k) if draw(st.booleans()) else array(T_k)
    call["is_causal"] = draw(st.sampled_from([False, "upper_left", "lower_right"]))
    if draw(st.booleans()):
        call |= {"dropout_p": draw(st.floats(0, 1)), "rng": draw(st.integers(0, 2**64 - 1))}
    right = yardstick(call, isa)
    for way, result in every_way(lambda: everything(**call), tiny=False):
        assert_same_bits(result, right, way)


@pytest.mark.promise("paths and tables")
@pytest.mark.parametrize("storage", [np.float32, np.float16])
def test_blocks_of_rows_that_share_copies_of_a_key_block_have_the_bits_of_each_alone(
    storage: type, causal: bool, isa: str
) -> None:
    rng = np.random.default_rng(3)
    query, key, value = (rng.standard_normal((500, n)).astype(storage) for n in (20, 20, 150))
    value[130] = INF
    with cattn.num_threads(1):  # more threads get a block each
        assert cattn.explain(query, key, value, is_causal=causal).tasks == 1
        whole = cattn.scaled_dot_product_attention(query, key, value, is_causal=causal)
    for first in range(0, 500, BLOCK):
        rows = slice(first, first + BLOCK)
        alone = cattn.scaled_dot_product_attention(query[rows], key, value, is_causal=causal, query_offset=first)
        assert_same_bits(whole[rows], alone, f"rows from {first} on")
