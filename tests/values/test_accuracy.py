"""The errors of the kernels' exp, tanh and log, and attention's errors relative to its peers'."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cattn
from cattn import _cattn, functional, reference
from support import (
    ACCURACY_DTYPES,
    HALVES,
    INF,
    NAN,
    assert_same_bits,
    benchmarks_importable,
    every_way,
    forced,
    in_contract,
    table,
)

with benchmarks_importable():
    from benchmarks import accuracy
    from benchmarks import accuracy_cases as cases
    from benchmarks import contestants as peers
    from benchmarks.accuracy import BOUNDS


def allowance(isa: str) -> float:
    """By how much the bounds grow for a table outside of the bit contract."""
    return 1 if in_contract(isa) else BOUNDS["without fused multiply-add"][0]


# ---- functions -----------------------------------------------------------------------------------------------------
def every_exponent(dtype: type, last: float, each: int) -> np.ndarray:
    """`each` numbers of every exponent from the subnormals up to `last`, among them the powers of 2."""
    info = np.finfo(dtype)
    rng = np.random.default_rng(0)
    exponents = np.arange(info.minexp - info.nmant, int(np.frexp(last)[1]))
    mantissas = np.concatenate([np.ones((exponents.size, 1)), rng.uniform(1, 2, (exponents.size, each - 1))], axis=1)
    x = np.ldexp(mantissas, exponents[:, None]).astype(dtype).ravel()
    # As many numbers again at even distances: the argument reduction switches at every multiple of ln 2.
    return np.concatenate([x[x <= last], rng.uniform(0, last, x.size).astype(dtype)])


def ulps(ours: Callable[[Any], Any], right: Callable[[Any], Any], x: np.ndarray) -> np.ndarray:
    exact = right(x.astype(cases.WIDE))
    return (np.abs(ours(x) - exact) / cases.spacing(exact, x.dtype)).astype(np.float64)


@pytest.mark.promise("accuracy")
@pytest.mark.parametrize("kind", ACCURACY_DTYPES)
def test_exp(isa: str, kind: type) -> None:
    """Wherever the result is a normal number."""
    x = -every_exponent(kind, -cases.LOWEST[np.dtype(kind).name], 100 if kind == np.float32 else 20)
    error = ulps(cases.exp, np.exp, x)
    assert 0.5 < error.max() < BOUNDS["exp"][0] * allowance(isa)
    assert (cases.exp(np.zeros(3, kind)) == 1).all()


@pytest.mark.promise("accuracy")
@pytest.mark.parametrize("kind", ACCURACY_DTYPES)
def test_exp_is_the_same_function_everywhere(isa: str, kind: type) -> None:
    """The softmax of (0, x) is exp(x) itself if x is far below 0, because the sum of the exponentials is 1."""
    info = np.finfo(kind)
    x = np.random.default_rng(0).uniform(np.log(info.tiny), np.log(info.eps) - 2, 300).astype(kind)
    scores = np.stack([np.zeros_like(x), x], -1)
    expected = np.stack([np.ones_like(x), cases.exp(x)], -1)
    np.testing.assert_array_equal(cattn.softmax(scores), expected)
    np.testing.assert_array_equal(cattn.masked_softmax(scores, np.ones(2, bool)), expected)
    value = np.broadcast_to(np.array([[0], [1]], kind), (*scores.shape, 1))
    for queries in (1, 40):  # the row path and the tile path
        result = cattn.scaled_dot_product_attention(
            np.ones((x.size, queries, 1), kind), scores[..., None], value, scale=1.0, return_weights=True
        )
        assert result.weights is not None
        for row in range(queries):
            np.testing.assert_array_equal(result.weights[:, row], expected)
            np.testing.assert_array_equal(result.out[:, row, 0], expected[:, 1])


@pytest.mark.promise("accuracy")
@pytest.mark.parametrize("kind", ACCURACY_DTYPES)
def test_exp_is_zero_exactly_where_it_would_be_subnormal(isa: str, kind: type) -> None:
    tiny = np.finfo(kind).tiny
    bits = np.log(tiny).view(f"u{tiny.nbytes}")
    x = (bits + np.arange(-8, 9).astype(bits.dtype)).view(kind)  # neighbours
    normal = np.exp(x.astype(cases.WIDE)) >= tiny
    assert 5 < normal.sum() < 12
    got = cases.exp(x)
    assert (got[normal] >= tiny).all()
    assert (got[~normal] == 0).all()


@pytest.mark.promise("accuracy")
@pytest.mark.parametrize("kind", ACCURACY_DTYPES)
def test_tanh_of_softcap(isa: str, kind: type) -> None:
    x = every_exponent(kind, 30, 100 if kind == np.float32 else 20)
    error = ulps(cases.tanh, np.tanh, x)
    assert 0.5 < error.max() <= BOUNDS["tanh"][0]
    assert error[np.tanh(x) > 0.5].max() <= BOUNDS["tanh above 0.5"][0]
    assert (cases.tanh(-x) == -cases.tanh(x)).all()
    ends = cases.tanh(np.array([0, 1e30, np.inf, -np.inf, np.nan], kind))
    np.testing.assert_array_equal(ends, np.array([0, 1, 1, -1, np.nan], kind))


@pytest.mark.promise("accuracy")
@pytest.mark.parametrize("kind", ACCURACY_DTYPES)
def test_log_of_log_sum_exp(isa: str, kind: type) -> None:
    counts = np.concatenate([np.arange(1, 100), np.random.default_rng(0).integers(100, 3000, 100)])
    error = ulps(cases.log, np.log, counts.astype(kind))
    assert 0.4 < error.max() < BOUNDS["log"][0]


def test_some_of_every_float32() -> None:
    """A sample of the numbers that `python -m benchmarks.accuracy --exhaustive` takes."""
    worst = accuracy.every_float32(first=11, step=40_009)
    assert 0.7 < worst["exp"] < BOUNDS["exp"][0]
    assert 1.5 < worst["tanh"] <= BOUNDS["tanh"][0]


# ---- attention and its gradients -----------------------------------------------------------------------------------
# Inputs, and what PyTorch does with them: its fused function, or tensor operations that keep the matrix of weights. If
# all scores are equal, all weights of the gradients have the same error, which is luck.
INPUTS = {
    "normal": "fused",
    "normal, causal": "fused",
    "scores within ±88": "fused",
    "one huge score": "fused",
    "all scores equal": "luck",
    "bias": "matrix",
    "softcap 5": "matrix",
}
GRADIENTS = ("dQ", "dK", "dV", "dbias")
# Compared with PyTorch alone: NumPy adds the products of few queries in many short chains.
SHAPES = {
    "one query, 300 keys": cases.Inputs(1, 300, heads=12),
    "one query, 1500 keys": cases.Inputs(1, 1500, heads=12),
    "few queries": cases.Inputs(50, 700, heads=4, head_dim=80),
    "tiny": cases.Inputs(6, 6, heads=8, head_dim=3),
    "short": cases.Inputs(33, 33, heads=8, head_dim=16),
    "small heads, causal": cases.Inputs(head_dim=16, options={"causal": True}),
    "large heads": cases.Inputs(head_dim=128),
    "d_v smaller": cases.Inputs(150, 150, d_v=24),
    "d_v larger, causal": cases.Inputs(150, 150, head_dim=24, d_v=64, options={"causal": True}),
    "long": cases.Inputs(1500, 1500, heads=1),
}
# Tables of the bit contract have the same bits: one of them, and each of the others.
TABLES = [_cattn._get_isa()]
TABLES += [row["name"] for row in cattn.show_config("dicts")["tables"] if row["usable"] and not row["bit_contract"]]


def errors_of(inputs: cases.Inputs, kind: type, calls: dict[str, Any], seeds: int) -> dict[str, Any]:
    """Errors over all seeds, by quantity, contestant and unit."""
    draw = functools.partial(inputs.draw, kind)
    case = cases.Case("attention", "", kind, draw, calls, cases.attention, inputs.options)
    return {row["quantity"]: row["errors"] for row in case.run(seeds)}


def check_ratios(errors: dict[str, Any], peer: str, bound: str, isa: str, what: str) -> None:
    ours = errors["cattn"]
    assert ours["lost"] == 0
    assert ours["rms"] > 0, "no result is exact"
    for unit, most in zip(("rms", "largest"), BOUNDS[bound], strict=True):
        ratio = ours[unit] / errors[peer][unit]
        assert ratio <= most * allowance(isa), f"{what}: {unit} error {ratio:.3f} times the error of {peer}"


@pytest.mark.promise("accuracy")
@pytest.mark.parametrize("name", ["normal", *(pytest.param(name, marks=pytest.mark.long) for name in list(INPUTS)[1:])])
@pytest.mark.parametrize(
    ("kind", "double_lse"), [(kind, True) for kind in ACCURACY_DTYPES] + [(np.float32, False)], ids=str
)
def test_errors_are_those_of_the_peers(name: str, kind: type, double_lse: bool) -> None:
    pytest.importorskip("torch")
    by_cattn = functools.partial(cases.by_cattn, double_lse=double_lse)
    calls = {"cattn": by_cattn, "torch": cases.by_torch, "numpy": cases.attention}
    has_digits = double_lse and kind == np.float32 and name != "one huge score"
    for quantity, errors in errors_of(cases.inputs(kind)[name], kind, calls, 8 if kind == np.float32 else 2).items():
        if quantity in GRADIENTS and INPUTS[name] == "luck":
            continue
        for peer in ("torch", "numpy"):
            matrix = quantity in GRADIENTS and (peer == "numpy" or INPUTS[name] == "matrix")
            bound = "other gradients" if matrix and not has_digits else "attention"
            check_ratios(errors, peer, bound, _cattn._get_isa(), quantity)


@pytest.mark.promise("accuracy")
@pytest.mark.parametrize("isa", TABLES)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long] * (not name.startswith("one query"))) for name in SHAPES]
)
def test_errors_of_other_shapes_are_those_of_pytorch(name: str, isa: str) -> None:
    pytest.importorskip("torch")
    with table(isa):
        found = errors_of(SHAPES[name], np.float32, {"cattn": cases.by_cattn, "torch": cases.by_torch}, 8)
    for quantity, errors in found.items():
        check_ratios(errors, "torch", "attention", isa, quantity)


def test_the_comparison_is_sensitive() -> None:
    """Rounding the keys, or the log-sum-exp of the gradients, to 21 bits fails the comparison."""

    def rough(a: np.ndarray) -> np.ndarray:
        return (a.view(np.uint32) + np.uint32(4) & np.uint32(0xFFFFFFF8)).view(np.float32)

    def rough_keys(query: Any, key: Any, value: Any, grad_out: Any) -> dict[str, Any]:
        return cases.by_cattn(query, rough(key), value, grad_out)

    def rough_lse(query: Any, key: Any, value: Any, grad_out: Any) -> dict[str, Any]:
        result = cattn.scaled_dot_product_attention(query, key, value, return_lse=True)
        grads = cattn.attention_backward(grad_out, query, key, value, result.out, rough(result.lse))
        return {"dQ": grads.query, "dK": grads.key, "dV": grads.value}

    for call in (rough_keys, rough_lse):
        calls = {"cattn": cases.by_cattn, "rough": call}
        for quantity, errors in errors_of(cases.Inputs(), np.float32, calls, 2).items():
            if "rough" in errors and quantity != "lse":  # the error of the keys is small beside lse's own rounding
                most = BOUNDS["attention"][0]
                assert errors["rough"]["rms"] > most * errors["cattn"]["rms"], f"{quantity}, {call.__name__}"


def test_the_oracle_agrees_with_mpmath() -> None:
    pytest.importorskip("mpmath")
    if np.finfo(cases.WIDE).nmant == 52:
        pytest.skip("long double is double")
    found = cases.check()
    assert found.keys() == {"exp", "tanh", "log"}
    assert 0 < max(found.values()) < 0.01


# ---- the report ----------------------------------------------------------------------------------------------------
def test_the_kept_errors_become_the_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that are measured again replace the kept ones."""
    monkeypatch.setattr(peers, "jax_or_none", lambda: None)  # it compiles every call
    for only in ("attention float32 6 tokens", "functions float32 1 to 3000", "attention float32 6 tokens"):
        assert accuracy.main(["--only", only, "-o", str(tmp_path)]) == 0
    text = accuracy.markdown(tmp_path)
    assert re.findall(r"^\|[^|]*\| (\w+) \|", text, re.MULTILINE) == ["log", "out", "weights", "lse", "dQ", "dK", "dV"]
    assert "| 6 tokens, head_dim 8 | out |" in text


def test_rows_of_the_table() -> None:
    def errors(rms: float, largest: float, lost: int = 0) -> dict[str, float]:
        return {"rms": rms, "largest": largest, "lost": lost}

    def row(ours: dict[str, float], **peers: dict[str, float]) -> dict[str, Any]:
        head = {"group": "attention", "name": "some", "dtype": "float32", "quantity": "out"}
        return head | {"errors": {"cattn": ours} | peers}

    lost = errors(0.5, 1.0, lost=3)
    text = accuracy.table([row(errors(1.2, 5.0), torch=errors(1.0, 5.0), numpy=lost)])[-1]
    assert text == "| some | out | 1.20 / 5.00 | 1.00 / 5.00 | – | not finite | **1.20 / 1.00** |"
    assert not accuracy.beyond(row(errors(1.1, 2.0), torch=errors(1.0, 1.0)))
    assert accuracy.beyond(row(errors(1.0, 2.1), torch=errors(1.0, 1.0)))
    assert accuracy.beyond(row(lost, torch=errors(1.0, 1.0))), "NaN and inf are beyond any error"


def test_errors_of_known_numbers() -> None:
    """Half a unit, a unit of the subnormals, a NaN; an element that is 0 in both does not count."""
    exact = np.array([1 + 2.0**-24, 3 * 2.0**-150, 5, 0])
    errors = cases.Errors(np.float32).add(np.array([1, 2.0**-149, np.nan, 0], np.float32), exact)
    assert (errors.count, errors.lost, errors.ulp_largest, errors.ulp_squares) == (2, 1, 0.5, 0.5)


# ---- arrays of two dtypes ------------------------------------------------------------------------------------------
def _of_attention(module: Any, *call: Any, grad: Any = None) -> Any:
    """Return the output, or the gradients for the gradient of the output in the dtype of the output."""
    result = module.scaled_dot_product_attention(*call, return_lse=True)
    if grad is None:
        return result.out
    return module.attention_backward(grad.astype(result.out.dtype), *call, result.out, result.lse)[:3]


CONV = ("grad_out", "x", "weight", "bias", "state", "grad_state")


def _of_convolution(module: Any, given: dict[str, Any]) -> Any:
    shaped = {"weight": given["weight"][:3].T, "bias": given["bias"][0]}
    return module.causal_conv_backward(**given | shaped | {name: given[name][:2] for name in ("state", "grad_state")})


MIXED: dict[str, Callable[..., Any]] = {
    "linear": lambda m, a, b: m.linear(a, b),
    "linear, bias": lambda m, a, b: m.linear(a, a, b[0, :5]),
    "linear_backward, grad": lambda m, a, b: m.linear_backward(b[:, :5], a, a),
    "linear_backward, x": lambda m, a, b: m.linear_backward(a[:, :5], b, a),
    "linear_backward, weight": lambda m, a, b: m.linear_backward(a[:, :5], a, b),
    "rms_norm": lambda m, a, b: m.rms_norm(a, b[0]),
    "rms_norm_backward, grad": lambda m, a, b: m.rms_norm_backward(b, a, a[0]),
    "rms_norm_backward, x": lambda m, a, b: m.rms_norm_backward(a, b, a[0]),
    "rms_norm_backward, weight": lambda m, a, b: m.rms_norm_backward(a, a, b[0]),
    "layer_norm": lambda m, a, b: m.layer_norm(a, b[0], a[1]),
    "layer_norm, bias": lambda m, a, b: m.layer_norm(a, a[0], b[1]),
    "layer_norm_backward, grad": lambda m, a, b: m.layer_norm_backward(b, a, a[0]),
    "layer_norm_backward, weight": lambda m, a, b: m.layer_norm_backward(a, a, b[0]),
    "layer_norm_backward, x": lambda m, a, b: m.layer_norm_backward(a, b, a[0]),
    "layer_norm_backward, no weight": lambda m, a, b: (*m.layer_norm_backward(a, b)[::2],),
    "causal_conv": lambda m, a, b: m.causal_conv(a, b[:3].T),
    "causal_conv, state": lambda m, a, b: (*m.causal_conv(a, a[:3].T, state=b[:2], return_state=True),),
    **{
        f"causal_conv_backward, {name}": lambda m, a, b, name=name: _of_convolution(
            m, dict.fromkeys(CONV, a) | {name: b}
        )
        for name in CONV
    },
    "linear_attention, query": lambda m, a, b: m.linear_attention(b, a, a, scale=1),
    "linear_attention, value": lambda m, a, b: m.linear_attention(a, a, b, scale=1),
    "linear_attention_backward, grad": lambda m, a, b: m.linear_attention_backward(b, a, a, a, scale=1)[:3],
    "linear_attention_backward, key": lambda m, a, b: m.linear_attention_backward(a, a, b, a, scale=1)[:3],
    "gelu_backward": lambda m, a, b: m.gelu_backward(a, b),
    "silu_backward": lambda m, a, b: m.silu_backward(a, b),
    "softmax_backward": lambda m, a, b: m.softmax_backward(a, abs(b) / 2048),
    "query": lambda m, a, b: _of_attention(m, a / 256, b / 256, b),
    "key": lambda m, a, b: _of_attention(m, b / 256, a / 256, b),
    "value": lambda m, a, b: _of_attention(m, b / 256, b / 256, a),
    "gradients, query": lambda m, a, b: _of_attention(m, a / 256, b / 256, b / 256, grad=b / 256),
    "gradients, value": lambda m, a, b: _of_attention(m, b / 256, b / 256, a / 256, grad=b / 256),
}


@pytest.mark.parametrize("name", MIXED)
def test_arrays_of_two_dtypes_are_computed_as_in_float64_and_rounded_once(name: str, rng: np.random.Generator) -> None:
    """Products and sums of halves of this size are beyond the range of float16; a wider result holds them."""
    function = MIXED[name]
    for first, second in itertools.permutations((*HALVES, np.dtype("f4"), np.dtype("f8")), 2):
        a, b = (rng.uniform(100, 300, (5, 24)) * rng.choice([-1, 1], (5, 24)) for _ in range(2))
        a, b = a.astype(first), b.astype(second)
        if first.itemsize == second.itemsize:
            with pytest.raises(TypeError, match="mix float16 and bfloat16"):
                function(functional, a, b)
            continue
        found, exact = function(functional, a, b), function(reference, a.astype("f8"), b.astype("f8"))
        for own, right in zip(*(x if isinstance(x, tuple) else (x,) for x in (found, exact)), strict=True):
            assert own.dtype == max(first, second, key=lambda dtype: dtype.itemsize)
            tolerance = np.abs(right).max() * (2.0**-46 if own.dtype == "f8" else 2.0**-18)
            np.testing.assert_allclose(own.astype("f8"), right, rtol=0, atol=tolerance, err_msg=f"{first}, {second}")


def test_gradients_of_a_projection_of_halves_beyond_their_range() -> None:
    x, weight = np.full((64, 3), 300, np.float16), np.ones((2, 3), np.float32)
    for half in HALVES:
        grads = functional.linear_backward(np.full((64, 2), 300, half), x.astype(half), weight)
        np.testing.assert_array_equal(grads[1], np.full((2, 3), 64 * 300.0**2, np.float32))
        exact = functional.linear_backward(np.full((64, 2), 300, half), x.astype(half), weight.astype(np.float64))
        assert [grad.dtype for grad in exact] == [np.float64] * 3


# ---- large values ----------------------------------------------------------------------------------------------------
Call = dict[str, Any]
Normal = Callable[..., np.ndarray]
SMALLER = 2.0**-40  # of values: then no sum overflows, and none of their digits is lost


def large(rng: np.random.Generator, kind: str, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Return values near the largest number: all the same, of both signs, or beside ordinary ones."""
    top = np.float64(ml_dtypes.finfo(dtype).max)
    factor = {
        "the largest": np.ones(shape),
        "both signs": rng.choice([-1.0, 1.0], shape),
        "some": np.where(rng.random(shape) < 0.3, rng.uniform(0.5, 1, shape), 1e-30),
    }[kind]
    return (factor * top).astype(dtype)


def without_overflow(call: Call, name: str = "value") -> np.ndarray:
    """Return the output of the same call on smaller values, times what they are smaller, at most the largest number."""
    right = call[name]
    if isinstance(right, cattn.Quantized):
        smaller: Any = cattn.Quantized(right.values, right.scale * SMALLER)
    else:
        smaller = (right * SMALLER).astype(right.dtype)
    out = cattn.scaled_dot_product_attention(**call | {name: smaller})
    computed = out.astype(np.float32 if out.dtype in HALVES else out.dtype)
    with np.errstate(over="ignore"):
        computed /= SMALLER
    if not call.get("dropout_p"):
        top = float(ml_dtypes.finfo(out.dtype).max)
        np.clip(computed, -top, top, out=computed)
    return computed.astype(out.dtype)


OPTIONS: dict[str, Callable[[np.random.Generator, int, int], Call]] = {
    "plain": lambda _rng, _T_q, _T_k: {},
    "causal, sink": lambda _rng, _T_q, _T_k: {"is_causal": "lower_right", "sinks": np.array([0.5])},
    "masks": lambda rng, T_q, T_k: {"attn_mask": rng.random((T_q, T_k)) < 0.8, "softcap": 5.0},
    "blocks": lambda rng, T_q, T_k: {
        "block_mask": cattn.BlockMask(rng.random((-(-T_q // 20), -(-T_k // 20))) < 0.7, 20), "is_causal": "lower_right",
    },
    "dropout": lambda _rng, _T_q, _T_k: {"dropout_p": 0.25, "rng": 3, "alibi_slopes": np.array([1e-3])},
}  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize(("T_q", "T_k"), [(1, 2), (7, 190), (101, 200), (5, 3300)])
def test_sums_that_overflow_are_computed_again(
    isa: str, dtype: type, T_q: int, T_k: int, options: str, rng: np.random.Generator
) -> None:
    """Every path gives the bits of the call that does not overflow; weights and log-sum-exp do not change at all."""
    kinds = ("the largest", "both signs", "some")
    query, key = (rng.standard_normal((T, 16)).astype(dtype) for T in (T_q, T_k))
    value = np.concatenate([large(rng, kind, (T_k, 3), dtype) for kind in kinds], axis=-1)
    call = {"query": query, "key": key, "value": value} | OPTIONS[options](rng, T_q, T_k)
    expected = without_overflow(call)
    extras = {"return_weights": True, "return_lse": True}
    small = cattn.scaled_dot_product_attention(**call | {"value": key}, **extras)
    for way, result in every_way(functools.partial(cattn.scaled_dot_product_attention, **call, **extras), tiny=False):
        assert_same_bits(result.out, expected, way)
        assert_same_bits(result.weights, small.weights, way)
        assert_same_bits(result.lse, small.lse, way)
    if options != "dropout":
        assert np.isfinite(expected).all()


@pytest.mark.parametrize("storage", ["float16", "bfloat16", "strided"])
def test_large_values_of_halves_and_other_strides(isa: str, storage: str, rng: np.random.Generator) -> None:
    dtype = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "strided": np.float32}[storage]
    key, value = rng.standard_normal((2, 250, 8)).astype(dtype), large(rng, "both signs", (2, 250, 5), dtype)
    if storage == "strided":
        value = np.repeat(value, 2, axis=-1)[..., ::2]
    for T_q in (3, 20):
        call: Call = {"query": rng.standard_normal((2, T_q, 8)).astype(dtype), "key": key, "value": value}
        right = (
            cattn.scaled_dot_product_attention(**call)
            if storage == "float16"  # float32 has room for sums of float16
            else without_overflow(call)
        )
        assert np.isfinite(right.astype(np.float64)).all()
        for way, out in every_way(functools.partial(cattn.scaled_dot_product_attention, **call), tiny=False):
            assert_same_bits(out, right, way)


@pytest.mark.parametrize(("dtype", "T_k"), [(np.int8, 2_300_000), (ml_dtypes.float8_e4m3fn, 700_000)])
def test_large_values_of_quantized_keys(isa: str, dtype: Any, T_k: int) -> None:
    """The largest scale leaves room for so many keys; here are more."""
    one = np.full((1, 1), float(ml_dtypes.finfo(dtype).max) if dtype is not np.int8 else 127).astype(dtype)
    value = np.broadcast_to(one, (T_k, 1))
    call: Call = {"query": np.zeros((1, 1), np.float32), "key": np.zeros((T_k, 1), np.float32), "value": value}
    call["value"] = cattn.Quantized(value, 2.0**100)
    right = without_overflow(call)
    np.testing.assert_allclose(right, float(one[0, 0]) * 2.0**100, rtol=1e-4)
    for path in ("split", "rows"):
        with forced(path):
            assert_same_bits(cattn.scaled_dot_product_attention(**call), right, path)


def test_large_values_of_packed_sequences_and_grouped_heads(isa: str, dtype: type, rng: np.random.Generator) -> None:
    query, key = rng.standard_normal((150, 4, 8)).astype(dtype), rng.standard_normal((150, 2, 8)).astype(dtype)
    value, edges = large(rng, "both signs", (150, 2, 5), dtype), np.array([0, 20, 20, 150])
    out = cattn.varlen_attention(query, key, value, edges, edges)
    smaller = cattn.varlen_attention(query, key, value * dtype(SMALLER), edges, edges)
    assert_same_bits(out, np.clip(smaller / dtype(SMALLER), np.finfo(dtype).min, np.finfo(dtype).max))


def test_a_stream_of_dropout_draws_once(dtype: type, rng: np.random.Generator) -> None:
    """The second attempt uses the bits that the first one drew, and the generator advances as without it."""
    query, key = (rng.standard_normal((2, 3, T, 8)).astype(dtype) for T in (120, 300))
    value, generators = large(rng, "both signs", (2, 3, 300, 4), dtype), [cattn.TorchGenerator(5) for _ in range(2)]
    call: Call = {"query": query, "key": key, "value": value, "dropout_p": 0.5}
    out = cattn.scaled_dot_product_attention(**call, rng=generators[0])
    assert_same_bits(out, without_overflow(call | {"rng": generators[1]}))
    np.testing.assert_array_equal(generators[0].get_state(), generators[1].get_state())


# The values of a column, first key to last, beside keys of the largest value; and the output. The weight of the key
# before the last is hardly a normal number, the weight of the last is 0.
INFINITE: dict[str, tuple[dict[int, float], float]] = {
    "inf": ({3: INF}, INF),
    "-inf beside sums that overflow": ({250: -INF}, -INF),
    "both": ({3: INF, 250: -INF}, NAN),
    "NaN": ({100: NAN}, NAN),
    "inf of little weight": ({298: INF}, INF),
    "-inf of little weight": ({298: -INF}, -INF),
    "inf of weight 0": ({299: INF}, NAN),
    "hidden inf": ({7: INF}, 1),
    "hidden NaN": ({7: NAN}, 1),
}


def test_infinite_values_among_the_largest(isa: str, dtype: type) -> None:
    """IEEE arithmetic in the rows that see them, and nothing where they are hidden; other columns do not matter."""
    T_k, top = 300, np.finfo(dtype).max
    value = np.full((T_k, len(INFINITE) + 1), top, dtype)
    for column, (numbers, _) in enumerate(INFINITE.values()):
        for row, number in numbers.items():
            value[row, column] = number
    bias = np.zeros(T_k, dtype)
    bias[[298, 299]] = {np.float32: -76, np.float64: -705}[dtype], -1e6
    mask = np.arange(T_k) != 7
    expected = np.array([number if number != 1 else top for _, number in INFINITE.values()] + [top], dtype)
    for T_q in (2, 100):
        call: Call = {"query": np.zeros((T_q, 4), dtype), "key": np.zeros((T_k, 4), dtype), "value": value}
        call |= {"attn_mask": mask, "bias": bias}
        right = cattn.reference.scaled_dot_product_attention(**call)
        np.testing.assert_allclose(right, np.broadcast_to(expected, right.shape), rtol=1e-6)
        for way, out in every_way(functools.partial(cattn.scaled_dot_product_attention, **call), tiny=False):
            np.testing.assert_allclose(out, right, rtol=1e-5, err_msg=way)


def test_other_elements_keep_their_bits(isa: str, dtype: type, rng: np.random.Generator) -> None:
    """A second attempt for some rows and columns of a block changes no bit of the others, not even of small numbers."""
    query, key, value = (rng.standard_normal((130, 16)).astype(dtype) for _ in range(3))
    value *= np.finfo(dtype).tiny * 1e5
    clean = cattn.causal_attention(query, key, value)
    value[100:, 5] = np.finfo(dtype).max
    out = cattn.causal_attention(query, key, value)
    assert np.isfinite(out).all()
    assert (out[101:, 5] > np.finfo(dtype).max * 1e-3).any()
    assert_same_bits(np.delete(out, 5, axis=1), np.delete(clean, 5, axis=1))
    assert_same_bits(out[:100], clean[:100])


@pytest.mark.parametrize("kind", [np.float32, np.float64, ml_dtypes.bfloat16])
def test_merged_outputs_near_the_largest_number(kind: Any) -> None:
    top, lse_kind = ml_dtypes.finfo(kind).max, np.float64 if kind is np.float64 else np.float32
    columns = np.array([[1, 1, -1, 0.5, INF, 1, 1], [1, -1, -1, 1, 1, -INF, NAN], [1, 1, -1, 0, 1, 1, 1]]) * float(top)
    outs, lses = list(columns.astype(kind)[:, None]), np.array([[2.0], [2.0], [-3.0]], lse_kind)
    out, lse = cattn.merge_attention(outs, lses)
    weights = np.exp(lses.astype(np.float64) - lse)[:, 0]
    with np.errstate(invalid="ignore"):
        expected = [[top, 0, -top, 0.75 * float(top) * weights[:2].sum(), INF, -INF, NAN]]
    expected[0][1] = float(top) * weights[2]
    assert out.dtype == kind
    np.testing.assert_allclose(
        out.astype(np.float64), np.array(expected, np.float64), rtol=ml_dtypes.finfo(kind).eps * 8
    )


def test_zeros_of_scores_keep_their_sign(isa: str, dtype: type, rng: np.random.Generator) -> None:
    """softcap of 0 is 0, and of -0 is -0; masks that only hide do not change the sign of a visible score either."""
    query, key = rng.standard_normal((21, 16)).astype(dtype), rng.standard_normal((230, 16)).astype(dtype)
    query[3], key[5::7] = 0, 0
    exact = (query == 0).all(axis=1)[:, None] | (key == 0).all(axis=1)
    least = np.finfo(dtype).tiny * dtype(2)
    query[4], key[6::7] = -least, least  # their products are too small for any number but -0
    hides: list[Call] = [
        {},
        {"attn_mask": rng.random((21, 230)) < 0.9},
        {"block_mask": cattn.BlockMask(rng.random((3, 23)) < 0.8, 10)},
    ]
    negative_zeros = 0
    for softcap in (None, 3.0):
        for hidden in hides:
            call: Call = {"query": query, "key": key, "softcap": softcap, **hidden}
            qk = cattn.attention_weights(**call, stage="qk")
            zero, sign = qk == 0, np.signbit(qk)
            negative_zeros += int((zero & sign).sum())
            for stage in ("softcap", "bias", "mask"):
                right = cattn.reference.attention_weights(**call, stage=stage)
                for way, scores in every_way(
                    functools.partial(cattn.attention_weights, **call, stage=stage), tiny=False
                ):
                    visible = zero & (scores != -INF)
                    np.testing.assert_array_equal(scores[visible], 0, err_msg=f"{stage}, {way}")
                    np.testing.assert_array_equal(np.signbit(scores)[visible], sign[visible], err_msg=f"{stage}, {way}")
                    np.testing.assert_array_equal(
                        np.signbit(scores)[exact & visible], np.signbit(right)[exact & visible]
                    )
    assert (negative_zeros > 0) == in_contract(isa)


@pytest.mark.parametrize("mask", [None, np.ones((4, 60), bool), np.zeros((4, 60))], ids=["none", "bool", "additive"])
def test_the_largest_score_of_zeros_is_positive(isa: str, dtype: type, mask: np.ndarray | None) -> None:
    """It was -0 under softcap, and +0 with some masks or beside some queries."""
    query, key = np.zeros((4, 8), dtype), np.ones((60, 8), dtype)
    blocks = cattn.BlockMask(np.array([[1, 0, 1] * 10, [1] * 30], bool), 2)
    for options in ({}, {"block_mask": blocks}):
        ours = cattn.attention_statistics(query, key, mask, softcap=2.0, **options).max_score
        right = cattn.reference.attention_statistics(query, key, mask, softcap=2.0, **options).max_score
        np.testing.assert_array_equal(ours, 0)
        np.testing.assert_array_equal(np.signbit(ours), np.signbit(right))
