"""Gradients and tangents have the bits of the equivalent call, with any number of threads."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from table import LAYOUT, Call, Row, assert_equivalent, dtypes_of, every_case, every_row, is_refused, swapped

import cattn
from support import examples, without
from support.derivatives import direction

GIVEN = ("grad_out", "grad_lse")


def with_gradients(row: Row, call: Call) -> Call:
    """Return the call with a gradient of its output, in the form of its arrays, and one of its log-sum-exp."""
    result = cattn.scaled_dot_product_attention(**call, return_lse=np.float64)
    rng = np.random.default_rng(1)
    grad_out = rng.standard_normal(result.out.shape)
    return call | {"grad_out": grad_out.astype(result.out.dtype), "grad_lse": rng.standard_normal(result.lse.shape)}


def gradients(call: Call) -> cattn.AttentionGradients:
    given, call = {name: call[name] for name in GIVEN}, without(call, *GIVEN)
    result = cattn.scaled_dot_product_attention(**call, return_lse=np.float64)
    return cattn.attention_backward(**given, out=result.out, lse=result.lse, **call)


def tangents(call: Call) -> cattn.AttentionTangents:
    return cattn.attention_jvp(**call, return_lse=np.float64)


def second(call: Call) -> cattn.AttentionGradients:
    """Return the gradients of the derivative, for gradients that are those of the output's derivative."""
    call = dict(call)
    given = {"grad_out_tangent": call.pop("grad_out"), "grad_lse_tangent": call.pop("grad_lse")}
    return cattn.attention_jvp_backward(**given, **call, **tangents(call)._asdict())


@pytest.mark.promise("gradients' bits")
@every_case
def test_gradients(row: Row, name: str, isa: str) -> None:
    for dtype in dtypes_of(row, name, isa) if row.derivatives and "heads" not in row.sums_of_its_own else ():
        assert_equivalent(row, gradients, with_gradients(row, row.cases[name](dtype)), str(dtype))


@pytest.mark.promise("gradients' bits")
@every_row
@pytest.mark.parametrize("shape", [(1, 4, 0, 0), (4, 0, 0), (2, 4, 0, 1), (2, 4, 1, 0)])
def test_gradients_of_a_bias(row: Row, shape: tuple[int, ...], isa: str) -> None:
    """An axis of size 0 has the size of the scores."""
    call = row.cases["many queries" if "many queries" in row.cases else "blocks of 64"](row.dtypes[0])
    entries_share_it, queries_share_it = shape[0] != 2, shape[-2] == 1
    if (
        (row.option == "key_value_seq_starts" and entries_share_it)
        or (row.option == "key_indices" and queries_share_it)
        or not row.derivatives
    ):
        return  # its gradient is a sum with an order of its own: test_options.py, docs/bit_contract.md
    lengths = call["query"].shape[-3 if row is LAYOUT else -2], call["key"].shape[-3 if row is LAYOUT else -2]
    size = shape[:-2] + tuple(own or length for own, length in zip(shape[-2:], lengths, strict=True))
    call |= {"bias": np.random.default_rng(3).standard_normal(size, np.float32), "softcap": 2.0}
    assert_equivalent(row, gradients, with_gradients(row, call), str(shape))


def with_tangents(row: Row, call: Call) -> Call:
    call = without(call, "gate")
    if row is not LAYOUT:
        return call | direction(call)
    inputs = ("query", "key", "value")
    found = direction(call | {name: swapped(call[name]) for name in inputs})
    return call | {n: swapped(x) if n.removesuffix("_tangent") in inputs else x for n, x in found.items()}


@pytest.mark.promise("gradients' bits")
@every_case
def test_tangents_and_their_gradients(row: Row, name: str, isa: str) -> None:
    def refused(call: Call) -> Any:
        return cattn.attention_jvp(**call, query_tangent=np.zeros(call["query"].shape, call["query"].dtype))

    if not row.derivatives or is_refused(row, "tangents", refused):
        return
    for dtype in dtypes_of(row, name, isa):
        call = with_tangents(row, row.cases[name](dtype))
        assert_equivalent(row, tangents, call, str(dtype))
        given = with_gradients(row, row.cases[name](dtype))
        assert_equivalent(row, second, call | {name: given[name] for name in GIVEN}, f"{dtype}, gradients")


@every_row
@given(data=st.data())
@examples(25, long=1250)
def test_gradients_of_any_call(row: Row, isa: str, data: st.DataObject) -> None:
    if row.derivatives and "heads" not in row.sums_of_its_own:
        assert_equivalent(row, gradients, with_gradients(row, data.draw(row.drawn)), "")


@every_row
@given(data=st.data())
@examples(16, long=800)
def test_tangents_of_any_call(row: Row, isa: str, data: st.DataObject) -> None:
    call = data.draw(row.drawn)
    if not row.derivatives:
        return
    stored = [name for name in ("key", "value") if isinstance(call[name], cattn.Quantized)]
    if "tangents" not in row.refuses and "key_indices" not in call and not stored:
        assert_equivalent(row, tangents, with_tangents(row, call), "")
