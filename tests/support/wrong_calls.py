"""Every call that must be refused: a table of wrong arguments of each public function, with the error's text.

Each row changes some arguments of a call that works. rows.py adds calls with a wrong array, for every array of every
function that C implements. tests/api/test_errors.py makes all of them; other tests use the table where they need calls
that fail. Sizes that overflow are in test_hostile.py.
"""

import functools
import re
from collections.abc import Callable
from decimal import Decimal
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

import cattn
from support import find, rows

INF, NAN = float("inf"), float("nan")


def ones(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.ones(shape, dtype)


def giant(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    """Return an array of one element in memory, all strides 0."""
    return np.broadcast_to(np.ones((), dtype), shape)


def read_only(array: np.ndarray) -> np.ndarray:
    array.flags.writeable = False
    return array


def misaligned(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return np.ones(size + 1, np.uint8)[1:].view(dtype).reshape(shape)


class Ragged:
    """An object that cannot be converted to an array."""

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        raise TypeError("no array in here")


# ---- calls that work -----------------------------------------------------------------------------------------------
def heads() -> dict[str, Any]:
    return {"query": ones(2, 4, 5, 8), "key": ones(2, 2, 6, 8), "value": ones(2, 2, 6, 3)}


def dropping() -> dict[str, Any]:
    return {"dropout_p": 0.5, "rng": np.random.default_rng(1)}


WORKING: dict[str, Callable[[], dict[str, Any]]] = {
    "scaled_dot_product_attention": lambda: {**heads(), **dropping(), "out": ones(2, 4, 5, 3)},
    "causal_attention": lambda: {**heads(), **dropping(), "out": ones(2, 4, 5, 3)},
    "attention_weights": lambda: {"query": ones(2, 4, 5, 8), "key": ones(2, 2, 6, 8), "out": ones(2, 4, 5, 6)},
    "softmax": lambda: {"x": ones(2, 5, 6), "out": ones(2, 5, 6)},
    "masked_softmax": lambda: {"scores": ones(2, 5, 6), "out": ones(2, 5, 6)},
    "dropout": lambda: {"x": ones(2, 5, 6), "p": 0.5, "rng": np.random.default_rng(1), "out": ones(2, 5, 6)},
    "causal_mask": lambda: {"T_q": 3, "T_k": 4},
    "rope": lambda: {"x": ones(2, 5, 6), "positions": [0, 1, 2, 3, 4], "rotary_dim": 4, "out": ones(2, 5, 6)},
    "set_num_threads": lambda: {"n": 1},
    "num_threads": lambda: {"n": 1},
    "show_config": lambda: {"mode": "dicts"},
}
WORKING |= {name: functools.partial(rows.working, name) for name in rows.IN_C if name not in WORKING}
SDPA, CAUSAL, WEIGHTS = "scaled_dot_product_attention", "causal_attention", "attention_weights"
ATTENTION, ALL_THREE = (SDPA, CAUSAL), (SDPA, CAUSAL, WEIGHTS)
SOFTMAX, MASKED, DROPOUT, STAGE, MASK_OF = ("softmax",), ("masked_softmax",), ("dropout",), (WEIGHTS,), ("causal_mask",)
ROPE, NORM, NORMS = ("rope",), ("rms_norm",), ("rms_norm", "layer_norm")
OF_NORMS, OF_ACTIVATIONS = ("rms_norm_backward", "layer_norm_backward"), ("gelu_backward", "silu_backward")
GELU, LINEAR, OF_LINEAR = ("gelu", "gelu_backward"), ("linear",), ("linear_backward",)
ANY_CAUSAL, THREADS = (SDPA, WEIGHTS, "masked_softmax"), ("set_num_threads", "num_threads")
ROWWISE = ("softmax", "masked_softmax", "dropout", "rope", "rms_norm", "layer_norm", "gelu", "silu")


class Row(NamedTuple):
    functions: tuple[str, ...]
    changes: dict[str, Any]
    error: type[Exception]
    says: str  # the beginning of the message, or a regular expression for it
    wrong: str = ""  # what is wrong, if `changes` is the whole call


def wrong_value(functions: tuple[str, ...], says: str, **changes: Any) -> Row:
    return Row(functions, changes, ValueError, says)


def wrong_type(functions: tuple[str, ...], says: str, **changes: Any) -> Row:
    return Row(functions, changes, TypeError, says)


def warned(functions: tuple[str, ...], says: str, **changes: Any) -> Row:
    """A row for a warning that is turned into an error."""
    return Row(functions, changes, UserWarning if "attn_mask" in changes else cattn.CausalAlignmentWarning, says)


def rows_for_arrays(function: str) -> list[Row]:
    """Rows for each array of a function, of which one of those is named that do not fit."""
    found = []
    for name in rows.arrays_of(function):
        for wrong in rows.wrong_arrays(function, name):
            says = rf"(leading dimensions .*)?\b({'|'.join(wrong.names)})\b"
            found.append(Row((function,), wrong.call, wrong.error, says, f"{name}: {wrong.what}"))
    return found


def rows_for_dtypes(functions: tuple[str, ...], name: str, shape: tuple[int, ...]) -> list[Row]:
    """Rows for values that are no array of numbers."""
    wrong = [
        (ones(*shape, dtype=np.int8), rf"{name} has dtype int8 and no scale: pass cattn\.\w+\({name}, scale\)"),
        (ones(*shape, dtype=ml_dtypes.float8_e4m3fn), f"{name} has dtype float8_e4m3fn and no scale"),
        (ones(*shape, dtype=ml_dtypes.float8_e5m2), rf"{name} has dtype float8_e5m2.*astype\(np.float32\)"),
        (ones(*shape, dtype=np.longdouble), rf"{name} has dtype (longdouble|float128).*astype\(np.float64\)"),
        (ones(*shape, dtype=np.complex64), f"{name} has dtype complex64"),
        (ones(*shape, dtype=object), f"{name} has dtype object"),
        (np.full(shape, "1"), f"{name} has dtype <U1"),
        (np.full(shape, b"1"), f"{name} has dtype .*S1"),
        (np.zeros(shape, "M8[s]"), f"{name} has dtype datetime64"),
        (np.zeros(shape, [("a", "f4")]), f"{name} has dtype "),
        (None, f"{name} must be an array of real numbers, got NoneType"),
        ({}, f"{name} must be an array of real numbers, got dict"),
        (Ragged(), f"{name} cannot be read as an array: no array in here"),
        (np.ma.masked_array(ones(*shape), False), rf"{name} is a masked array .*{name}\.data"),
    ]
    rows = [wrong_type(functions, says, **{name: array}) for array, says in wrong]
    ragged = [[1.0, 2.0], [3.0]]
    return [*rows, wrong_value(functions, f"{name} cannot be read as an array", **{name: ragged})]


def rows_for_numbers(functions: tuple[str, ...], name: str) -> list[Row]:
    """Rows for values that are no finite real number."""
    rows = [wrong_value(functions, f"{name} must be finite, got", **{name: x}) for x in (INF, -INF, NAN, 10**400)]
    for x in (True, np.True_, 1j, np.complex64(1), "1", b"1", [1.0], Decimal):
        rows.append(wrong_type(functions, f"{name} must be a real number, got {type(x).__name__}", **{name: x}))
    return rows


def rows_for_offsets(functions: tuple[str, ...]) -> list[Row]:
    def row(value: Any, error: type[Exception], says: str) -> Row:
        causal = {} if functions == (CAUSAL,) else {"is_causal": "upper_left"}
        return Row(functions, {"query_offset": value, **causal}, error, says)

    return [
        row(True, TypeError, "query_offset must be an int or an integer array, got bool"),
        row(np.False_, TypeError, "query_offset must be an int or an integer array, got bool"),
        row(1.0, TypeError, "query_offset must be an int or an integer array, got dtype float64"),
        row([1.0, 2.0], TypeError, "query_offset must be an int or an integer array, got dtype float64"),
        row([True, False], TypeError, "query_offset must be an int or an integer array, got dtype bool"),
        row("1", TypeError, "query_offset must be an int or an integer array, got dtype <U1"),
        row(np.ma.masked_array([1, 2]), TypeError, r"query_offset is a masked array .*: pass query_offset\.data$"),
        row([[1], [2, 3]], ValueError, "query_offset cannot be read as an array"),
        row(2**63, ValueError, "query_offset must be between"),
        row(-(2**61) - 1, ValueError, "query_offset must be between"),
        row([0, 2**61 + 1], ValueError, "query_offset must be between"),
        row(np.array([0, 2**64 - 1], np.uint64), ValueError, "query_offset must be between"),
        row([1, 2, 3], ValueError, r"query_offset has shape \(3,\), which does not broadcast to the leading .*\(2,\)"),
        row([[1], [2]], ValueError, r"query_offset has shape \(2, 1\), which does not broadcast"),
    ]


def rows_for_out(functions: tuple[str, ...], shape: tuple[int, ...]) -> list[Row]:
    short = (*shape[:-1], shape[-1] - 1)
    return [
        wrong_type(functions, "out must be a numpy.ndarray.*got list", out=ones(*shape).tolist()),
        wrong_type(functions, "out must be a numpy.ndarray.*got memoryview", out=memoryview(ones(*shape))),
        wrong_type(functions, r"out is a masked array .*: pass out\.data$", out=np.ma.masked_array(ones(*shape))),
        wrong_type(functions, "out has dtype float64, the result has f", out=ones(*shape, dtype=np.float64)),
        wrong_type(functions, "out has dtype int32, the result has float32", out=ones(*shape, dtype=np.int32)),
        wrong_type(functions, "out must be aligned and in native byte order", out=ones(*shape, dtype=">f4")),
        wrong_type(functions, "out must be aligned and in native byte order", out=misaligned(*shape)),
        wrong_value(functions, re.escape(f"out has shape {short}, the result has {shape}"), out=ones(*short)),
        wrong_value(functions, re.escape(f"out has shape {(1, *shape)}, the result"), out=ones(1, *shape)),
        wrong_value(functions, re.escape(f"out has shape {shape[1:]}, the result"), out=ones(*shape[1:])),
        wrong_value(functions, "out is read-only", out=read_only(ones(*shape))),
        wrong_value(functions, "out ", out=np.lib.stride_tricks.as_strided(ones(9), shape, (0,) * len(shape))),
    ]


def rows_for_rng(functions: tuple[str, ...]) -> list[Row]:
    return [
        wrong_value(functions, r"rng must be in 0 <= rng < 2\*\*64.*got -1", rng=-1),
        wrong_value(functions, r"rng must be in 0 <= rng < 2\*\*64.*got 18446744073709551616", rng=2**64),
        wrong_value(functions, r"rng must be in 0 <= rng < 2\*\*64", rng=np.int64(-1)),
        wrong_type(
            functions,
            "rng must be None, an int, a cattn.TorchGenerator, or what numpy.random.default_rng takes, got bool",
            rng=True,
        ),
        wrong_type(
            functions,
            "rng must be None, an int, a cattn.TorchGenerator, or what numpy.random.default_rng takes, got bool",
            rng=np.True_,
        ),
        wrong_type(functions, "rng must be .*TorchGenerator, or what numpy.random.default_rng takes", rng="1"),
        wrong_type(functions, "rng must be .*TorchGenerator, or what numpy.random.default_rng takes", rng=1.5),
        wrong_value(functions, "rng must be .*TorchGenerator, or what numpy.random.default_rng takes", rng=[-1]),
        wrong_type(functions, "rng must be .*TorchGenerator, or what numpy.random.default_rng", rng=object()),
    ]


def rows_for_probability(functions: tuple[str, ...], name: str) -> list[Row]:
    rows = [wrong_value(functions, rf"{name} must be in \[0, 1\], got", **{name: p}) for p in (-0.1, 1.5, -1, 2)]
    return [*rows, *rows_for_numbers(functions, name)]


# ---- the table -----------------------------------------------------------------------------------------------------
shared = np.ones(2 * 4 * 5 * 6, np.float32)  # memory that two outputs would share
AttentionOutput = cattn.AttentionOutput

TABLE = [
    # arrays
    *rows_for_dtypes(ALL_THREE, "query", (2, 4, 5, 8)),
    *rows_for_dtypes(ALL_THREE, "key", (2, 2, 6, 8)),
    *rows_for_dtypes(ATTENTION, "value", (2, 2, 6, 3)),
    *rows_for_dtypes(
        ("softmax", "dropout", "rope", *NORMS, *OF_NORMS, "gelu", "silu", *OF_ACTIVATIONS), "x", (2, 5, 6)
    ),
    *rows_for_dtypes((*OF_NORMS, *OF_ACTIVATIONS, "softmax_backward", "dropout_backward"), "grad_out", (2, 5, 6)),
    *rows_for_dtypes(("masked_softmax",), "scores", (2, 5, 6)),
    # ranks and sizes
    wrong_value(ALL_THREE, r"query must have at least 2 dimensions \(..., T_q, head_dim\), got 1", query=ones(8)),
    wrong_value(ALL_THREE, "query must have at least 2 dimensions .*got 0", query=1.0),
    wrong_value(ALL_THREE, r"key must have at least 2 dimensions \(..., T_k, head_dim\), got 1", key=ones(8)),
    wrong_value(ATTENTION, r"value must have at least 2 dimensions \(..., T_k, d_v\), got 1", value=ones(3)),
    wrong_value(ALL_THREE, "key has head_dim 7, query has 8", key=ones(2, 2, 6, 7)),
    wrong_value(ATTENTION, "value has T_k 7, key has 6", value=ones(2, 2, 7, 3)),
    wrong_value(ATTENTION, r"value has heads \(axis -3\):? 4, key has .*2", value=ones(2, 4, 6, 3)),
    wrong_value(ALL_THREE, r"query has 5 heads \(axis -3\), key and value have 2", query=ones(2, 5, 5, 8)),
    wrong_value(ALL_THREE, "query has 3 heads.*, or query's a multiple$", query=ones(2, 3, 5, 8), enable_gqa=True),
    wrong_value(ALL_THREE, "query has 4 heads.*enable_gqa=False forbids grouped heads$", enable_gqa=False),
    wrong_value(ALL_THREE, "query has 4 heads.*enable_gqa=False", enable_gqa=np.False_),
    wrong_type(ALL_THREE, "enable_gqa must be None, True or False, got int", enable_gqa=1),
    wrong_type(ALL_THREE, "enable_gqa must be None, True or False, got str", enable_gqa="no"),
    wrong_value(ALL_THREE, "leading .* on axis -4 query has size 2, key has 3", key=ones(3, 2, 6, 8)),
    wrong_value(ATTENTION, "leading .* on axis -4 query has size 2, value has 3", value=ones(3, 2, 6, 3)),
    # masks
    wrong_type(ALL_THREE, r"attn_mask has dtype int64.*mask\.astype\(bool\)", attn_mask=ones(5, 6, dtype=np.int64)),
    wrong_type(ALL_THREE, r"attn_mask has dtype int64.*mask\.astype\(bool\)", attn_mask=[[1] * 6]),
    wrong_type(ALL_THREE, r"attn_mask has dtype uint8.*mask\.astype", attn_mask=ones(5, 6, dtype=np.uint8)),
    wrong_type(ALL_THREE, "attn_mask has dtype complex128", attn_mask=ones(5, 6, dtype=complex)),
    wrong_type(ALL_THREE, "attn_mask has dtype object", attn_mask=ones(5, 6, dtype=object)),
    wrong_type(ALL_THREE, "attn_mask has dtype (longdouble|float128)", attn_mask=ones(5, 6, dtype=np.longdouble)),
    wrong_type(ALL_THREE, r"attn_mask must be an array, got 'causal': is_causal=True\?$", attn_mask="causal"),
    wrong_type(ALL_THREE, "attn_mask must be an array, got str$", attn_mask="none"),
    wrong_type(ALL_THREE, r"attn_mask is a masked.*filled\(-np\.inf\)", attn_mask=np.ma.masked_array(ones(5, 6))),
    wrong_type(ALL_THREE, r"attn_mask is a masked.*filled\(False\)", attn_mask=np.ma.masked_array(ones(5, 6) > 0)),
    wrong_value(ALL_THREE, r"attn_mask has shape \(6, 5\), .*\(2, 4, 5, 6\)", attn_mask=ones(6, 5) > 0),
    wrong_value(ALL_THREE, r"attn_mask has shape \(1, 2, 4, 5, 6\), ", attn_mask=ones(1, 2, 4, 5, 6) > 0),
    wrong_value(ALL_THREE, r"attn_mask has shape \(2, 2, 5, 6\), ", attn_mask=ones(2, 2, 5, 6)),
    wrong_value(ALL_THREE, "attn_mask cannot be read as an array", attn_mask=[[True], [True, False]]),
    wrong_type(ALL_THREE, "bias is boolean; boolean masks go to attn_mask", bias=ones(5, 6) > 0),
    wrong_type(ALL_THREE, r"bias has dtype int64.*bias\.astype\(np\.float64\)", bias=ones(5, 6, dtype=int)),
    wrong_type(ALL_THREE, "bias has dtype (longdouble|float128)", bias=ones(5, 6, dtype=np.longdouble)),
    wrong_type(ALL_THREE, r"bias is a masked array.*filled\(-np\.inf\)", bias=np.ma.masked_array(ones(5, 6))),
    wrong_value(
        ALL_THREE,
        r"attn_mask has shape \(2, 6\), .*: to hide keys of whole batch entries pass attn_mask\[:, None, None, :\], or",
        attn_mask=ones(2, 6) > 0,
    ),
    wrong_value(MASKED, r"mask has shape \(2, 6\), .*pass mask\[:, None, :\]$", mask=ones(2, 6) > 0),
    wrong_value(
        ALL_THREE, r"attn_mask has shape \(2, 5, 6\), .* pass attn_mask\[:, None\]$", attn_mask=ones(2, 5, 6) > 0
    ),
    wrong_value(ALL_THREE, r"bias has shape \(2, 5, 6\), .* pass bias\[:, None\]$", bias=ones(2, 5, 6)),
    wrong_type(ALL_THREE, r"\w+\(\) got an unexpected keyword argument 'seed': did you mean 'rng'\?$", seed=1),
    wrong_value(ALL_THREE, r"bias has shape \(4, 6\), which does not broadcast .*\(2, 4, 5, 6\)", bias=ones(4, 6)),
    # causality
    *[
        wrong_value(
            (SDPA, WEIGHTS, "causal_mask", "masked_softmax"), "is_causal must be False, True, 'upper_left'", is_causal=x
        )
        for x in ("right", "Lower_Right", "", 1, 0, None, 1.0, ["lower_right"])
    ],
    *[
        wrong_value(ANY_CAUSAL, rf"is_causal must be .*, got '{x}': did you mean '{meant}'\?$", is_causal=x)
        for x, meant in (("lower-right", "lower_right"), ("BottomRight", "lower_right"), ("top_left", "upper_left"))
    ],
    wrong_value(ANY_CAUSAL, "is_causal='lower_", is_causal="lower_right", query_offset=1),
    *rows_for_offsets((SDPA, WEIGHTS, "masked_softmax")),
    *rows_for_offsets((CAUSAL,)),
    wrong_type(MASK_OF, "query_offset must be", query_offset=True),
    wrong_type(MASK_OF, "query_offset must be", query_offset=0.5),
    wrong_type(MASK_OF, "query_offset must be an int, got list", query_offset=[1, 2]),
    wrong_value(MASK_OF, "query_offset must be between", query_offset=2**63),
    # numbers
    *rows_for_numbers(ALL_THREE, "scale"),
    *rows_for_numbers(("softmax", "masked_softmax"), "scale"),
    wrong_type(("softmax", "masked_softmax"), "scale must be a real number, got NoneType", scale=None),
    *rows_for_probability(ATTENTION, "dropout_p"),
    wrong_type(ATTENTION, "dropout_p must be a real number, got NoneType", dropout_p=None),
    *rows_for_probability(("dropout",), "p"),
    wrong_type(DROPOUT, "p must be a real number, got NoneType", p=None),
    *rows_for_rng((SDPA, CAUSAL, "dropout")),
    # the named stages
    *[
        wrong_value(STAGE, "stage must be 'qk', .* or 'dropout', got", stage=s)
        for s in ("QK", "", None, 0, ["softmax"], np.ones(2), np.zeros(3, "f4,i2"))
    ],
    # softmax
    *[
        wrong_value(functions, f"axis {got} is out of bounds for {name} with 3 dimensions", axis=axis)
        for functions, name in ((SOFTMAX, "x"), (MASKED, "scores"))
        for axis, got in ((3, 3), (-4, -4), (10**30, 10**30), (-(10**30), -(10**30)), (np.int64(3), 3), ((0, 3), 3))
    ],
    wrong_value(SOFTMAX + MASKED, "axis must name at least one axis, and each once", axis=(0, -3)),
    wrong_value(SOFTMAX + MASKED, "axis must name at least one axis, and each once", axis=()),
    *[
        wrong_type(SOFTMAX + MASKED, "axis must be an int, a tuple of ints or None, got", axis=a)
        for a in (1.0, "1", True, np.True_, [0, 1], (0, 1.0), (True,))
    ],
    *[
        Row(SOFTMAX, {"axis": axis, **change}, error, says)
        for axis in (1, (0, 1), None)
        for change, error, says in [
            ({"where": ones(6, dtype=int)}, TypeError, r"where has dtype int64.*where\.astype\(bool\)"),
            ({"where": ones(6)}, TypeError, "where has dtype float32"),
            ({"where": "yes"}, TypeError, "where has dtype <U3"),
            ({"where": np.ma.masked_array(ones(6) > 0)}, TypeError, r"where is a masked array.*where\.filled\(False\)"),
            ({"where": ones(5) > 0}, ValueError, r"where has shape \(5,\), which does not broadcast .*\(2, 5, 6\)"),
            ({"where": ones(1, 2, 5, 6) > 0}, ValueError, r"where has shape \(1, 2, 5, 6\), which does not broadcast"),
            ({"scale": NAN}, ValueError, "scale must be finite, got nan"),
            ({"out": ones(2, 5, 7)}, ValueError, r"out has shape \(2, 5, 7\), the result has \(2, 5, 6\)"),
            ({"out": read_only(ones(2, 5, 6))}, ValueError, "out is read-only"),
            ({"out": ones(2, 5, 6, dtype=float)}, TypeError, "out has dtype float64, the result has float32"),
            ({"out": [1.0]}, TypeError, "out must be a numpy.ndarray, got list"),
        ]
    ],
    # masked_softmax
    wrong_value(MASKED, r"scores must have at least 1 dimension .*got 0", scores=1.0),
    wrong_value(MASKED, "scores must have at least 2 dimensions", scores=ones(6), is_causal=True),
    wrong_type(MASKED, r"mask has dtype int64.*mask\.astype\(bool\)", mask=ones(6, dtype=int)),
    wrong_type(MASKED, "mask has dtype float32", mask=ones(6)),
    wrong_type(MASKED, r"mask is a masked array.*mask\.filled\(False\)", mask=np.ma.masked_array(ones(6) > 0)),
    wrong_value(MASKED, r"mask has shape \(5,\), which does not .*\(2, 5, 6\)", mask=ones(5) > 0),
    *[
        wrong_value(MASKED, "method must be 'neg_inf' or 'renormalize', got", method=m)
        for m in ("NEG_INF", "", None, 1)
    ],
    # rope
    wrong_value(ROPE, r"x must have at least 2 dimensions \(..., T, D\), got 1", x=ones(6)),
    wrong_value(ROPE, r"x must have at least 2 dimensions \(..., T, D\), got 0", x=1.0),
    *[
        wrong_type(ROPE, f"positions must hold ints or floats, got dtype {kind}", positions=positions)
        for positions, kind in (([True] * 5, "bool"), ([1j] * 5, "complex128"), (["1"] * 5, "<U1"), ({}, "object"))
    ],
    wrong_type(ROPE, r"positions is a masked array .*: pass positions\.data$", positions=np.ma.masked_array([1] * 5)),
    wrong_value(ROPE, "positions cannot be read as an array", positions=[[1], [2, 3]]),
    wrong_value(ROPE, r"positions must have one .*, got just one: pass np\.arange\(start, start \+ T\)$", positions=7),
    *[
        wrong_value(ROPE, rf"positions must be between -2\*\*53 and 2\*\*53, got {got}$", positions=[0, 1, p, 3, 4])
        for p, got in (
            (NAN, "nan"),
            (INF, "inf"),
            (-INF, "-inf"),
            (2**53 + 1, 2**53 + 1),
            (-(2**53) - 1, -(2**53) - 1),
            (1e17, r"1e\+17"),
        )
    ],
    *[
        wrong_value(
            ROPE,
            rf"positions has shape {re.escape(str(shape))}, which does not fit x's \(2, 5, 6\): pass one .*"
            r"each of the 5 tokens, shape \(5,\), or .*\(heads\)$",
            positions=np.zeros(shape),
        )
        for shape in ((4,), (1,), (3, 5), (2, 1), (2, 1, 5), (1, 2, 5), (5, 2, 3))
    ],
    wrong_value(
        ROPE,
        r"positions has shape \(2,\), .*; if x is \(\.\.\., tokens, heads, head_dim\), pass x\.swapaxes\(-3, -2\)$",
        positions=[0, 1],
    ),
    *rows_for_numbers(ROPE, "theta"),
    wrong_value(ROPE, "theta must be at least 1, got 0.5", theta=0.5),
    wrong_value(ROPE, "theta must be at least 1, got -10000", theta=-10000),
    *[
        wrong_type(ROPE, f"rotary_dim must be an int, got {type(x).__name__}", rotary_dim=x)
        for x in (4.0, "4", True, [4])
    ],
    wrong_value(ROPE, "rotary_dim must be even, because columns are rotated in pairs, got 3", rotary_dim=3),
    wrong_value(ROPE, "rotary_dim must be at least 0, got -2", rotary_dim=-2),
    wrong_value(ROPE, "rotary_dim must be at most 6, got 8", rotary_dim=8),
    wrong_value(
        ROPE,
        "x has 7 columns, but they are rotated in pairs: pass an even rotary_dim, for example 6",
        x=ones(2, 5, 7),
        rotary_dim=None,
    ),
    *[
        wrong_type(ROPE, f"{name} must be True or False, got {type(x).__name__}", **{name: x})
        for name in ("interleaved", "inverse")
        for x in ("halves", 1, None, np.ones(2))
    ],
    wrong_type(ROPE, "scaling must be a dict as in the config of a model, or None, got float", scaling=2.0),
    wrong_type(ROPE, r"rope\(\) got an unexpected keyword argument 'base': did you mean 'theta'\?$", base=1),
    # rms_norm, layer_norm
    wrong_value(NORMS, r"x must have at least 1 dimension \(..., D\), got 0", x=1.0),
    wrong_value(OF_NORMS, r"x must have at least 1 dimension \(..., D\), got 0", x=1.0, grad_out=1.0),
    *[
        wrong_value(
            NORMS + OF_NORMS, rf"weight must have one number for each column of x, shape \(6,\), got {shape}", weight=w
        )
        for w, shape in ((ones(5), r"shape \(5,\)"), (1.0, r"shape \(\)"), (ones(5, 6), r"shape \(5, 6\)"))
    ],
    wrong_type(NORMS + OF_NORMS, "weight has dtype complex64", weight=ones(6, dtype=np.complex64)),
    wrong_type(
        NORM,
        "x and weight mix float16 and bfloat16, which have no common dtype",
        x=ones(2, 5, 6, dtype=np.float16),
        weight=ones(6, dtype=ml_dtypes.bfloat16),
    ),
    *[
        wrong_type(
            OF_NORMS + OF_ACTIVATIONS,
            "grad_out(,| and) x( and weight)? mix float16 and bfloat16",
            x=ones(2, 5, 6, dtype=np.float16),
            grad_out=ones(2, 5, 6, dtype=ml_dtypes.bfloat16),
        ),
        wrong_type(
            ("layer_norm",),
            "x, weight and bias mix float16 and bfloat16, which have no common dtype",
            x=ones(2, 5, 6, dtype=np.float16),
            bias=ones(6, dtype=ml_dtypes.bfloat16),
        ),
    ],
    wrong_value(("layer_norm",), r"bias must have one number for each column of x, .*, got shape \(2,", bias=[1, 1]),
    wrong_type(("layer_norm",), "bias has dtype complex128", bias=[1j] * 6),
    wrong_value(
        OF_NORMS + OF_ACTIVATIONS, r"grad_out has shape \(2, 6, 5\), x has \(2, 5, 6\)", grad_out=ones(2, 6, 5)
    ),
    *rows_for_numbers(NORMS + OF_NORMS, "eps"),
    wrong_type(NORMS + OF_NORMS, "eps must be a real number, got NoneType", eps=None),
    wrong_value(NORMS + OF_NORMS, "eps must not be negative, got -1e-06", eps=-1e-6),
    wrong_type(NORMS, "out has dtype float32, the result has float64", weight=ones(6, dtype=np.float64)),
    # gelu, silu
    *[
        wrong_value(GELU, f"approximate must be 'none' or 'tanh', got {word!r}", approximate=word)
        for word in (None, "erf", True, b"tanh")
    ],
    # linear
    wrong_value(LINEAR, r"x must have at least 1 dimension \(..., K\), got 0", x=1.0),
    wrong_value(LINEAR, r"weight must have 2 dimensions \(N, K\), got 1", weight=ones(6)),
    wrong_value(
        LINEAR, r"weight must have as many columns as x, 6, got shape \(6, 3\): .* pass weight.T", weight=ones(6, 3)
    ),
    wrong_value(LINEAR, "bias must have one number", bias=ones(4)),
    wrong_value(LINEAR, "weight must have as", weight=cattn.Quantized(ones(4, 2, dtype=np.int8), 1.0)),
    wrong_type(LINEAR, r"linear\(\) got .*pass weight=cattn.Quantized", weight_scale=1.0),
    wrong_type(
        LINEAR + OF_LINEAR,
        r"weight has dtype int8 and no scale: pass cattn.Quantized\(weight, scale\)",
        weight=ones(3, 6, dtype=np.int8),
    ),
    wrong_value(OF_LINEAR, "grad_out must have at least 1 dimension", grad_out=1.0),
    wrong_value(OF_LINEAR, "grad_out has shape", x=ones(3, 6), grad_out=ones(2, 3)),
    wrong_value(OF_LINEAR, "weight has shape", x=None, weight=ones(4, 6)),
    wrong_value(OF_LINEAR, "weight .*K = 6 as in x", weight=ones(3, 5)),
    # out
    *rows_for_out(ATTENTION, (2, 4, 5, 3)),
    *rows_for_out((WEIGHTS,), (2, 4, 5, 6)),
    *rows_for_out(ROWWISE, (2, 5, 6)),
    wrong_type((WEIGHTS, *ROWWISE), "out must be a numpy.ndarray.*AttentionOu", out=AttentionOutput(ones(2, 5, 6))),
    wrong_type(ATTENTION, "out must be a numpy.ndarray or a cattn.AttentionOutput, got t", out=(ones(2, 4, 5, 3),)),
    *[
        wrong_value(ATTENTION, f"out has an array for {field}, but {flag} is", out=AttentionOutput(**{field: array}))
        for field, flag, array in [
            ("weights", "return_weights", ones(2, 4, 5, 6)),
            ("lse", "return_lse", ones(2, 4, 5)),
            ("dropout_mask", "return_dropout_mask", ones(2, 4, 5, 6) > 0),
        ]
    ],
    *[
        Row(ATTENTION, {flag: True, "out": AttentionOutput(**{field: array})}, error, rf"out\.{field} {says}")
        for field, flag, kind in [
            ("weights", "return_weights", np.float32),
            ("lse", "return_lse", np.float32),
            ("dropout_mask", "return_dropout_mask", np.bool_),
        ]
        for shape in [(2, 4, 5, 6)[: 3 if field == "lse" else 4]]
        for array, error, says in [
            (ones(*shape, dtype=np.int8), TypeError, f"has dtype int8, the result has {np.dtype(kind)}"),
            (ones(*shape[1:], dtype=kind), ValueError, f"has shape .*, the result has {re.escape(str(shape))}"),
            (read_only(ones(*shape, dtype=kind)), ValueError, "is read-only"),
            (shape, TypeError, "must be a numpy.ndarray.*got tuple"),
            (giant(*shape, dtype=kind), ValueError, ""),
        ]
    ],
    wrong_value(
        ATTENTION,
        r"out and out\.weights share memory",
        return_weights=True,
        out=AttentionOutput(shared[:120].reshape(2, 4, 5, 3), shared.reshape(2, 4, 5, 6)),
    ),
    wrong_value(
        ATTENTION,
        r"out and out\.lse share memory",
        return_lse=True,
        out=AttentionOutput(shared[:120].reshape(2, 4, 5, 3), lse=shared[119:159].reshape(2, 4, 5)),
    ),
    wrong_value(
        ATTENTION,
        r"out\.lse and out\.dropout_mask share memory",
        return_lse=True,
        return_dropout_mask=True,
        out=AttentionOutput(None, None, shared[:40].reshape(2, 4, 5), shared.view(bool)[159:399].reshape(2, 4, 5, 6)),
    ),
    # warnings turned into errors
    warned((SDPA, WEIGHTS), "is_causal=True with 5 queries and 6 keys", is_causal=True),
    warned(MASKED, "is_causal=True with 5 queries and 6 keys", is_causal=True),
    warned(MASK_OF, "is_causal=True with 3 queries and 4 keys", is_causal=True),
    warned(ALL_THREE, "attn_mask holds only 0 and 1, but float masks are additive", attn_mask=ones(5, 6)),
    warned((SDPA, WEIGHTS), "window_size with 5 queries and 6 keys", window_size=(1, 1)),
    # softcap, slopes and sinks
    *rows_for_numbers(ALL_THREE, "softcap"),
    wrong_value(ALL_THREE, "softcap must be positive, or None or 0 for none, got -1.5", softcap=-1.5),
    wrong_value(ALL_THREE, "softcap must round to a positive finite float32, got 1e-50", softcap=1e-50),
    wrong_value(ALL_THREE, "softcap must round to a positive finite float32, got 7.00649", softcap=2.0**-150),
    wrong_value(ALL_THREE, r"softcap must round to a positive finite float32, got 1e\+39", softcap=1e39),
    wrong_value(ALL_THREE, r"scale must round to a finite float32, got -1e\+39", scale=-1e39),
    wrong_value(SOFTMAX + MASKED, r"scale must round to a finite float32, got 3.40282357e\+38", scale=3.40282357e38),
    *[
        row
        for name in ("alibi_slopes", "sinks")
        for row in (
            wrong_value(ALL_THREE, f"{name} must have one number for each query head, shape .H,., got", **{name: 1.0}),
            wrong_value(ALL_THREE, rf"{name} has shape \(3,\), which does not broadcast to", **{name: [1.0] * 3}),
            wrong_value(ALL_THREE, f"{name} must be finite.*, got nan", **{name: [1.0, NAN, 1.0, 1.0]}),
            wrong_value(ALL_THREE, f"{name} must be finite.*, got inf", **{name: [1.0, INF, 1.0, 1.0]}),
            wrong_type(ALL_THREE, f"{name} has dtype complex", **{name: [1j] * 4}),
        )
    ],
    wrong_value(ALL_THREE, "alibi_slopes must be finite and not negative, got -1", alibi_slopes=[1.0, 1.0, -1.0, 1.0]),
    # windows and lengths
    wrong_type(
        (*ALL_THREE, "causal_mask"),
        r"window_size must be \(left, right\), .*got int: pass \(2, 0\), or cattn\.sliding_window\(3\)$",
        window_size=3,
    ),
    *[
        wrong_type((*ALL_THREE, "causal_mask"), "window_size must be ", window_size=x)
        for x in (-1, 10**30, "ab", (1.0, 0), (True, 0), {1, 2}, np.array([1, 2]))
    ],
    *[
        wrong_value((*ALL_THREE, "causal_mask"), "window_size must be ", window_size=x)
        for x in ((1, 2, 3), (), (-2, 0), (0, 10**30))
    ],
    *[
        row
        for name, most in (("query_seq_lengths", 5), ("key_value_seq_lengths", 6), ("key_value_seq_starts", 6))
        for row in (
            wrong_value(ALL_THREE, f"{name} must be between 0 and {most}, got {most + 1}", **{name: most + 1}),
            wrong_value(ALL_THREE, f"{name} must be between 0 and {most}, got -1", **{name: [2, -1]}),
            wrong_value(ALL_THREE, rf"{name} has shape \(3,\), which does not broadcast", **{name: [1, 2, 3]}),
            wrong_type(
                ALL_THREE, rf"{name} must be .*float64: pass np\.asarray\({name}\)\.astype\(int\)$", **{name: [1.0]}
            ),
            wrong_type(ALL_THREE, rf"{name} must be .*, got dtype float64: pass int\({name}\)$", **{name: 1.0}),
            wrong_type(ALL_THREE, f"{name} must be an int or an integer array, got bool", **{name: True}),
        )
    ],
    # lengths and counts
    *[
        wrong_type(MASK_OF, f"{name} must be an int, got {type(x).__name__}", **{name: x})
        for name in ("T_q", "T_k")
        for x in (2.0, "2", True, [2])
    ],
    *[wrong_value(MASK_OF, f"{name} must be at least 0", **{name: -1}) for name in ("T_q", "T_k")],
    *[wrong_value(MASK_OF, f"{name} ", **{name: 10**30}) for name in ("T_q", "T_k")],
    wrong_type(MASK_OF, "T_q must be an int, got NoneType", T_q=None),
    *[wrong_type(THREADS, f"n must be an int, got {type(x).__name__}", n=x) for x in (1.5, "1", True, [1])],
    *[wrong_value(THREADS, f"n must be at least 1, got {x}", n=x) for x in (0, -1)],
    *[wrong_value(THREADS, "n must be (?!at least)", n=x) for x in (2**31, 10**30)],
    wrong_type(("num_threads",), "n must be an int, got NoneType", n=None),
    *[
        wrong_value(("show_config",), rf"mode must be 'stdout' or 'dicts', got {got}", mode=m)
        for m, got in (("json", "'json'"), (None, "None"), (np.ones(2), "array"), (np.zeros(3, "f4,i2"), "array"))
    ],
]
TABLE += [row for function in rows.IN_C for row in rows_for_arrays(function)]
CASES = [(function, row) for row in TABLE for function in row.functions]


def arguments_of(function: str, row: Row) -> dict[str, Any]:
    return row.changes if row.wrong else {**WORKING[function](), **row.changes}


# Calls that must be refused. Not among them: warnings turned into errors, which is a setting of the process, and calls
# that set the number of threads of the process.
REFUSED: list[tuple[str, Row]] = [
    (function, row)
    for function, row in CASES
    if not issubclass(row.error, Warning) and "num_threads" not in function and function != "show_config"
]


def refused(function: str, row: Row) -> str:
    """Make a call that must fail, from the table of wrong_calls.py; return the message."""
    try:
        find(function)(**arguments_of(function, row))
    except row.error as error:
        return str(error)
    raise AssertionError(f"{function} accepted {row.changes}")
