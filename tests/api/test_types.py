"""The types that a checker sees: results by the flags of a call, and the classes' calls."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from support import ROOT
from support.processes import run_command

PROGRAM = """
from typing import Any, assert_type

import numpy as np
from numpy.typing import NDArray

import cattn

x = np.zeros((2, 3))
flag = bool(x.any())
edges = [0, 2]
Array = NDArray[Any]

assert_type(cattn.scaled_dot_product_attention(x, x, x), Array)
assert_type(cattn.scaled_dot_product_attention(x, x, x, None, 0.0, True, scale=2.0, out=x), Array)
assert_type(cattn.scaled_dot_product_attention(x, x, x, return_weights=False), Array)
assert_type(cattn.scaled_dot_product_attention(x, x, x, return_weights=True), cattn.AttentionOutput)
assert_type(cattn.scaled_dot_product_attention(x, x, x, return_lse=True, softcap=1.0), cattn.AttentionOutput)
assert_type(cattn.scaled_dot_product_attention(x, x, x, return_dropout_mask=True), cattn.AttentionOutput)
assert_type(cattn.scaled_dot_product_attention(x, x, x, out=cattn.AttentionOutput(x)), cattn.AttentionOutput)
assert_type(cattn.scaled_dot_product_attention(x, x, x, return_weights=flag), Any)
assert_type(cattn.causal_attention(x, x, x), Array)
assert_type(cattn.causal_attention(x, x, x, return_weights=True, return_lse=flag), cattn.AttentionOutput)
assert_type(cattn.causal_attention(x, x, x, return_lse=True), cattn.AttentionOutput)
assert_type(cattn.varlen_attention(x, x, x, edges, edges), Array)
assert_type(cattn.varlen_attention(x, x, x, edges, edges, return_lse=True), cattn.AttentionOutput)
assert_type(cattn.varlen_attention(x, x, x, edges, edges, return_lse=np.float64), cattn.AttentionOutput)
assert_type(cattn.scaled_dot_product_attention(x, x, x, return_lse=np.float64), cattn.AttentionOutput)
assert_type(cattn.varlen_attention_backward(x, x, x, x, x, x, edges, edges), cattn.AttentionGradients)
assert_type(cattn.attention_statistics(x, x), cattn.AttentionStatistics)
assert_type(cattn.varlen_attention_statistics(x, x, edges, edges), cattn.AttentionStatistics)
assert_type(cattn.show_mask(3), str)
assert_type(cattn.masked_softmax(x, axis=(0, 1)), Array)

for layer in (cattn.CausalAttention(3, 2, 4, 0.0), cattn.MultiHeadAttention(4, 4, 4, 0.0, 2)):
    assert_type(layer(x), Array)
    assert_type(layer(x, return_weights=True), tuple[Array, Array])
    assert_type(layer(x, cache=None, return_weights=flag), Array | tuple[Array, Array])
assert_type(cattn.SelfAttention_v2(3, 2)(x), Array)
assert_type(cattn.SelfAttention_v1(3, 2)(x, return_weights=True), tuple[Array, Array])

cattn.sliding_window(widow=3)  # type: ignore[call-arg]
cattn.CausalAttention(3, 2, 4, droput=0.0)  # type: ignore[call-arg]
cattn.causal_attention(x, x, x, is_causal=True)  # type: ignore[call-overload]
cattn.MultiHeadAttention(4, 4, 4, 0.0, 2)(x, need_weights=True)  # type: ignore[call-overload]
"""


def test_a_type_checker_sees_precise_results(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    # the project's settings, and its cache if there is one
    command = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml"), str(program)]
    done = run_command(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
