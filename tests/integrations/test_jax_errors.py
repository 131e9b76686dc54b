"""cattn inside JAX: errors that name the argument, and what the foreign functions accept from XLA."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")

import cattn  # noqa: E402
from cattn.integrations import _jax_derivatives  # noqa: E402
from cattn.integrations import jax as bridge  # noqa: E402
from support import paired  # noqa: E402

attention = bridge.dot_product_attention


def bits(x: Any) -> bytes:
    return np.ascontiguousarray(x).tobytes()


# ---- errors ----------------------------------------------------------------------------------------------------------
X = np.ones((2, 6, 4, 8), np.float32)
BYTES = X.astype(np.int8)
WRONG: dict[str, tuple[type[Exception], str, tuple[Any, ...], dict[str, Any]]] = {
    "object": (TypeError, "query must be an array, got str", ("x", X, X), {}),
    "dimensions": (ValueError, r"query must have shape \(B, T, N, H\) or \(T, N, H\), got \(8,\)", (X[0, 0, 0], X, X),
                   {}),
    "dtype": (TypeError, "query must be float16, .* got int32", (X.astype(np.int32), X, X), {}),
    "dtypes": (TypeError, "value must have the dtype of query, float32, got float16", (X, X, X.astype("f2")), {}),
    "batch": (ValueError, "key must have the batch size of query, 2, got 1", (X, X[:1], X), {}),
    "head_dim": (ValueError, "key must have the head_dim of query, 8, got 5", (X, X[..., :5], X), {}),
    "tokens": (ValueError, r"value must have the tokens and heads of key, \(6, 4\), got \(5, 4\)", (X, X, X[:, :5]),
               {}),
    "heads": (ValueError, "query must have a multiple of the 3 heads of key, got 4", (X, X[:, :, :3], X[:, :, :3]), {}),
    "bias": (ValueError, r"bias has shape \(5, 6\), which does not broadcast to \(B, N, T, S\) = \(2, 4, 6, 6\)",
             (X, X, X, np.ones((5, 6))), {}),
    "boolean bias": (TypeError, "bias must be numbers", (X, X, X, np.ones((6, 6), bool)), {}),
    "mask": (ValueError, r"mask has shape \(1, 2, 4, 6, 6\)", (X, X, X, None, np.ones((1, 2, 4, 6, 6), bool)), {}),
    "float mask": (TypeError, r"mask must be bool .* got float32: .* pass mask\.astype\(bool\)",
                   (X, X, X, None, np.ones((6, 6), np.float32)), {}),
    "scale": (ValueError, "scale", (X, X, X), {"scale": np.inf}),
    "scale of another type": (TypeError, "scale", (X, X, X), {"scale": "1"}),
    "softcap": (ValueError, "softcap must be positive", (X, X, X), {"softcap": -1.0}),
    "dropout_p": (ValueError, "dropout_p", (X, X, X), {"dropout_p": 1.5}),
    "no key": (ValueError, "dropout_p is 0.5: pass dropout_key", (X, X, X), {"dropout_p": 0.5}),
    "dropout_key": (TypeError, "dropout_key must be one key", (X, X, X), {"dropout_p": 0.5, "dropout_key": 3.5}),
    "is_causal": (ValueError, "is_causal must be False, True, .* got 'left'", (X, X, X), {"is_causal": "left"}),
    "return_residual": (TypeError, "return_residual must be True or False, got 1", (X, X, X), {"return_residual": 1}),
    "window": (ValueError, r"local_window_size must be .* got \(1, 2, 3\)", (X, X, X),
               {"local_window_size": (1, 2, 3)}),
    "negative window": (ValueError, "local_window_size must be .* got -1", (X, X, X), {"local_window_size": -1}),
    "window of another type": (ValueError, "local_window_size must be .* got 1.5", (X, X, X),
                               {"local_window_size": 1.5}),
    "lengths": (ValueError, r"query_seq_lengths must have shape \(B,\) = \(2,\) or \(\), got \(3,\)", (X, X, X),
                {"query_seq_lengths": np.ones(3, int)}),
    "starts": (ValueError, r"key_value_seq_starts must have shape \(B,\) = \(2,\) or \(\), got \(3,\)", (X, X, X),
               {"key_value_seq_starts": np.ones(3, int)}),
    "float lengths": (TypeError, "key_value_seq_lengths must be integers, got float32", (X, X, X),
                      {"key_value_seq_lengths": np.ones(2, np.float32)}),
    "offset": (ValueError, "query_offset", (X, X, X), {"is_causal": "lower_right", "query_offset": 1}),
    "sinks": (ValueError, r"sinks must have shape \(N,\) = \(4,\) or \(B, N\) = \(2, 4\), got \(3,\)", (X, X, X),
              {"sinks": np.ones(3)}),
    "boolean sinks": (TypeError, "sinks must be numbers, got bool", (X, X, X), {"sinks": np.ones(4, bool)}),
    "slopes": (ValueError, "alibi_slopes must have shape", (X, X, X), {"alibi_slopes": 0.5}),
    "integers without scale": (TypeError, "key must be float16, .* got int8; a cattn.Quantized has int8", (X, BYTES, X),
                               {}),
    "integer queries": (TypeError, "query must be .*, got int8; multiply", (BYTES, X, X), {}),
    "scale of floats": (TypeError, "value has dtype float32 and a scale; scales belong to int8", (X, X, (X, 1.0)),
                        {}),
    "shape of a scale": (
        ValueError, r"key\.scale has shape \(2, 6, 1\), which does not broadcast to the shape of key \(2, 6, 4, 8\)",
        (X, (BYTES, np.ones((2, 6, 1))), X), {}),
    "key_indices": (TypeError, "key_indices", (X, X, X), {"key_indices": np.zeros((6, 2), int)}),
    "three scales": (TypeError,
                     r"key must be an array, a cattn.Quantized or a pair \(values, scale\), got a tuple of 3",
                     (X, (BYTES, 1.0, 1.0), X), {}),
    "blocks of no size": (TypeError, r"block_mask must be a cattn.BlockMask or a pair \(blocks, size\), got list",
                          (X, X, X), {"block_mask": [[True]]}),
    "size of a block": (ValueError, r"size must be at least 1", (X, X, X), {"block_mask": ([[True]], 0)}),
    "shape of blocks": (ValueError, r"block_mask has shape \(3, 3\), .* size=3, \(2, 4, 2, 2\)", (X, X, X),
                        {"block_mask": (np.ones((3, 3), bool), 3)}),
    "float blocks": (TypeError,
                     r"block_mask must be bool .* got float32: for zeros and ones pass block_mask\.astype\(bool\)",
                     (X, X, X), {"block_mask": (np.ones((2, 2), np.float32), 3)}),
    "boolean scale": (TypeError, r"key\.scale must be numbers, got bool", (X, (BYTES, True), X), {}),
    "dtypes beside a scale": (TypeError, "value must have the dtype of query, float32, got float16",
                              (X, (BYTES, 1.0), X.astype("f2")), {}),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_errors_name_the_argument(name: str) -> None:
    kind, text, arguments, options = WRONG[name]
    with pytest.raises(kind, match=text):
        attention(*arguments, **options)


@pytest.mark.parametrize("name", ["scale", "softcap", "dropout_p", "is_causal", "return_residual", "local_window_size"])
def test_options_that_are_traced_are_errors(name: str) -> None:
    with pytest.raises((TypeError, ValueError), match=f"{name} must be .*traced"):
        jax.jit(lambda x: attention(X, X, X, **{name: x}))(1)


@pytest.mark.parametrize(
    ("name", "numbers", "wanted"),
    [
        ("alibi_slopes", [0.5, -0.5, 1, 1], "finite and not negative, got -0.5"),
        ("alibi_slopes", [0.5, np.nan, 1, 1], "finite and not negative, got .*nan"),
        ("sinks", [0.5, np.inf, 1, 1], "finite, or -inf for none, got inf"),
        ("value.scale", [0.5] * 7 + [0.0], r"positive and finite, from 2\*\*-100 to 2\*\*100, got 0\n"),
        ("value.scale", [0.5, np.nan] + [1.0] * 6, r"positive and finite, .* got .*nan"),
        ("value.scale", [2.0**101] * 8, r"positive and finite, .* got 2.5353e\+30"),
    ],
)
def test_numbers_of_heads_are_checked_when_they_are_known(name: str, numbers: list[float], wanted: str) -> None:

    def call(x: Any) -> Any:
        return attention(X, X, (BYTES, x)) if name == "value.scale" else attention(X, X, X, **{name: x})

    with pytest.raises(jax.errors.JaxRuntimeError, match=f"cattn: {name.replace('.', '_')} must be {wanted}"):
        jax.block_until_ready(jax.jit(call)(np.array(numbers, np.float32)))


def test_sinks_may_be_minus_infinity() -> None:
    assert bits(attention(X, X, X, sinks=np.full(4, -np.inf, np.float32))) == bits(attention(X, X, X))


# ---- the foreign functions themselves --------------------------------------------------------------------------------
def foreign(which: str, operands: dict[str, Any], results: dict[str, Any], **changes: Any) -> Any:
    """Call a target with attributes that may be wrong."""
    attributes: dict[str, Any] = {
        "scale": np.float64(1), "softcap": np.float64(0), "dropout_p": np.float64(0), "is_causal": np.int64(0),
        "window_size_left": np.int64(-1), "window_size_right": np.int64(-1), "block_size": np.int64(0),
        "present": np.int64(sum(_jax_derivatives.BIT[name] for name in (*operands, *results))),
    }  # fmt: skip
    attributes = {name: x for name, x in (attributes | changes).items() if x is not None}
    call = jax.ffi.ffi_call(f"cattn_attention_{which}", [jax.ShapeDtypeStruct(*x) for x in results.values()])
    return jax.block_until_ready(call(*operands.values(), **attributes))


def present(*names: str) -> np.int64:
    """Return the attribute of a call with query, key, value and these operands."""
    return np.int64(sum(_jax_derivatives.BIT[name] for name in ("query", "key", "value", *names)))


QKV = {"query": X, "key": X, "value": X}
ONE = np.ones((1, 1, 1, 1), np.float32)
BLOCKS = np.ones((1, 1, 3, 3), bool)
OUT = {"out": (X.shape, np.float32)}
SAVED = {**QKV, "forward_out": X, "forward_lse": np.zeros((2, 6, 4, 2), np.uint32), "grad_out": X}
GRADS = {f"grad_{name}": (X.shape, np.float32) for name in QKV}
RESULTS = {name: SAVED[name] for name in ("forward_out", "forward_lse")}
MOVED = {"out_tangent": (X.shape, np.float32), "lse_tangent": ((2, 6, 4), np.float32)}
FRAMES: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any], str]] = {
    "no scale": ("forward", QKV, OUT, {"scale": None}, "8 attributes expected, got 7"),
    "another attribute": ("forward", QKV, OUT, {"scale": None, "factor": np.float64(1)}, "attribute factor is unknown"),
    "float32 scale": ("forward", QKV, OUT, {"scale": np.float32(3)}, "attribute scale is unknown, or has another type"),
    "infinite scale": ("forward", QKV, OUT, {"scale": np.float64(np.inf)}, "scale must be finite, got inf"),
    "probability": ("forward", QKV, OUT, {"dropout_p": np.float64(2)}, r"dropout_p must be in \[0, 1\], got 2"),
    "corner": ("forward", QKV, OUT, {"is_causal": np.int64(3)}, "is_causal is 3"),
    "no seed": ("forward", QKV, OUT, {"dropout_p": np.float64(0.5)}, "there is no dropout_seed"),
    "no output": ("forward", QKV, {"residual": ((2, 6, 4), np.float32)}, {},
                  f"present is {present('residual'):#x}, which lacks operands or has too many"),
    "an operand of the other pass": ("forward", {**QKV, "grad_out": X}, OUT, {}, "lacks operands or has too many"),
    "fewer arguments": ("forward", QKV, OUT, {"present": present("bias", "out")}, "there is no buffer for bias"),
    "more arguments": ("forward", {**QKV, "bias": X}, OUT, {"present": present("out")},
                       "3 arguments expected, got 4"),
    "dimensions": ("forward", {**QKV, "key": X[0]}, OUT, {}, "key has 3 dimensions, wanted 4"),
    "integers": ("forward", {**QKV, "query": X.astype(np.int32)}, OUT, {}, "query has element type 4"),
    "another dtype": ("forward", {**QKV, "value": X.astype(np.float16)}, OUT, {}, "value has element type 10"),
    "another size": ("forward", {**QKV, "key": X[:1]}, OUT, {}, "key has size 1 on axis 0, wanted 2"),
    "heads": ("forward", {"query": X, "key": X[:, :, :3], "value": X[:, :, :3]}, OUT, {},
              "query has 4 heads, key has 3"),
    "output": ("forward", QKV, {"out": ((2, 6, 4, 7), np.float32)}, {}, "out has size 7 on axis 3, wanted 8"),
    "axes of the bias": ("forward", {**QKV, "bias": X[0, 0]}, OUT, {}, "bias has element type 11 and 2 dimensions"),
    "gradient without bias": ("backward", SAVED, {**GRADS, "grad_bias": ((2, 4, 6, 6), np.float32)}, {},
                              "grad_bias has the wrong shape"),
    "sum of the bias": (
        "backward", {**dict(list(SAVED.items())[:3]), "bias": np.ones((1, 1, 1, 6), np.float32),
                     **dict(list(SAVED.items())[3:])},
        {**GRADS, "grad_bias": ((1, 1, 1, 6), np.float32)}, {}, "grad_bias has the wrong shape"),
    "gradient of the residual": (
        "backward", {**SAVED, "grad_residual": np.ones((2, 6, 3), np.float32)}, GRADS, {},
        "grad_residual has size 3 on axis 2, wanted 4"),
    "another type of the residual": (
        "backward", {**SAVED, "grad_residual": np.ones((2, 6, 4), np.float16)}, GRADS, {},
        "grad_residual has element type 10"),
    "a residual of the forward pass": ("forward", {**QKV, "grad_residual": np.ones((2, 6, 4), np.float32)}, OUT, {},
                                       "lacks operands or has too many"),
    "int8 without a scale": ("forward", {**QKV, "key": BYTES}, OUT, {}, "key has element type 2 of XLA and no scale"),
    "a scale of floats": ("forward", {**QKV, "value_scale": ONE}, OUT, {},
                          "value has element type 11 of XLA and a scale"),
    "quantized beside halves": ("forward", {**QKV, "query": X.astype("f2"), "key": BYTES, "key_scale": ONE}, OUT, {},
                                "key is quantized, but query has element type 10"),
    "another type of the scale": ("forward", {**QKV, "key": BYTES, "key_scale": ONE.astype(np.float16)}, OUT, {},
                                  "key_scale has element type 10"),
    "another size of the scale": ("forward", {**QKV, "key": BYTES, "key_scale": X[:, :5]}, OUT, {},
                                  "key_scale has size 5 on axis 1, wanted 6"),
    "blocks of no size": ("forward", {**QKV, "block_mask": BLOCKS}, OUT, {}, "block_size is 0 with a block_mask"),
    "a size without blocks": ("forward", QKV, OUT, {"block_size": np.int64(3)}, "block_size is 3 without a block_mask"),
    "blocks of another size": ("forward", {**QKV, "block_mask": BLOCKS}, OUT, {"block_size": np.int64(3)},
                               "block_mask has size 3 on axis 2, wanted 2"),
    "blocks of another type": ("forward", {**QKV, "block_mask": ONE}, OUT, {"block_size": np.int64(3)},
                               "block_mask has element type 11"),
    "gradient without sinks": ("backward", SAVED, {**GRADS, "grad_sinks": ((2, 4), np.float32)}, {},
                               "there are no sinks for grad_sinks"),
    "tangent without bias": ("jvp", {**QKV, **RESULTS, "bias_tangent": np.ones((2, 4, 6, 6), np.float32)}, MOVED, {},
                             "there is no bias for its tangent"),
    "tangent without results": ("jvp", {**QKV, "query_tangent": X}, MOVED, {}, "lacks operands or has too many"),
    "tangent of another size": ("jvp", {**QKV, **RESULTS, "key_tangent": X[:, :5]}, MOVED, {},
                                "key_tangent has size 5 on axis 1, wanted 6"),
    "tangent of a quantized key": ("jvp", {**QKV, "key": BYTES, "key_scale": ONE, **RESULTS}, MOVED, {},
                                   "lacks operands or has too many"),
    "no tangent of the output": ("jvp_backward", {**SAVED, "query_tangent": X}, GRADS, {},
                                 "lacks operands or has too many"),
}  # fmt: skip


@pytest.mark.parametrize("name", FRAMES)
def test_wrong_frames_are_errors_and_not_memory_errors(name: str) -> None:
    which, operands, results, changes, text = FRAMES[name]
    attention(X, X, X)  # JAX has started its CPU
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"cattn: .*{text}"):
        foreign(which, operands, results, **changes)


def test_right_frames_are_none() -> None:
    (out,) = foreign("forward", QKV, OUT)
    assert bits(out) == bits(attention(X, X, X, scale=1.0))
    assert len(foreign("backward", SAVED, GRADS)) == 3
    (along, _) = foreign("jvp", {**QKV, **RESULTS, "query_tangent": X}, MOVED)
    assert along.shape == X.shape


def swapped(x: np.ndarray) -> np.ndarray:
    """Exchange tokens and heads, which JAX and cattn order differently."""
    return np.ascontiguousarray(x.swapaxes(1, 2))


@pytest.mark.parametrize(("queries", "keys"), [(6, 9), (9, 6)])
@pytest.mark.parametrize("lower_right", [0, 1])
def test_lengths_and_starts_may_be_any_number(queries: int, keys: int, lower_right: int) -> None:
    """The number of each operand is cut to its own axis: no two of them are in the same range."""
    numbers = np.array([-(2**31), -1, 0, 2, 5, 6, 7, 9, 10, 2**31 - 1], np.int32)
    rng = np.random.default_rng(queries)
    query, key, value = (rng.standard_normal((30, n, 2, d)).astype(np.float32) for n, d in
                         ((queries, 3), (keys, 3), (keys, 5)))  # fmt: skip
    given = {
        "query_offset": rng.integers(-9, 9, 30).astype(np.int32),
        "query_seq_lengths": np.tile(numbers, 3),
        "key_value_seq_lengths": np.repeat(numbers[[5, 9, 7]], 10),
        "key_value_seq_starts": np.tile(np.roll(numbers, 3), 3),
    }
    if lower_right:
        del given["query_offset"]
    results = {"out": ((30, queries, 2, 5), np.float32), "lse": ((30, queries, 2, 2), np.uint32)}
    operands = {"query": query, "key": key, "value": value, **given}
    out, lse = foreign("forward", operands, results, is_causal=np.int64(1 + lower_right))
    most = {"query_seq_lengths": queries, "key_value_seq_lengths": keys, "key_value_seq_starts": keys}
    within: dict[str, Any] = {name: np.clip(x, 0, most[name]) if name in most else x for name, x in given.items()}
    right = cattn.scaled_dot_product_attention(
        *map(swapped, (query, key, value)), is_causal="lower_right" if lower_right else "upper_left", scale=1.0,
        return_lse=np.float64, **within,
    )  # fmt: skip
    assert bits(out) == bits(swapped(right.out))
    assert bits(lse) == bits(swapped(right.lse))


# Operands with the leading axes of two vmaps: one maps an operand, or the other, or both, or none.
LEADING = {"query": (3, 2), "key": (1, 2), "value": (3, 1), "bias": (1, 1), "key_value_seq_lengths": (1, 2),
           "key_value_seq_starts": (3, 1), "alibi_slopes": (1, 2), "sinks": (3, 1), "block_mask": (1, 2),
           "key_scale": (1, 2), "value_scale": (3, 1), "dropout_seed": (3, 1), "forward_out": (3, 2),
           "forward_lse": (3, 2), "grad_out": (1, 2)}  # fmt: skip
AXES = {"query": (2, 7, 4, 3), "key": (2, 9, 2, 3), "value": (2, 9, 2, 5), "bias": (1, 4, 7, 9),
        "key_value_seq_lengths": (2,), "key_value_seq_starts": (1,), "alibi_slopes": (1, 4), "sinks": (2, 4),
        "block_mask": (2, 1, 3, 3), "key_scale": (2, 9, 1, 1), "value_scale": (1, 1, 2, 5), "dropout_seed": (2,),
        "forward_out": (2, 7, 4, 5), "forward_lse": (2, 7, 4, 2), "grad_out": (2, 7, 4, 5)}  # fmt: skip


def leading_operands(quantized: bool, p: float) -> dict[str, Any]:
    rng = np.random.default_rng(1)
    found: dict[str, Any] = {}
    for name, axes in AXES.items():
        shape = (*LEADING[name], *axes)
        x = rng.standard_normal(shape).astype(np.float32)
        if name.startswith("key_value"):
            x = rng.integers(0, 10, shape).astype(np.int32)
        elif name == "dropout_seed":
            x = rng.integers(0, 2**32, shape, np.uint32)
        elif name == "block_mask":
            x = x < 1
        elif name in ("alibi_slopes", "key_scale", "value_scale"):
            x = np.abs(x) + np.float32(0.1)
        elif quantized and name in ("key", "value"):
            x = (9 * x).astype(np.int8)
        if (quantized or not name.endswith("_scale")) and (p > 0 or name != "dropout_seed"):
            found[name] = x
    return found


def at_index(operands: dict[str, Any], index: tuple[int, int]) -> dict[str, Any]:
    """Return the part of the operands for one index of the leading axes, as cattn's functions for NumPy want it."""
    part = {name: x[tuple(i * (n > 1) for i, n in zip(index, x.shape[:2], strict=True))]
            for name, x in operands.items()}  # fmt: skip
    tokens = ("query", "key", "value", "key_scale", "value_scale", "grad_out")
    part |= {name: swapped(part[name]) for name in tokens if name in part}
    if "dropout_seed" in part:
        low, high = part.pop("dropout_seed").tolist()
        part["rng"] = low + high * 2**32
    return part


@pytest.mark.parametrize("quantized", [False, True], ids=["floats", "quantized"])
@pytest.mark.parametrize("p", [0.0, 0.4])
def test_leading_axes_are_loops(quantized: bool, p: float) -> None:
    """Forward and backward: each operand has leading axes of its own."""
    operands = leading_operands(quantized, p)
    forward_out, forward_lse = np.zeros((3, 2, 2, 7, 4, 5), np.float32), np.zeros((3, 2, 2, 7, 4, 2), np.uint32)
    right: list[tuple[tuple[int, int], Any]] = []
    for index in np.ndindex(3, 2):
        part = without_saved(at_index(operands, index)) | {"block_size": 3, "scale": 1.0, "dropout_p": p}
        grad_out = part.pop("grad_out")
        part = paired(part)
        result = cattn.scaled_dot_product_attention(**part, query_offset=0, return_lse=np.float64)
        grads = cattn.attention_backward(grad_out, out=result.out, lse=result.lse, query_offset=0, **part)
        right.append((index, grads))
        forward_out[index], forward_lse[index] = (
            swapped(result.out),
            swapped(result.lse).view(np.uint32).reshape(2, 7, 4, 2),
        )
    changes = {"block_size": np.int64(3), "dropout_p": np.float64(p)}
    inputs = {name: x for name, x in without_saved(operands).items() if name != "grad_out"}
    results = {"out": (forward_out.shape, np.float32), "lse": (forward_lse.shape, np.uint32)}
    out, lse = foreign("forward", inputs, results, **changes)
    assert bits(out) == bits(forward_out)
    assert bits(lse) == bits(forward_lse)
    saved = {"forward_out": forward_out, "forward_lse": forward_lse, "grad_out": operands["grad_out"]}
    fields = ("query", "key", "value", "bias", "sinks")
    results = {f"grad_{name}": ((3, 2, *AXES[name]), np.float32) for name in fields}
    found = foreign("backward", inputs | saved, results, **changes)
    for index, grads in right:
        for name, ours in zip(fields, found, strict=True):
            theirs = getattr(grads, name)
            assert bits(ours[index]) == bits(swapped(theirs) if name in QKV else theirs), (index, name)


def without_saved(operands: dict[str, Any]) -> dict[str, Any]:
    return {name: x for name, x in operands.items() if not name.startswith("forward")}


ANOTHER_XLA = """
import ctypes, warnings
import numpy as np
import jax
from cattn import _cattn
from cattn.integrations import jax as bridge

class Version(ctypes.Structure):
    _fields_ = [("size", ctypes.c_size_t), ("next", ctypes.c_void_p), ("major", ctypes.c_int), ("minor", ctypes.c_int)]
class Metadata(ctypes.Structure):
    _fields_ = [("size", ctypes.c_size_t), ("version", Version), ("traits", ctypes.c_uint32)]
class Extension(ctypes.Structure):
    _fields_ = [("size", ctypes.c_size_t), ("type", ctypes.c_int), ("next", ctypes.c_void_p),
                ("metadata", ctypes.POINTER(Metadata))]
class Api(ctypes.Structure):
    _fields_ = [("size", ctypes.c_size_t), ("next", ctypes.c_void_p), ("version", Version)]

metadata = Metadata(36, Version(24, None, -7, -7), 9)
extension = Extension(32, 1, None, ctypes.pointer(metadata))
api = Api(200, None, Version(24, None, {major}, 77))
frame = (ctypes.c_uint64 * 40)({size}, ctypes.addressof(extension), ctypes.addressof(api))
frame[5], frame[10], frame[15] = 40, {results}, 48
pointer = ctypes.pythonapi.PyCapsule_GetPointer
pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
handler = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(pointer(_cattn._xla_targets()["forward"], None))
assert not _cattn._xla_is_known()  # nobody has asked yet
assert handler(ctypes.addressof(frame)) is None
assert (metadata.version.major, metadata.version.minor, metadata.traits) == ({major}, 77, 0)  # XLA's own version
print(_cattn._xla_is_known())
x = np.ones((1, 5, 2, 4), np.float32)
try:
    assert np.array_equal(bridge.dot_product_attention(x, x, x), x)
    print("computed")
except RuntimeError as error:
    print(str(error).split(",")[0])
"""


@pytest.mark.parametrize(("size", "results", "major"), [(168, 40, 0), (176, 40, 0), (168, 48, 0), (168, 40, 1)])
def test_another_layout_of_the_frame_is_an_error(size: int, results: int, major: int) -> None:
    """XLA gets no version that it could refuse: then JAX would have no CPU."""
    known = (size, results, major) == (168, 40, 0)
    code = ANOTHER_XLA.format(size=size, results=results, major=major)
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    answer = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    lines = answer.stdout.splitlines()
    assert lines[0] == str(known)
    error = f"cattn does not know the foreign functions of jaxlib {jax.lib.__version__}"
    assert lines[1] == ("computed" if known else error)


def test_the_import_does_not_start_jax_and_shards_are_attention_of_their_own() -> None:
    """JAX can still be configured after the import. With two devices, shard_map divides the batch."""
    code = """
import jax
import jax.numpy as jnp
from cattn.integrations.jax import dot_product_attention
jax.config.update("jax_num_cpu_devices", 2)
assert len(jax.devices()) == 2
mesh = jax.make_mesh((2,), ("devices",), axis_types=(jax.sharding.AxisType.Auto,))
spec = jax.sharding.PartitionSpec("devices")
shards = jax.shard_map(dot_product_attention, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
x = jax.random.normal(jax.random.key(0), (4, 20, 2, 8))
assert (shards(x, x, x) == dot_product_attention(x, x, x)).all()
grads = [jax.grad(lambda x: jnp.sin(f(x, x, x)).sum())(x) for f in (shards, dot_product_attention)]
assert jnp.allclose(*grads, atol=1e-6)
"""
    subprocess.run([sys.executable, "-c", code], env={**os.environ, "JAX_PLATFORMS": "cpu"}, check=True)


def test_traced_arrays_in_numpys_function_are_sent_to_the_integration() -> None:
    x = jax.numpy.ones((3, 4))
    says = "query is traced by JAX, in jit, grad or vmap.*: use cattn.integrations.jax.dot_product_attention"
    for traced in (jax.jit(cattn.causal_attention), jax.vmap(cattn.causal_attention)):
        with pytest.raises(TypeError, match=says):
            traced(x[None], x[None], x[None])
