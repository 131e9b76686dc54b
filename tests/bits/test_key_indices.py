"""key_indices: each query has the bits of its own call on the keys of its list."""

import operator
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import cattn
from cattn import reference
from cattn.reference._attention import repeat_blocks
from cattn.reference._masks import Ranges, visible_keys
from support import HALVES, INF, NAN, assert_same_bits, examples, part
from support.calls import gathered_calls
from support.laws import assert_same_fields, ways, widened

Call = dict[str, Any]
RANGES = (
    "is_causal", "query_offset", "window_size", "query_seq_lengths", "key_value_seq_lengths", "key_value_seq_starts",
)  # fmt: skip
EXTRAS = {"return_weights": True, "return_lse": True}


def attend(**call: Any) -> cattn.AttentionOutput:
    result = cattn.scaled_dot_product_attention(**call, **EXTRAS)
    assert_same_bits(cattn.scaled_dot_product_attention(**call), result.out, "output without extras")
    return result


# ---- one query after the other ---------------------------------------------------------------------------------------
def with_heads(call: Call) -> Call:
    """Return the call with all arrays in full, (*batch, H, rows, columns), and heads that are not grouped."""
    rank = max(call[name].ndim for name in ("query", "key", "value"))
    one_head = rank < 3 or (rank == 3 and not call.get("enable_gqa"))
    full, (T_q, T_k) = dict(call), (call["query"].shape[-2], call["key"].shape[-2])
    for name in ("key", "value"):
        if isinstance(call[name], cattn.Quantized):
            full[name] = call[name].values
            full[f"{name}_scale"] = np.broadcast_to(call[name].scale, call[name].shape)
    if "block_mask" in call:
        blocks, size = full.pop("block_mask")
        full["blocks"] = repeat_blocks(blocks, size, T_q, T_k)
    names = [n for n in ("query", "key", "value", "key_scale", "value_scale", "attn_mask", "bias", "blocks",
                         "key_indices", "gate") if n in full]  # fmt: skip
    for name in names:
        a = np.asarray(full[name])
        full[name] = np.expand_dims(a, -3) if one_head and a.ndim > 2 else a[(None,) * max(0, 3 - a.ndim)]
    arrays = [full[n] for n in ("query", "key", "value")]
    batch = np.broadcast_shapes(*(a.shape[:-3] for a in arrays))
    heads, kv_heads = arrays[0].shape[-3], max(a.shape[-3] for a in arrays[1:])
    heads = kv_heads if heads == 1 else heads
    for name in names:
        a = full[name]
        if name.partition("_")[0] in ("key", "value") and name != "key_indices" and a.shape[-3] not in (1, heads):
            a = np.repeat(a, heads // kv_heads, axis=-3)
        rows = (T_q,) if name in ("query", "attn_mask", "bias", "blocks", "key_indices", "gate") else (T_k,)
        columns = dict.fromkeys(("attn_mask", "bias", "blocks"), T_k) | {"gate": arrays[2].shape[-1]}
        full[name] = np.broadcast_to(a, (*batch, heads, *rows, columns.get(name, a.shape[-1])))
    if "sinks" in call:
        full["sinks"] = np.broadcast_to(call["sinks"], (*batch, heads))
    ranges = {"is_causal": False} | {name: full.pop(name) for name in RANGES if name in full}
    in_range = visible_keys(T_q, T_k, Ranges(**ranges))[0]
    full["in_range"] = np.broadcast_to(in_range, (*batch, T_q, T_k))
    return full | {"one_head": one_head}


def gathered_row(full: Call, at: tuple[int, ...]) -> tuple[Call, np.ndarray]:
    """Return the call of one query, (*batch, head, row), on its keys, and the places that these have in its list."""
    entry, row = at[:-1], at[-1]
    indices = full["key_indices"][at]
    in_range = np.append(full["in_range"][(*at[:-2], row)], False)  # -1 is the last element
    places = np.flatnonzero(in_range[indices])
    keys = indices[places]
    call: Call = {name: full[name] for name in ("scale", "softcap") if name in full}
    for name in ("query", "gate"):
        if name in full:
            call[name] = full[name][(*entry, slice(row, row + 1))]
    for name in ("key", "value", "key_scale", "value_scale"):
        if name in full:
            call[name] = full[name][entry][keys]
    for name in ("attn_mask", "bias", "blocks"):
        if name in full:
            call[name] = full[name][at][None, keys]
    for name in ("key", "value"):
        if f"{name}_scale" in call:
            call[name] = cattn.Quantized(call[name], call.pop(f"{name}_scale"))
    if "blocks" in call:
        call["block_mask"] = cattn.BlockMask(call.pop("blocks"), 1)
    if "sinks" in full:
        call["sinks"] = full["sinks"][entry][None]
    return call, places


def rows_of(call: Call, seed: int = 0, most: int = 60) -> Iterator[tuple[tuple[int, ...], Any, np.ndarray]]:
    """Yield some queries, each with its place in the result of the call, its own result, and the places of its keys."""
    full = with_heads(call)
    shape = full["key_indices"].shape[:-1]
    rows = list(np.ndindex(shape))
    for i in np.random.default_rng(seed).permutation(len(rows))[:most]:
        own, places = gathered_row(full, rows[i])
        at = (*rows[i][:-2], rows[i][-1]) if full["one_head"] else rows[i]
        yield at, attend(**own), places


def assert_law(found: cattn.AttentionOutput, call: Call, what: str) -> None:
    """Each row of the result has the bits of its own call."""
    for at, own, places in rows_of(call):
        row = part(found, at)
        assert_same_bits(row.out, own.out[0], f"out, {at}, {what}")
        assert_same_bits(np.asarray(row.lse), own.lse[0], f"lse, {at}, {what}")
        weights = np.zeros(row.weights.shape, row.weights.dtype)
        weights[places] = own.weights[0]
        assert_same_bits(row.weights, weights, f"weights, {at}, {what}")


def poisoned(call: Call) -> Call:
    """Return the call with NaN in the keys and values that no index names."""
    unnamed = np.setdiff1d(np.arange(call["key"].shape[-2]), call["key_indices"])
    found = dict(call)
    for name in ("key", "value"):
        if not isinstance(call[name], cattn.Quantized):
            found[name] = call[name].copy()
            found[name][..., unnamed, :] = NAN
    return found


@pytest.mark.promise("gathered keys")
@examples(40)
@given(gathered_calls(), st.integers(0, 2**32))
def test_each_query_has_the_bits_of_its_own_call(drawn: tuple[Call, type], seed: int) -> None:
    call, dtype = drawn
    found = attend(**call)
    assert_law(found, call, "")
    for way in ways(np.random.default_rng(seed)):
        assert_same_fields(attend(**call), found, way)
    assert_same_fields(attend(**poisoned(call)), found, "poison")
    if call["query"].dtype not in HALVES:
        wide = widened(call)
        right = reference.scaled_dot_product_attention(**wide, **EXTRAS)
        assert isinstance(right, cattn.AttentionOutput)
        limit = 3e-3 if dtype == np.float32 else 1e-9
        for name in ("out", "weights", "lse"):
            np.testing.assert_allclose(getattr(found, name), getattr(right, name), rtol=limit, atol=limit, err_msg=name)


# ---- larger calls, and what belongs to one of them -------------------------------------------------------------------
def make(T_q: int, T_k: int, heads: int, kv_heads: int, lists: tuple[int, ...], dtype: Any, **options: Any) -> Call:
    rng = np.random.default_rng([T_q, T_k, *lists])
    shapes = {"query": (2, heads, T_q, 24), "key": (2, kv_heads, T_k, 24), "value": (2, kv_heads, T_k, 40)}
    call: Call = {name: rng.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}
    indices = rng.integers(0, T_k, lists)
    return call | {"key_indices": np.where(rng.random(lists) < 0.1, -1, indices)} | options


def with_values_in_keys(call: Call, first: int, end: int) -> Call:
    """Return the call with columns of its keys for values, in the same memory."""
    return call | {"value": call["key"][..., first:end]}


LARGE: dict[str, Call] = {
    "one list for many queries": make(500, 900, 4, 2, (2, 1, 1, 300), np.float32, softcap=3.0),
    "one list, masks": make(
        250, 600, 4, 2, (400,), np.float16, is_causal=False, query_seq_lengths=[250, 110], sinks=[0.5, -INF, 2, 1],
        key_value_seq_lengths=[600, 211], bias=np.random.default_rng(1).standard_normal((4, 250, 600)),
        attn_mask=np.random.default_rng(2).random((2, 1, 1, 600)) < 0.8,
    ),
    "one list, causal": make(130, 600, 4, 4, (4, 1, 200), np.float64, is_causal="lower_right", window_size=(300, 0)),
    "several chunks, few units": make(1, 5000, 8, 1, (1, 1, 1, 4000), np.float32),
    "a list for each head": make(9, 5000, 4, 2, (4, 9, 1700), ml_dtypes.bfloat16, is_causal="lower_right"),
    "a list for each query": make(300, 5000, 8, 2, (2, 1, 300, 64), np.float32, key_value_seq_starts=[0, 4000]),
    "blocks": make(
        200, 300, 4, 2, (200, 77), np.float32,
        block_mask=cattn.BlockMask(np.random.default_rng(3).random((2, 4, 4, 6)) < 0.5, 50),
        attn_mask=np.random.default_rng(4).random(300) < 0.9,
    ),
    "values are the first columns of the keys": with_values_in_keys(
        make(40, 3000, 8, 1, (2, 1, 40, 600), np.float32, is_causal="lower_right"), 0, 16
    ),
    "values are other columns of the keys": with_values_in_keys(
        make(90, 700, 4, 2, (4, 90, 80), np.float16, key_value_seq_starts=[0, 300]), 5, 24
    ),
}  # fmt: skip


@pytest.mark.promise("gathered keys")
@pytest.mark.parametrize("name", LARGE)
def test_larger_calls(name: str, isa: str) -> None:
    call = LARGE[name]
    found = attend(**call)
    assert_law(found, call, isa)
    for threads in (1, 4):
        with cattn.num_threads(threads):
            assert_same_fields(attend(**poisoned(call)), found, f"{threads} threads")
    listed = np.broadcast_to(call["key_indices"], found.weights.shape)
    assert not found.weights[listed < 0].any()
    given = cattn.AttentionOutput(*(np.empty(a.shape[::-1], a.dtype).T for a in found[:3]))
    assert_same_fields(cattn.scaled_dot_product_attention(**call, **EXTRAS, out=given), found, "out")


X, FIRST = np.ones((2, 4, 7, 8), np.float32), np.zeros((7, 3), int)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"key_indices": FIRST + 7}, ValueError,
         r"key_indices has the index 7, but key has 7 keys: pass 0 to T_k - 1, or -1"),
        ({"key_indices": [[0, -2]]}, ValueError, "key_indices has the index -2, but key has 7 keys"),
        ({"key_indices": np.array([[2**64 - 1]], np.uint64)}, ValueError, "the index 9223372036854775807"),
        ({"key_indices": np.full((7, 3), -128, np.int8)}, ValueError, "key_indices has the index -128"),
        ({"key_indices": FIRST * 1.0}, TypeError, "key_indices must be integers, -1 for no key, got dtype float64"),
        ({"key_indices": FIRST == 0}, TypeError, "key_indices must be integers, -1 for no key, got dtype bool"),
        ({"key_indices": 3}, ValueError, r"key_indices must have an axis for the keys of a query, \(..., T_q, n\)"),
        ({"key_indices": "0"}, TypeError, "key_indices must be integers"),
        ({"key_indices": np.ma.masked_array(FIRST)}, TypeError, "key_indices is a masked array"),
        ({"key_indices": FIRST[:5]}, ValueError,
         r"key_indices has shape \(5, 3\), which does not broadcast to the queries' shape, with n keys for each, "
         r"\(2, 4, 7, 3\)"),
        ({"key_indices": FIRST[None, None, None]}, ValueError,
         r"key_indices has shape \(1, 1, 1, 7, 3\), which does not broadcast"),
        ({"key_indices": FIRST, "alibi_slopes": np.ones(4)}, ValueError,
         r"alibi_slopes and key_indices do not go together: pass -slope \* abs\(p - j\) as bias"),
    ],
)  # fmt: skip
def test_errors(options: Call, error: type[Exception], message: str) -> None:
    for call in (
        lambda: cattn.scaled_dot_product_attention(X, X, X, **options),
        lambda: cattn.causal_attention(X, X, X, **options),
        lambda: cattn.attention_weights(X, X, **options),
        lambda: cattn.attention_backward(X, X, X, X, X, X[..., 0], **options),
    ):
        with pytest.raises(error, match=message):
            call()


@pytest.mark.parametrize("dtype", [np.int8, np.float16, np.float32, np.float64])
def test_columns_of_gathered_keys_may_lie_apart(dtype: type, rng: np.random.Generator) -> None:
    query = rng.standard_normal((2, 20, 12)).astype(np.float32 if dtype is np.int8 else dtype)
    lists = rng.integers(-1, 30, (2, 20, 9))
    arrays = [(10 * rng.standard_normal((2, 30, 12))).astype(dtype) for _ in range(2)]
    results = []
    for pair in (arrays, [np.repeat(a, 3, axis=-1)[..., ::3] for a in arrays]):
        key, value = (cattn.Quantized(a, 0.1) if dtype is np.int8 else a for a in pair)
        results.append(attend(query=query, key=key, value=value, key_indices=lists))
    assert_same_bits(results[1], results[0])


def test_lists_that_are_too_large() -> None:
    """Arrays that repeat one element may have any size."""
    giant = np.broadcast_to(np.int8(0), (1, 2**40))
    wide = np.broadcast_to(np.float32(1), (3, 2**20))
    with pytest.raises(ValueError, match="key_indices names 1099511627776 keys for each query, which is too large"):
        cattn.scaled_dot_product_attention(wide, wide, wide, key_indices=giant)
    with pytest.raises(MemoryError):
        cattn.scaled_dot_product_attention(wide[:, :2], wide[:, :2], wide[:, :2], key_indices=giant)


def test_there_is_no_dropout_of_gathered_keys() -> None:
    for function, options, says in (
        (cattn.scaled_dot_product_attention, {"dropout_p": 0.1}, "dropout_p and key_indices do not go together"),
        (cattn.scaled_dot_product_attention, {"return_dropout_mask": True}, "return_dropout_mask and key_indices"),
        (cattn.attention_weights, {"stage": "dropout"}, "stage='dropout' and key_indices"),
        (reference.scaled_dot_product_attention, {"dropout_p": 0.1}, "dropout and key_indices"),
    ):
        arrays = (X, X) if function is cattn.attention_weights else (X, X, X)
        with pytest.raises(ValueError, match=says):
            function(*arrays, key_indices=FIRST, **options)


@pytest.mark.parametrize(
    "name",
    [
        "attention_statistics",
        "reference.attention_statistics",
        "explain",
        "varlen_attention",
        "varlen_attention_backward",
    ],
)
def test_other_functions_do_not_take_it(name: str) -> None:
    with pytest.raises(TypeError, match="key_indices"):
        operator.attrgetter(name)(cattn)(X, X, X, key_indices=FIRST)


# ---- gradients -------------------------------------------------------------------------------------------------------


@pytest.mark.promise("gradients' bits")
@pytest.mark.parametrize("own_heads", [False, True])
@pytest.mark.parametrize("own_rows", [False, True])
def test_gradients_are_sums_of_those_of_the_gathered_keys(own_heads: bool, own_rows: bool, isa: str) -> None:
    """Queries ascending, then place in the list. Queries that share a list are one call, and so are heads."""
    T_q, group = 110, 3
    call = make(T_q, 70, 6, 2, (2, 6 if own_heads else 1, T_q if own_rows else 1, 60), np.float32,
                softcap=4.0, attn_mask=np.random.default_rng(0).random((T_q, 70)) < 0.9)  # fmt: skip
    if own_rows:
        call = with_values_in_keys(call, 3, 20)
    result = cattn.scaled_dot_product_attention(**call, return_lse=np.float64)
    grad_out = np.random.default_rng(1).standard_normal(result.out.shape).astype(np.float32)
    given: Call = {"grad_out": grad_out, "out": result.out, "lse": result.lse}
    rows = [slice(i, i + 1) for i in range(T_q)] if own_rows else [slice(0, T_q)]
    right = {name: np.zeros_like(call[name]) for name in ("query", "key", "value")}
    for b, h, i in np.ndindex(2, 6 if own_heads else 2, len(rows)):
        heads, kv_head = (slice(h, h + 1), h // group) if own_heads else (slice(h * group, (h + 1) * group), h)
        indices = call["key_indices"][b, h if own_heads else 0, i]
        keys = indices[indices >= 0]
        arrays = {name: a[b, heads, rows[i]] for name, a in (given | {"query": call["query"]}).items()}
        if own_rows:  # the heads are the queries
            arrays = {name: a.swapaxes(0, 1) for name, a in arrays.items()}
        own = cattn.attention_backward(
            **arrays,
            key=call["key"][b, [kv_head]][:, keys],
            value=call["value"][b, [kv_head]][:, keys],
            softcap=4.0,
            attn_mask=call["attn_mask"][rows[i], keys],
            enable_gqa=True,
        )
        right["query"][b, heads, rows[i]] = own.query.swapaxes(0, 1) if own_rows else own.query
        np.add.at(right["key"][b, kv_head], keys, own.key[0])
        np.add.at(right["value"][b, kv_head], keys, own.value[0])
    copies = call | {"key_indices": np.asfortranarray(call["key_indices"]).astype(np.int32)}
    for threads in (1, 4):
        for same in (call, poisoned(copies)):
            with cattn.num_threads(threads):
                found = cattn.attention_backward(**given, **same)
            for name, a in right.items():
                assert_same_bits(getattr(found, name), a, f"{name}, {threads} threads")


def test_a_forgotten_option_is_an_error() -> None:
    call = make(40, 60, 4, 2, (2, 1, 40, 20), np.float32)
    result = cattn.scaled_dot_product_attention(**call, return_lse=True)
    lse = result.lse.copy()
    lse[1, 3, 17] += 1
    with pytest.raises(ValueError, match=r"lse is not that of these arguments: at \(1, 3, 17\)"):
        cattn.attention_backward(result.out, out=result.out, lse=lse, **call)
    del call["key_indices"]
    with pytest.raises(ValueError, match="lse is not that of these arguments"):
        cattn.attention_backward(result.out, out=result.out, lse=result.lse, **call)


def test_no_query_has_a_list() -> None:
    query, key = np.zeros((0, 4)), np.ones((5, 4))
    lists: Call = {"key_indices": np.zeros((0, 3), np.int64)}
    for module in (cattn, reference):
        out, lse = np.zeros((0, 4)), np.zeros(0)
        assert module.scaled_dot_product_attention(query, key, key, **lists).shape == (0, 4)
        gradients = module.attention_backward(out, query, key, key, out, lse, **lists)
        assert_same_bits(np.asarray(gradients.key), np.zeros((5, 4)))
