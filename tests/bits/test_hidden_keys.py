"""A key that is hidden from a query changes no bit of that query's row, whatever is stored there.

Keys, values, biases and masks are overwritten with NaN, infinity and other numbers ("poison") wherever a row does not
see them. Its output, weights, log-sum-exp and dropout mask must keep their bits. Visible poison shows only in the rows
that see it.
"""

import functools
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import cattn
from cattn.reference._attention import score
from support import INF, NAN, assert_same_bits, every_way, everything, examples, looped, part, visibility_of

Call = dict[str, Any]
Normal = Callable[..., np.ndarray]
POISONS = {
    "NaN": NAN,
    "-NaN": -NAN,
    "inf": INF,
    "-inf": -INF,
    "1e38": 1e38,
    "-1e38": -1e38,
    "subnormal": 1e-45,
    "0": 0.0,
}
USUAL = ("NaN", "inf", "-1e38")  # the others run in the long form only


def poison_of(kind: str, dtype: type) -> Any:
    limits = ml_dtypes.finfo(dtype)  # the extreme numbers of each dtype
    extreme = {"1e38": limits.max, "-1e38": limits.min, "subnormal": limits.smallest_subnormal}
    return dtype(extreme.get(kind, POISONS[kind]))


def visible(call: Call) -> np.ndarray:
    """Return which keys each query sees, (*batch, H, T_q, T_k), with one head for less than four dimensions."""
    with np.errstate(all="ignore"):
        return score((call["query"], call["key"], call["value"]), **visibility_of(call)).visible


# ---- keys that no query sees ---------------------------------------------------------------------------------------
def inputs(normal: Normal, batch: tuple[int, ...], T_q: int, T_k: int, **options: Any) -> Call:
    return {
        "query": normal(*batch, T_q, 9),
        "key": normal(*batch, T_k, 9),
        "value": normal(*batch, T_k, 19),
    } | options


def every_third(T_k: int) -> np.ndarray:
    return np.arange(T_k) % 3 == 1


def hiding(name: str) -> Callable[[Normal], Call]:
    """Return a builder for a call in which no query sees the keys at `unseen`; `name` says what hides them."""
    # Keys hidden from all rows: at the end, within a block, a whole block. Other keys are hidden from some rows only.
    T_q, T_k = 37, 400
    unseen = every_third(T_k) | (np.arange(T_k) >= 350) | ((np.arange(T_k) > 180) & (np.arange(T_k) < 280))
    rows = np.arange(T_q)[:, None]
    hidden = ((np.arange(T_k) + rows) % 5 == 0) | unseen  # hidden, by row

    def build(normal: Normal) -> Call:
        call = inputs(normal, (2,), T_q, T_k)
        infinite = np.where(hidden, -INF, normal(T_q, T_k)).astype(normal().dtype)
        call |= {
            "bool": {"attn_mask": ~hidden},
            "bool, per key": {"attn_mask": ~unseen},
            "-inf": {"attn_mask": infinite},
            "-inf bias": {"bias": infinite},
            "-inf in one of two": {"attn_mask": infinite, "bias": normal(T_q, T_k)},
            "bool and bias": {"attn_mask": ~hidden, "bias": normal(2, T_q, T_k)},
            "bool, dropout": {"attn_mask": ~hidden, "dropout_p": 0.5, "rng": 4},
            "lower right": {"attn_mask": ~unseen, "is_causal": "lower_right"},
            "offset": {"is_causal": True, "query_offset": 100},
            "offsets": {"is_causal": True, "query_offset": np.array([3, 250])},
            "upper left": {"is_causal": "upper_left", "dropout_p": 0.2, "rng": 1},
            "window": {"is_causal": "lower_right", "window_size": (20, 0)},
            "window to both sides": {"query_offset": 100, "window_size": (3, 60)},
            "softcap, slopes, sinks": {
                "attn_mask": ~hidden,
                "is_causal": "lower_right",
                "softcap": 3.0,
                "alibi_slopes": [0.1],
                "sinks": [0.5],
            },
            "key lengths": {"key_value_seq_lengths": [7, 301]},
            "lengths and causal": {
                "is_causal": "lower_right",
                "query_seq_lengths": [37, 20],
                "key_value_seq_lengths": [300, 12],
            },
            "key starts": {"key_value_seq_starts": [7, 301]},
            "starts, lengths and causal": {
                "is_causal": "lower_right",
                "key_value_seq_starts": [250, 3],
                "key_value_seq_lengths": [390, 12],
            },
            "no key at all": {"attn_mask": np.zeros((T_q, 1), bool)},
            "some rows see none": {"attn_mask": ~hidden & (rows % 3 != 1)},
            "before all": {"is_causal": True, "query_offset": -T_q},
        }[name]
        return call

    return build


HIDING = ["bool", "bool, per key", "-inf", "-inf bias", "-inf in one of two", "bool and bias", "bool, dropout"]
HIDING += ["softcap, slopes, sinks", "window", "window to both sides", "key lengths", "lengths and causal"]
HIDING += ["key starts", "starts, lengths and causal"]
HIDING += ["lower right", "offset", "offsets", "upper left", "no key at all", "some rows see none", "before all"]


@functools.cache
def hidden_case(name: str, dtype: type) -> tuple[Call, np.ndarray]:
    """Return the call, and which keys no query sees, (2, T_k)."""
    rng = np.random.default_rng(list(name.encode()))
    call = hiding(name)(lambda *shape: np.asarray(rng.standard_normal(shape), dtype))
    unseen = ~visible(call).any(axis=(1, 2))
    assert unseen.any()
    return call, unseen


@pytest.mark.promise("hidden keys")
@looped("name", HIDING)
@pytest.mark.parametrize(
    "kind", [kind if kind in USUAL else pytest.param(kind, marks=pytest.mark.long) for kind in POISONS]
)
def test_keys_hidden_from_all_queries_change_no_bit(isa: str, dtype: type, name: str, kind: str) -> None:
    """Poisoned: the hidden keys and values, and a bias wherever another mask hides the key."""
    call, unseen = hidden_case(name, dtype)
    poison = poison_of(kind, dtype)
    dirty = dict(call)
    for field in ("key", "value"):
        dirty[field] = np.where(unseen[..., None], poison, call[field])
    sees = visible(call)
    if "bias" in call and name != "-inf bias":  # there the bias itself hides the keys
        free = ~sees[:, 0] if call["bias"].ndim == 3 else ~sees[:, 0].any(axis=0)
        dirty["bias"] = np.where(free, poison, call["bias"])
    right = everything(**call)
    assert np.isfinite(right.out).all()
    assert not right.weights[~sees[:, 0]].any()
    for way, result in every_way(lambda: everything(**dirty), tiny=False):
        assert_same_bits(result, right, way)


def test_the_same_poison_shows_where_it_is_visible(isa: str, dtype: type) -> None:
    """Without this, the test above might never fail."""
    for name in HIDING:
        call, unseen = hidden_case(name, dtype)
        sees = visible(call)[:, 0]
        seen = np.flatnonzero(~unseen[0])
        if seen.size == 0:
            continue
        for field in ("key", "value"):
            dirty = dict(call) | {field: call[field].copy()}
            dirty[field][0, seen[0], 0] = NAN
            result = everything(**dirty)
            shown = np.isnan(result.out[0]).any(axis=-1)
            assert (shown == sees[0, :, seen[0]]).all(), f"{name}, {field}"


# ---- keys that some queries see ------------------------------------------------------------------------------------
def mixed(name: str, normal: Normal, rng: np.random.Generator) -> Call:
    """Calls in which each key is seen by some rows and hidden from others."""
    T_q, T_k = 110, 210
    call = inputs(normal, (2,), T_q, T_k)
    mask = rng.random((T_q, T_k)) < 0.5
    call |= {
        "causal": {"is_causal": "lower_right"},
        "bool": {"attn_mask": mask},
        "-inf": {"attn_mask": np.where(mask, normal(T_q, T_k), -INF)},
        "causal, bool, bias, dropout": {
            "is_causal": "upper_left",
            "attn_mask": mask,
            "bias": normal(T_k),
            "dropout_p": 0.4,
            "rng": 1,
        },
        "offsets": {"is_causal": True, "query_offset": np.array([-40, 99])},
        "window": {"query_offset": 50, "window_size": (30, 20)},
    }[name]
    return call


@pytest.mark.promise("rows without keys")
@pytest.mark.parametrize("name", ["causal", "bool", "-inf", "causal, bool, bias, dropout", "offsets", "window"])
@pytest.mark.parametrize("kind", ["NaN", *(pytest.param(kind, marks=pytest.mark.long) for kind in ("inf", "-1e38"))])
def test_rows_that_do_not_see_a_poisoned_key_keep_their_bits(
    isa: str, dtype: type, name: str, kind: str, normal: Normal, rng: np.random.Generator
) -> None:
    """Rows that see it keep zero weights for hidden keys."""
    call = mixed(name, lambda *shape: normal(*shape, dtype=dtype), rng)
    sees = visible(call)[:, 0]
    right = everything(**call)
    shown = False
    for keys in ([0], [191, 192], [60, 209], [7, 8, 100]):
        touched = sees[:, :, keys].any(axis=-1)
        for fields in (("key",), ("value",)):
            dirty = dict(call)
            for field in fields:
                dirty[field] = call[field].copy()
                dirty[field][:, keys, ::4] = poison_of(kind, dtype)
            with np.errstate(all="ignore"):
                for way, result in every_way(lambda of=dirty: everything(**of), tiny=False, threads=(2,)):
                    what = f"{kind} in {fields} at {keys}, {way}"
                    assert_same_bits(part(result, ~touched), part(right, ~touched), what)
                    assert not result.weights[~sees].any(), what
                    shown |= bool((result.out[touched] != right.out[touched]).any())
                    if fields == ("value",):
                        assert_same_bits(result[1:3], right[1:3], what)
                        clean = np.arange(19) % 4 != 0
                        assert_same_bits(result.out[..., clean], right.out[..., clean], f"other columns, {what}")
                        if kind == "NaN":
                            assert (np.isnan(result.out).any(axis=-1) == touched).all(), what
    assert shown


@pytest.mark.promise("independent rows")
def test_a_poisoned_query_or_bias_row_changes_only_its_own_row(isa: str, dtype: type, normal: Normal) -> None:
    """NaN, infinity or a huge number in one query, or in one row of the bias."""
    call = inputs(lambda *shape: normal(*shape, dtype=dtype), (2,), 110, 210, is_causal="lower_right")
    call["bias"] = normal(110, 210, dtype=dtype)
    right = everything(**call)
    for kind in ("NaN", "inf", "1e38"):
        for row in (0, 1, 50, 95, 96, 109):
            others = np.arange(110) != row
            for field in ("query", "bias"):
                dirty = call | {field: call[field].copy()}
                dirty[field][..., row, 5] = poison_of(kind, dtype)
                for way, result in every_way(lambda of=dirty: everything(**of), tiny=False, threads=(2,)):
                    what = f"{kind} in {field} {row}, {way}"
                    assert_same_bits(part(result, np.s_[:, others]), part(right, np.s_[:, others]), what)
                    if kind == "NaN":
                        assert np.isnan(result.out[:, row]).all(), what
                        seen = np.arange(210) <= row + 100
                        assert (np.isnan(result.weights[:, row]) == seen).all(), what
                        assert np.isnan(result.lse[:, row]).all(), what


@pytest.mark.promise("independent rows")
def test_a_poisoned_head_changes_only_the_heads_that_use_it(isa: str, dtype: type, normal: Normal) -> None:
    shapes = {"query": (2, 4, 20, 9), "key": (2, 2, 60, 9), "value": (2, 2, 60, 5)}
    call = {name: normal(*shape, dtype=dtype) for name, shape in shapes.items()}
    right = everything(**call)
    for field in shapes:
        dirty = call | {field: call[field].copy()}
        dirty[field][1, 1] = NAN
        hit = np.zeros((2, 4), bool)
        hit[1, 1 if field == "query" else slice(2, 4)] = True
        for way, result in every_way(lambda of=dirty: everything(**of), tiny=True):
            assert_same_bits(part(result, ~hit), part(right, ~hit), f"{field}, {way}")
            assert np.isnan(result.out[hit]).all()


# ---- masks over keys that are hidden already -----------------------------------------------------------------------
def test_masks_beyond_the_causal_edge_change_no_bit(
    isa: str, dtype: type, normal: Normal, rng: np.random.Generator
) -> None:
    """Boolean and float masks may hold anything, NaN included, where causality hides the key."""
    T_q, T_k = 50, 210
    causal = cattn.causal_mask(T_q, T_k, query_offset=100)
    call = inputs(lambda *shape: normal(*shape, dtype=dtype), (2,), T_q, T_k, is_causal=True, query_offset=100)
    boolean, floats = rng.random((T_q, T_k)) < 0.8, normal(T_q, T_k, dtype=dtype)
    for mask, fills in ((boolean, (True, False)), (floats, (NAN, INF, -INF, 1e30, -1e30))):
        right = everything(**call, attn_mask=np.where(causal, mask, mask.dtype.type(0)))
        for fill in fills:
            filled = np.where(causal, mask, np.asarray(fill, mask.dtype))
            for way, result in every_way(lambda of=filled: everything(**call, attn_mask=of), tiny=False):
                assert_same_bits(result, right, f"{fill}, {way}")


def test_a_bias_cannot_unhide_a_key(isa: str, dtype: type, normal: Normal, rng: np.random.Generator) -> None:
    """A key hidden by one mask stays hidden whatever the other adds: -inf in one outweighs NaN in the other."""
    mask = rng.random((50, 210)) < 0.6
    call = inputs(lambda *shape: normal(*shape, dtype=dtype), (2,), 50, 210)
    bias = normal(50, 210, dtype=dtype)
    right = everything(**call, attn_mask=mask, bias=bias)
    as_float = np.where(mask, dtype(0.5), dtype(-INF))
    right_float = everything(**call, attn_mask=as_float, bias=bias)
    for fill in (NAN, INF, -INF, np.finfo(dtype).max, np.finfo(dtype).min, np.finfo(dtype).smallest_subnormal):
        dirty = np.where(mask, bias, dtype(fill))
        for way, result in every_way(lambda of=dirty: everything(**call, attn_mask=mask, bias=of), tiny=False):
            assert_same_bits(result, right, f"{fill}, {way}")
        for way, result in every_way(lambda of=dirty: everything(**call, attn_mask=as_float, bias=of), tiny=False):
            assert_same_bits(result, right_float, f"{fill} beside -inf, {way}")
        for way, result in every_way(lambda of=dirty: everything(**call, attn_mask=of, bias=as_float), tiny=False):
            assert_same_bits(result, right_float, f"{fill} before -inf, {way}")


def test_a_dropped_weight_does_not_hide_a_nan_value(isa: str, dtype: type, path: str) -> None:
    """As in PyTorch, 0 times a NaN value is NaN."""
    q, v = np.zeros((12, 4), dtype), np.ones((50, 3), dtype)
    v[7, 1] = NAN
    result = cattn.scaled_dot_product_attention(
        q, np.zeros((50, 4), dtype), v, None, 0.5, rng=3, return_dropout_mask=True
    )
    assert not result.dropout_mask[:, 7].all()
    assert np.isnan(result.out[:, 1]).all()
    assert np.isfinite(result.out[:, [0, 2]]).all()


# ---- random calls --------------------------------------------------------------------------------------------------
@given(st.data())
@examples(60)
def test_rows_that_see_no_poison_keep_their_bits_under_random_masks(isa: str, data: st.DataObject) -> None:
    """Random masks, keys and poison."""
    draw = data.draw
    dtype = draw(st.sampled_from([np.float32, np.float64]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    T_q = draw(st.sampled_from([1, 2, 5, 8, 9, 17, 97, 130]))
    T_k = draw(st.sampled_from([1, 3, 8, 15, 64, 97, 191, 193, 400]))

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(dtype)

    call = inputs(normal, (2,), T_q, T_k)
    share = draw(st.sampled_from([0.05, 0.5, 0.95]))
    kind = draw(st.sampled_from(["none", "bool", "float"]))
    if kind == "bool":
        call["attn_mask"] = rng.random((T_q, T_k)) < share
    elif kind == "float":
        call["attn_mask"] = np.where(rng.random((T_q, T_k)) < share, normal(T_q, T_k), dtype(-INF))
    if draw(st.booleans()):
        call["bias"] = np.where(rng.random(T_k) < 0.9, normal(T_k), dtype(-INF))
    if draw(st.booleans()):
        call |= {"is_causal": True, "query_offset": draw(st.integers(-T_q, T_k))}
    if draw(st.booleans()):
        call |= {"dropout_p": draw(st.floats(0, 1)), "rng": draw(st.integers(0, 2**64 - 1))}
    keys = rng.random(T_k) < draw(st.sampled_from([0.02, 0.3, 1.0]))
    poison = poison_of(draw(st.sampled_from(list(POISONS))), dtype)
    dirty = dict(call)
    for field in draw(st.sampled_from([["key"], ["value"], ["key", "value"]])):
        dirty[field] = np.where(keys[:, None], poison, call[field])
    sees = visible(call)[:, 0]
    untouched = ~sees[:, :, keys].any(axis=-1)
    right = everything(**call)
    for way, result in every_way(lambda: everything(**dirty), tiny=False):
        assert_same_bits(part(result, untouched), part(right, untouched), way)
        assert not result.weights[~sees].any(), way


def test_blocks_of_queries_that_go_through_the_keys_together_have_windows_of_their_own() -> None:
    """The windows are so long that blocks share key blocks, and so far apart that each starts at another one."""
    rng = np.random.default_rng(1)
    for n, window, head_dim, d_v in ((2383, 1484, 128, 64), (5100, 4100, 32, 32)):
        query, key = rng.standard_normal((2, n, head_dim), np.float32)
        value = rng.standard_normal((n, d_v), np.float32)
        with cattn.num_threads(1):  # more threads have tasks of fewer blocks
            whole = cattn.causal_attention(query, key, value, window_size=(window, 0))
        for first in range(window, n - 5, 96):
            rows = slice(first, first + 5)
            few = cattn.causal_attention(query[rows], key, value, window_size=(window, 0), query_offset=first)
            np.testing.assert_array_equal(whole[rows], few)
