"""Statistics and stages of the weights have the bits of the equivalent call, with any number of threads and path."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from table import (
    ABOUT_VALUES,
    LAYOUT,
    Call,
    Row,
    assert_equivalent,
    dtypes_of,
    every_case,
    every_row,
    is_refused,
)

import cattn
from support import assert_same_bits, every_way, without

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
        assert_equivalent(row, statistics, with_options(row, row.cases[name](dtype)), str(dtype))


@every_row
@given(data=st.data())
@settings(max_examples=max(20, settings().max_examples // 4))
def test_statistics_of_any_call(row: Row, isa: str, data: st.DataObject) -> None:
    call = data.draw(row.drawn)
    if "statistics" not in row.refuses and "key_indices" not in call:
        assert_equivalent(row, statistics, with_options(row, call), "")


@pytest.mark.promise("stages")
@every_case
def test_stages(row: Row, name: str, isa: str) -> None:
    for dtype in dtypes_of(row, name, isa)[:2]:
        call = without(row.cases[name](dtype), "value", "rng", "dropout_p")
        for stage in STAGES[:5] if row.option == "key_indices" else STAGES:
            dropout: Any = {"dropout_p": 0.4, "rng": 3} if stage == "dropout" else {}
            asked = call | {"stage": stage} | dropout
            right = row.equivalent(stage_of, asked)
            for way, found in every_way(lambda asked=asked: stage_of(asked), tiny=False, threads=(3,)):
                assert_same_bits(row.seen(call, stage, found.weights), right.weights, f"{dtype}, {stage}, {way}")
