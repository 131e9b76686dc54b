"""Outputs, statistics and stages have the bits of the equivalent call, in every way to compute them."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from table import (
    ABOUT_VALUES,
    LAYOUT,
    Call,
    Row,
    assert_equivalent,
    assert_same_fields,
    dtypes_of,
    every_case,
    every_row,
    is_refused,
    outputs,
)

import cattn
from support import assert_same_bits, every_way, examples, forced, without


@pytest.mark.promise("blocks", "padding on the left", "layouts", "quantized", "gathered keys", "halves", "hidden keys")
@every_case
def test_every_path_and_table_gives_the_bits_of_the_equivalent_call(row: Row, name: str, isa: str) -> None:
    """With any numbers where nothing is seen."""
    for dtype in dtypes_of(row, name, isa):
        call = row.cases[name](dtype)
        right = row.equivalent(outputs, call)
        for same in (call, *row.poisoned(call)):
            for way, result in every_way(lambda same=same: outputs(same), tiny=name == "few tokens"):
                assert_same_fields(result, right, f"{dtype}, {way}")


@pytest.mark.promise("strides")
@pytest.mark.parametrize("layout", ["Fortran", "backwards", "apart"])
@every_row
def test_any_strides_of_inputs_and_results(row: Row, layout: str, path: str) -> None:
    """Memory between the elements of a result is not written."""

    def lay_out(a: np.ndarray) -> np.ndarray:
        if layout == "Fortran" or a.ndim < 2:
            return np.asfortranarray(a)
        if layout == "backwards":
            return np.ascontiguousarray(a[..., ::-1, ::-1])[..., ::-1, ::-1]
        return np.repeat(np.repeat(a, 2, axis=-1), 3, axis=-2)[..., ::3, ::2]

    for dtype in row.dtypes:
        call = row.cases["few tokens"](dtype)
        right = row.equivalent(outputs, call)
        strided = {
            name: lay_out(x) if isinstance(x, np.ndarray) and name in ("query", "key", "value", "attn_mask") else x
            for name, x in call.items()
        }
        for name, x in call.items():
            if isinstance(x, cattn.Quantized):
                strided[name] = cattn.Quantized._of_checked(*map(lay_out, x))
        *batch, rows, columns = right.out.shape
        memory = np.full((*batch, 3 * rows, 2 * columns + 9), 7, right.out.dtype)
        out = memory[..., 1 : 1 + 3 * rows : 3, 2 * columns + 4 : 4 : -2]
        assert cattn.scaled_dot_product_attention(**strided, out=out) is out
        assert_same_bits(out.copy(), right.out, str(dtype))
        out[...] = 7
        assert (memory == 7).all(), "something else was written"
        *batch, rows, columns = right.weights.shape
        memory = np.full((*batch, 3 * rows, 2 * columns + 9), 7, right.weights.dtype)
        weights = memory[..., 1 : 1 + 3 * rows : 3, 2 * columns + 4 : 4 : -2]
        cattn.attention_weights(**without(strided, *ABOUT_VALUES), out=weights)
        assert_same_bits(weights.copy(), right.weights, str(dtype))
        weights[...] = 7
        assert (memory == 7).all(), "something else was written"


@every_row
@given(data=st.data())
@examples(50, long=2500)
def test_any_call_has_the_bits_of_the_equivalent_call(row: Row, isa: str, data: st.DataObject) -> None:
    """With every other option, any rank, strides and dtype."""
    call = data.draw(row.drawn)
    right = row.equivalent(outputs, call)
    for same in (call, *row.poisoned(call)[:1]):
        for way, result in every_way(lambda same=same: outputs(same), tiny=False):
            assert_same_fields(result, right, way)


@every_row
def test_every_table_agrees(row: Row, path: str) -> None:
    """The equivalent calls run on the same table; here the tables are compared among themselves."""
    call = row.cases["few tokens"](row.dtypes[0])
    found = []
    for entry in cattn.show_config("dicts")["tables"]:
        if entry["usable"] and entry["bit_contract"]:
            cattn._cattn._set_isa(entry["name"])
            found.append(outputs(call))
    with forced("rows"):
        right = outputs(call)
    assert found
    for result in found:
        assert_same_fields(result, right, "tables")


# ---- statistics and stages -------------------------------------------------------------------------------------------
STAGES = ("qk", "softcap", "bias", "mask", "softmax", "dropout")


class Weights(NamedTuple):
    weights: np.ndarray


def statistics(call: Call) -> cattn.AttentionStatistics:
    """Ask for as many of the largest weights as there are keys, if these are few."""
    keys = call["key"].shape[-3 if "layout" in call else -2]
    return cattn.attention_statistics(**call | {"top_k": min(call["top_k"], keys)})


def stage_of(call: Call) -> Weights:
    return Weights(cattn.attention_weights(**call))


def with_options(row: Row, call: Call) -> Call:
    keys = call["key"].shape[-3 if row is LAYOUT else -2]
    return without(call, *ABOUT_VALUES) | {"top_k": min(3, keys), "observation_window": 40}


@pytest.mark.promise("statistics' bits")
@every_case
def test_statistics(row: Row, name: str, isa: str) -> None:
    if is_refused(row, "statistics", lambda call: statistics(with_options(row, call))):
        return
    for dtype in dtypes_of(row, name, isa):
        call = with_options(row, row.cases[name](dtype))
        if "key_indices" not in call:  # the row of key_indices has the error
            assert_equivalent(row, statistics, call, str(dtype))


@every_row
@given(data=st.data())
@examples(25, long=1250)
def test_statistics_of_any_call(row: Row, isa: str, data: st.DataObject) -> None:
    call = data.draw(row.drawn)
    if "statistics" not in row.refuses and "key_indices" not in call:
        assert_equivalent(row, statistics, with_options(row, call), "")


@pytest.mark.promise("stages")
@every_case
def test_stages(row: Row, name: str, isa: str) -> None:
    for dtype in dtypes_of(row, name, isa)[:2]:
        call = without(row.cases[name](dtype), *ABOUT_VALUES)
        for stage in STAGES[:5] if "key_indices" in call else STAGES:
            dropout: Any = {"dropout_p": 0.4, "rng": 3} if stage == "dropout" else {}
            asked = call | {"stage": stage} | dropout
            right = row.equivalent(stage_of, asked)
            for way, found in every_way(lambda asked=asked: stage_of(asked), tiny=False, threads=(3,)):
                assert_same_bits(row.seen(call, stage, found.weights), right.weights, f"{dtype}, {stage}, {way}")
