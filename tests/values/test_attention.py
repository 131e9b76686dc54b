"""Attention against the reference: every dtype, path and option, lengths around every block size, random problems."""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given

import cattn
from support import (
    PATHS,
    Expected,
    every_way,
    everything,
    examples,
    expected,
    forced,
    looped,
)
from support.calls import HEAD_DIMS, KEYS, LONG, ROWS, drawn
from support.laws import Problem, check, problem

INF = np.inf
Build = Callable[[Callable[..., np.ndarray], np.random.Generator], dict[str, Any]]


def attend(batch: tuple[int, ...], T_q: int, T_k: int, D: int = 8, D_v: int | None = None, **options: Any) -> Build:
    """Inputs of one shape. An option that is callable is called with (normal, rng) and returns its value."""

    def build(normal: Callable[..., np.ndarray], rng: np.random.Generator) -> dict[str, Any]:
        call = {
            "query": normal(*batch, T_q, D),
            "key": normal(*batch, T_k, D),
            "value": normal(*batch, T_k, D if D_v is None else D_v),
        }
        return call | {name: option(normal, rng) if callable(option) else option for name, option in options.items()}

    return build


def shapes(query: tuple[int, ...], key: tuple[int, ...], value: tuple[int, ...], **options: Any) -> Build:
    """Inputs with a shape each."""
    given_shapes = {"query": query, "key": key, "value": value}

    def build(normal: Callable[..., np.ndarray], rng: np.random.Generator) -> dict[str, Any]:
        call = {name: normal(*shape) for name, shape in given_shapes.items()}
        return call | {name: option(normal, rng) if callable(option) else option for name, option in options.items()}

    return build


def mask(*shape: int, p: float = 0.6) -> Any:
    return lambda _normal, rng: rng.random(shape) < p


def bias(*shape: int, hidden: float = 0.2) -> Any:
    """An option: normal numbers, some of them -inf."""
    return lambda normal, rng: np.where(rng.random(shape) < hidden, -INF, normal(*shape)).astype(normal().dtype)


CASES: dict[str, Build] = {
    # causality
    "causal, T_q == T_k": attend((2,), 100, 100, is_causal=True),
    "upper left, more keys": attend((), 50, 130, is_causal="upper_left"),
    "upper left, more queries": attend((), 130, 50, is_causal="upper_left"),
    "lower right, more keys": attend((2,), 40, 230, is_causal="lower_right"),
    "lower right, more queries": attend((2,), 230, 40, is_causal="lower_right"),
    "offset": attend((), 20, 300, is_causal=True, query_offset=201),
    "negative offset": attend((), 120, 60, is_causal=True, query_offset=-97),
    "offset past all keys": attend((), 5, 30, is_causal=True, query_offset=10**15),
    "offset before all keys": attend((), 5, 30, is_causal=True, query_offset=-(10**15)),
    "offset per batch": attend((3, 2), 7, 40, is_causal=True, query_offset=np.array([0, 33, -3])),
    "offset per batch of two dimensions": attend(
        (2, 3, 2), 7, 40, is_causal=True, query_offset=np.array([[5], [38]], np.int32)
    ),
    "window": attend((2,), 100, 300, is_causal="lower_right", window_size=(20, 0)),
    "window of one key": attend((), 40, 40, window_size=(0, 0)),
    "window to both sides": attend((), 230, 230, window_size=(3, 100)),
    "window to the right": attend((2, 2), 50, 60, window_size=(-1, 2), query_offset=4),
    "window to the left, no bound to the right": attend((), 130, 400, window_size=[170, None], query_offset=200),
    "window without keys": attend((), 9, 30, window_size=(2, 2), query_offset=np.array(50)),
    "window and masks": attend(
        (2, 2), 30, 250, attn_mask=mask(30, 250), bias=bias(2, 1, 250), is_causal="lower_right", window_size=(99, 5)
    ),
    "window, dropout": attend((2,), 30, 90, dropout_p=0.5, rng=3, is_causal="lower_right", window_size=(7, 0)),
    "softcap": attend((2,), 30, 250, softcap=1.5, is_causal="lower_right"),
    "softcap, masks": attend((), 100, 40, softcap=30.0, attn_mask=mask(100, 40), bias=bias(40)),
    "slopes": attend((2, 3), 20, 300, alibi_slopes=[0.5, 0.25, 0.0], is_causal="lower_right"),
    "slopes to both sides": attend((), 130, 60, alibi_slopes=np.array([0.03]), query_offset=-30),
    "slopes of a batch": attend((2, 3), 9, 50, alibi_slopes=np.arange(6.0).reshape(2, 3) / 9, bias=bias(9, 50)),
    "sinks": attend((2, 3), 20, 300, sinks=np.array([0.5, -INF, 4.0], np.float32), is_causal="lower_right"),
    "sinks and no visible key": attend((), 3, 70, sinks=[2.0], attn_mask=np.zeros((3, 70), bool)),
    "sinks, dropout": attend((2,), 30, 90, sinks=[1.0], dropout_p=0.5, rng=3, softcap=2.0, alibi_slopes=[0.1]),
    "lengths": attend((3,), 20, 50, key_value_seq_lengths=[50, 0, 17], query_seq_lengths=[20, 5, 0]),
    "lengths, lower right": attend(
        (3, 2), 120, 230, is_causal="lower_right", key_value_seq_lengths=[230, 40, 197], query_seq_lengths=[7, 120, 99]
    ),
    "one length": attend((2,), 5, 300, key_value_seq_lengths=np.int32(193), is_causal="lower_right"),
    "starts": attend((3,), 20, 50, key_value_seq_starts=[0, 50, 17]),
    "starts, lower right": attend((3, 2), 120, 230, is_causal="lower_right", key_value_seq_starts=[0, 140, 197]),
    "starts and lengths": attend(
        (3, 2),
        20,
        230,
        is_causal="lower_right",
        key_value_seq_starts=[10, 0, 201],
        query_seq_lengths=[7, 20, 9],
        key_value_seq_lengths=[230, 40, 197],
    ),
    "starts, window, slopes, sinks, dropout": attend(
        (2, 2),
        99,
        300,
        is_causal="upper_left",
        query_offset=201,
        window_size=(120, 0),
        key_value_seq_starts=[150, 20],
        alibi_slopes=[0.5, 0.1],
        sinks=[0.5, -1.0],
        dropout_p=0.3,
        rng=3,
    ),
    "starts and masks": attend(
        (2, 2), 30, 250, attn_mask=mask(30, 250), bias=bias(2, 1, 250), key_value_seq_starts=[97, 13]
    ),
    "one start": attend((2,), 5, 300, key_value_seq_starts=np.int32(193), is_causal="lower_right"),
    "lengths and starts of two batch dimensions": attend(
        (2, 3, 2),
        9,
        40,
        key_value_seq_starts=[[0], [2]],
        query_seq_lengths=[[9], [4]],
        key_value_seq_lengths=[0, 11, 40],
        is_causal="upper_left",
        window_size=(3, 0),
    ),
    "offset of a 3-d batch": attend((3,), 100, 40, is_causal="upper_left", query_offset=np.array([-70, 0, 39])),
    # masks
    "bool": attend((2, 3), 21, 45, attn_mask=mask(2, 3, 21, 45)),
    "bool, few visible": attend((), 100, 200, attn_mask=mask(100, 200, p=0.02)),
    "bool, per key": attend((2, 2), 21, 45, attn_mask=mask(2, 1, 1, 45)),
    "bool, per query": attend((2, 2), 21, 45, attn_mask=mask(1, 2, 21, 1)),
    "bool, one number": attend((), 21, 45, attn_mask=lambda *_: np.array(False)),
    "bool, transposed": attend((), 21, 45, attn_mask=lambda _, rng: (rng.random((45, 21)) < 0.5).T),
    "bool, reversed": attend((), 21, 45, attn_mask=lambda _, rng: (rng.random((21, 90)) < 0.5)[::-1, ::-2]),
    "float": attend((2,), 100, 45, attn_mask=bias(2, 100, 45)),
    "float, per key": attend((2, 2), 21, 45, attn_mask=bias(2, 1, 1, 45)),
    "float, strided": attend((), 21, 45, attn_mask=lambda normal, _: normal(90, 42)[::-2, ::2].T),
    "float64 mask": attend((), 21, 45, attn_mask=lambda _, rng: rng.standard_normal((21, 45)) - 1),
    "float16 mask": attend((), 21, 45, attn_mask=lambda _, rng: rng.standard_normal((21, 45)).astype(np.float16)),
    "bias": attend((2, 2), 21, 200, bias=bias(2, 21, 200)),
    "bool and bias": attend((2, 2), 21, 45, attn_mask=mask(21, 45), bias=bias(2, 1, 45)),
    "float and bias": attend((2, 2), 21, 45, attn_mask=bias(2, 1, 21, 45), bias=bias(21, 1, hidden=0)),
    "bool, bias, causal": attend((2,), 110, 140, attn_mask=mask(110, 140), bias=bias(140), is_causal="lower_right"),
    "float, causal": attend((2,), 110, 110, attn_mask=bias(110, 110), is_causal=True),
    "bool, bias, causal, offset": attend(
        (2, 2), 9, 45, attn_mask=mask(2, 9, 45), bias=bias(2, 1, 9, 1), is_causal=True, query_offset=np.array([30, -2])
    ),
    # scale
    "scale": attend((), 21, 45, scale=0.3),
    "scale 0": attend((), 21, 45, scale=0),
    "negative scale": attend((), 21, 45, scale=-1.7, is_causal="upper_left"),
    # heads and batch dimensions
    "grouped heads": shapes((2, 6, 21, 8), (2, 2, 45, 8), (2, 2, 45, 8), is_causal="lower_right"),
    "grouped heads, many queries": shapes((2, 4, 101, 8), (2, 2, 101, 8), (2, 2, 101, 8), is_causal=True),
    "grouped heads, one query": shapes((2, 12, 1, 8), (2, 2, 245, 8), (2, 2, 245, 5)),
    "grouped heads, bias": shapes((1, 6, 9, 8), (1, 3, 45, 8), (1, 3, 45, 8), bias=bias(6, 9, 45)),
    "one key-value head": shapes((2, 5, 21, 8), (2, 1, 45, 8), (2, 1, 45, 8)),
    "one value head": shapes((2, 4, 21, 8), (2, 2, 45, 8), (2, 1, 45, 8)),
    "one key head": shapes((2, 4, 21, 8), (2, 1, 45, 8), (2, 2, 45, 8)),
    "one query head": shapes((2, 1, 21, 8), (2, 3, 45, 8), (2, 3, 45, 8)),
    "heads of a 3-d call": shapes((4, 21, 8), (2, 45, 8), (2, 45, 8), enable_gqa=True),
    "batch dimensions broadcast": shapes((2, 1, 3, 1, 9, 8), (4, 1, 1, 17, 8), (2, 1, 3, 1, 17, 5)),
    "ranks differ": shapes((9, 8), (3, 17, 8), (2, 1, 3, 17, 5)),
    "query has the batch": shapes((3, 2, 9, 8), (17, 8), (17, 5)),
    "six batch dimensions": shapes((2, 1, 2, 1, 3, 2, 5, 4), (2, 1, 1, 3, 2, 6, 4), (1, 2, 2, 1, 3, 2, 6, 3)),
    "batch of masks": attend((2, 3, 2), 9, 17, attn_mask=mask(3, 1, 9, 17), bias=bias(2, 1, 1, 1, 17)),
    "empty batch": attend((0, 2), 9, 17),
    "no heads": attend((2, 0), 9, 17),
    "no queries": attend((2, 2), 0, 17, is_causal="lower_right"),
    "no keys": attend((2, 2), 9, 0, is_causal="lower_right", dropout_p=0.5, rng=1),
    # dropout
    "dropout": attend((2, 2), 100, 245, dropout_p=0.3, rng=2**64 - 1),
    "dropout, causal": attend((2,), 110, 110, dropout_p=0.5, rng=7, is_causal=True),
    "dropout, 2-d": attend((), 5, 77, dropout_p=0.5, rng=8, is_causal=True, query_offset=50),
    "dropout, masks": attend((2,), 9, 77, dropout_p=0.9, rng=9, attn_mask=mask(9, 77), bias=bias(9, 1, hidden=0)),
    "dropout, groups": shapes((2, 4, 9, 8), (2, 2, 45, 8), (2, 2, 45, 8), dropout_p=0.1, rng=10),
    "dropout, offsets": attend((3, 2), 7, 40, dropout_p=0.5, rng=11, query_offset=np.array([0, 33, -3])),
    "dropout, all": attend((), 9, 45, dropout_p=1.0, rng=12),
}


@functools.cache
def case(name: str, dtype: type) -> tuple[dict[str, Any], Expected]:
    """Return the arguments of a case, with read-only arrays, and the expected result."""
    rng = np.random.default_rng(list(name.encode()))
    call = CASES[name](lambda *shape: rng.standard_normal(shape).astype(dtype), rng)
    for argument in call.values():
        if isinstance(argument, np.ndarray):
            argument.flags.writeable = False
    return call, expected(call, dtype)


def fits_tiny(call: dict[str, Any]) -> bool:
    """Return whether the tiny path must accept the call. It may accept larger ones."""
    return call["key"].shape[-2] <= 192 and call["value"].shape[-1] <= 20


@pytest.mark.promise("formula")
@looped("name", CASES)
def test_every_option_agrees_with_the_reference(name: str, isa: str, dtype: type) -> None:
    call, right = case(name, dtype)
    for way, result in every_way(lambda: everything(**call), tiny=fits_tiny(call)):
        assert all(field.dtype == dtype for field in result[:3])
        right.check(result, f"{name}, {way}")
        assert result.dropout_seed == call.get("rng")


# ---- lengths -------------------------------------------------------------------------------------------------------
@functools.cache
def sized(T_q: int, T_k: int, D: int, D_v: int, causal: bool, dtype: type) -> tuple[dict[str, Any], Expected]:
    rng = np.random.default_rng([T_q, T_k, D, D_v])
    normal = functools.partial(rng.standard_normal, dtype=dtype)
    call = {"query": normal((T_q, D)), "key": normal((T_k, D)), "value": normal((T_k, D_v))}
    call["is_causal"] = "lower_right" if causal else False
    return call, expected(call, dtype)


@pytest.mark.parametrize("which", PATHS)
def test_lengths_around_every_block_size_agree_with_the_reference(isa: str, dtype: type, which: str) -> None:
    """Every number of rows with three numbers of keys, and every number of keys with three of rows; causal and not."""
    pairs = {(T_q, KEYS[(i + shift) % len(KEYS)]) for i, T_q in enumerate(ROWS) for shift in (0, 11, 23)}
    pairs |= {(ROWS[(7 * i + shift) % len(ROWS)], T_k) for i, T_k in enumerate(KEYS) for shift in (0, 4, 18)}
    with forced(which):
        for T_q, T_k in sorted(pairs):
            if which == "tiny" and T_k > 192:
                continue
            causal = (T_q + T_k) % 2 == 0
            call, right = sized(T_q, T_k, 5, 3, causal, dtype)
            result = cattn.scaled_dot_product_attention(**call, return_weights=True, return_lse=True)
            right.check(result, f"T_q {T_q}, T_k {T_k}, causal {causal}")


@pytest.mark.parametrize("which", [path for path in PATHS if path != "tiny"])
def test_lengths_past_several_key_chunks_agree_with_the_reference(isa: str, dtype: type, which: str) -> None:
    with forced(which):
        for T_q, T_k in itertools.product((1, 3, 17), LONG):
            call, right = sized(T_q, T_k, 5, 3, T_q == 3, dtype)
            result = cattn.scaled_dot_product_attention(**call, return_weights=True, return_lse=True)
            right.check(result, f"T_q {T_q}, T_k {T_k}")


@pytest.mark.parametrize("which", PATHS)
def test_every_head_dim_agrees_with_the_reference(isa: str, dtype: type, which: str) -> None:
    with forced(which):
        for D, D_v in zip(HEAD_DIMS, HEAD_DIMS[9:] + HEAD_DIMS[:9], strict=True):
            for T_q, T_k in ((2, 13), (19, 40)):
                call, right = sized(T_q, T_k, D, D_v, True, dtype)
                result = cattn.scaled_dot_product_attention(**call, return_weights=True, return_lse=True)
                right.check(result, f"head_dim {D}, d_v {D_v}, T_q {T_q}")


def test_all_outputs_may_have_any_strides(isa: str, dtype: type, path: str) -> None:
    """Memory between the elements of a strided output is not written."""
    call, right = case("dropout", dtype)
    call = {name: a[..., :150, :] if name in ("key", "value") else a for name, a in call.items()}
    right = everything(**call)
    for view in (np.s_[:, :, ::2, ::3], np.s_[::-1, :, ::-2, ::-3], np.s_[:, ::-1, 1::2, 2::3]):
        memory = [
            np.full((2, 2, 200, 24), 5, dtype),
            np.full((2, 2, 200, 450), 5, dtype),
            np.full((2, 2, 200), 5, dtype),
            np.full((2, 2, 200, 450), 5, np.uint8).view(bool),
        ]
        fields = [a[view[: a.ndim]] for a in memory]
        given_out = cattn.AttentionOutput(*fields)
        result = cattn.scaled_dot_product_attention(
            **call, return_weights=True, return_lse=True, return_dropout_mask=True, out=given_out
        )
        for field, returned, whole, value in zip(fields, result, memory, right, strict=False):
            assert returned is field
            np.testing.assert_array_equal(field, value)
            field.view(np.uint8 if field.dtype == bool else field.dtype)[...] = 5
            assert (whole.view(np.uint8 if field.dtype == bool else field.dtype) == 5).all()


# ---- combinations --------------------------------------------------------------------------------------------------


def test_two_finite_masks_whose_sum_overflows_hide_nothing(isa: str, dtype: type, path: str) -> None:
    """The sum is the lowest finite number instead of -inf."""
    lowest = np.full((5, 7), np.finfo(dtype).min, dtype)
    x = np.random.default_rng(0).standard_normal((7, 4)).astype(dtype)
    out = cattn.scaled_dot_product_attention(x[:5], x, x, lowest, bias=lowest)
    np.testing.assert_allclose(out, np.broadcast_to(x.mean(0), (5, 4)), rtol=1e-5, atol=1e-6)


# ---- random problems -------------------------------------------------------------------------------------------------
@pytest.mark.promise(
    "formula", "stages", "gradients", "paths and tables", "threads and batch", "strides", "hidden keys"
)
@given(drawn(problem))
@examples(40, long=20_000)
def test_random_problems(chosen: Problem) -> None:
    check(chosen)
