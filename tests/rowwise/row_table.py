"""Functions of rows of numbers: a row of TABLE says how one is called; each file of questions asks every row.

A new function gets a row here, and all questions are asked: values, gradients, torch, empty arrays, promotion, tables,
threads, rows alone, strides, halves, `out` that overlaps an input, the caller's floating-point mode and random calls.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

import cattn
from cattn import functional, reference

Arrays = dict[str, Any]
WIDTH = 12  # of the results of `linear`


def rows(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return rng.standard_normal(shape)


def column(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return rng.standard_normal(shape[-1:])


def matrix(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return rng.standard_normal((WIDTH, *shape[-1:]))


def taps(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return rng.standard_normal((*shape[-1:], 4))


def matrix_column(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return rng.standard_normal(WIDTH)


def projected(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return rng.standard_normal((*shape[:-1], WIDTH))


def visible(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """A mask that hides each fifth column, in which `with_hidden` has large scores, and others."""
    mask = rng.random(shape) < 0.7
    mask[..., 2::5] = False
    return mask


def with_hidden(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Scores of which each third row has a hidden one so large that "renormalize" computes the row again."""
    scores = rng.standard_normal(shape)
    if scores.ndim > 1:
        scores[..., ::3, 2::5] = 2000
    return scores


def probabilities(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return cattn.softmax(rng.standard_normal(shape))


def relative(ulps: int, tiny: float = 1e-37) -> Callable[[Arrays, np.ndarray, float], Any]:
    """Bound errors by units of each number. Weights that underflow have a few digits only."""
    return lambda arrays, right, eps: ulps * eps * np.abs(right) + tiny


def absolute(ulps: int) -> Callable[[Arrays, np.ndarray, float], Any]:
    """Bound errors by units of the largest number, and of 1."""
    return lambda arrays, right, eps: ulps * eps * (1 + np.abs(right).max(initial=0))


def of_terms(arrays: Arrays, right: np.ndarray, eps: float) -> Any:
    """Bound errors of a norm by its terms, which cancel in rows of columns that are nearly the same."""
    given, weight = arrays.get("grad_out", arrays["x"]), arrays.get("weight", 1.0)
    x = arrays["x"].astype(np.float64)
    least = np.sqrt(min(x.var(-1).min(initial=1), np.square(x).mean(-1).min(initial=1)) + EPS)
    largest = np.abs(given * weight).max(initial=0)
    return eps * (300 * (1 + largest) / least + 64 * np.abs(right).max(initial=0))


def of_products(arrays: Arrays, right: np.ndarray, eps: float) -> Any:
    """Bound errors of sums of products by the sum of their sizes, in any order of the terms."""
    terms = max(arrays["x"].size, 8)
    return eps * terms * (1 + np.abs(right).max(initial=0))


EPS = 1e-3  # of both norms


@dataclasses.dataclass(frozen=True, repr=False)
class Row:
    """A function, and what the questions need of it."""

    name: str
    call: Callable[..., Any]  # of the arrays by name, and of `out` if it has one
    right: Callable[..., Any]  # the reference
    takes: dict[str, Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]]
    bound: Callable[[Arrays, np.ndarray, float], Any]
    alone: bool = True  # whether a row alone has the bits of the first result among others
    has_out: bool = True
    torch: Callable[[Any], Callable[..., Any]] | None = None  # given the module
    of: str = ""  # the function whose gradient it is, for `grad_out` and by the other arrays in their order

    def __repr__(self) -> str:
        return self.name

    def arrays(self, rng: np.random.Generator, shape: tuple[int, ...], dtype: Any = np.float64) -> Arrays:
        found = {name: make(rng, shape) for name, make in self.takes.items()}
        return {name: a if a.dtype == bool else a.astype(dtype) for name, a in found.items()}

    def moving(self) -> list[str]:
        """Return the names of the arrays of numbers that have the shape of the rows."""
        return [name for name, make in self.takes.items() if make in (rows, with_hidden, probabilities)]

    def results(self, arrays: Arrays, **options: Any) -> list[np.ndarray]:
        return as_list(self.call(**arrays, **options))


def as_list(results: Any) -> list[np.ndarray]:
    return [a for a in results if a is not None] if isinstance(results, tuple) else [results]


CALLED = set[str]()  # the names of the functions in the table
X = {"x": rows}
SCORES = {"scores": with_hidden, "mask": visible}
GRAD_X = {"grad_out": rows, "x": rows}
CAUSAL: dict[str, Any] = {"is_causal": "lower_right"}


def _both(name: str, **options: Any) -> dict[str, Any]:
    """Return the function of cattn and of its reference, with the same options."""
    function = getattr(cattn, name, None) or getattr(functional, name)
    CALLED.add(name)
    return {"call": partial(function, **options), "right": partial(getattr(reference, name), **options)}


def _rope(columns: int = 1, **options: Any) -> dict[str, Any]:
    """Rotate all columns, or one part of so many; an odd number of them leaves one as it is."""
    functions = _both("rope", **options)

    def rotating(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda x, **out: function(x, rotary_dim=np.shape(x)[-1] // columns // 2 * 2, **out)

    return {name: rotating(function) for name, function in functions.items()}


def _activation(name: str, of_torch: Callable[[Any], Callable[..., Any]], **options: Any) -> list[Row]:
    title = " ".join([name, *options.values()])
    return [
        Row(title, **_both(name, **options), takes=X, bound=absolute(8), torch=of_torch),
        Row(f"{title}, gradient", **_both(f"{name}_backward", **options), takes=GRAD_X, bound=absolute(8), of=title),
    ]


TABLE: list[Row] = [
    Row("softmax", **_both("softmax", scale=-2.5), takes=X, bound=relative(100),
        torch=lambda torch: lambda x: torch.softmax(-2.5 * x, -1)),
    Row("softmax of columns", **_both("softmax", axis=0), takes=X, bound=relative(100), alone=False),
    Row("softmax of two axes", **_both("softmax", axis=(0, -1)), takes=X, bound=relative(100), alone=False),
    Row("softmax where", **_both("softmax"), takes={"x": with_hidden, "where": visible}, bound=relative(100)),
    Row("masked_softmax", **_both("masked_softmax"), takes=SCORES, bound=relative(100)),
    Row("masked_softmax, renormalize", **_both("masked_softmax", method="renormalize"), takes=SCORES,
        bound=relative(100)),
    Row("masked_softmax, causal", **_both("masked_softmax", **CAUSAL), takes={"scores": rows},
        bound=relative(100), alone=False),
    Row("masked_softmax, causal, renormalize", **_both("masked_softmax", method="renormalize", **CAUSAL),
        takes=SCORES, bound=relative(100), alone=False),
    Row("masked_softmax of columns", **_both("masked_softmax", axis=-2, **CAUSAL), takes={"scores": rows},
        bound=relative(100), alone=False),
    Row("softmax, gradient", **_both("softmax_backward", scale=-2.5),
        takes={"grad_out": rows, "weights": probabilities}, bound=absolute(8), of="softmax"),
    Row("softmax of columns, gradient", **_both("softmax_backward", axis=0),
        takes={"grad_out": rows, "weights": probabilities}, bound=absolute(64), alone=False),
    Row("dropout", **_both("dropout", p=0.4, rng=77), takes=X, bound=relative(2), alone=False),
    Row("dropout, gradient", **_both("dropout_backward", p=0.4, rng=77), takes={"grad_out": rows},
        bound=relative(2), alone=False, of="dropout"),
    Row("dropout, gradient by a mask", **_both("dropout_backward", p=0.4), takes={"grad_out": rows, "mask": visible},
        bound=relative(2)),
    Row("rms_norm", **_both("rms_norm", eps=EPS), takes={"x": rows, "weight": column}, bound=relative(16),
        torch=lambda torch: lambda x, weight: torch.nn.functional.rms_norm(x, x.shape[-1:], weight, EPS)),
    Row("rms_norm without a weight", **_both("rms_norm", eps=EPS), takes=X, bound=relative(16)),
    Row("rms_norm, gradient", **_both("rms_norm_backward", eps=EPS),
        takes={"grad_out": rows, "x": rows, "weight": column}, bound=of_terms, has_out=False, of="rms_norm"),
    Row("rms_norm without a weight, gradient", **_both("rms_norm_backward", eps=EPS), takes=GRAD_X, bound=of_terms,
        has_out=False, of="rms_norm without a weight"),
    Row("layer_norm", **_both("layer_norm", eps=EPS), takes={"x": rows, "weight": column, "bias": column},
        bound=of_terms,
        torch=lambda torch: lambda x, weight, bias: torch.nn.functional.layer_norm(x, x.shape[-1:], weight, bias, EPS)),
    Row("layer_norm without a weight", **_both("layer_norm", eps=EPS), takes=X, bound=of_terms),
    Row("layer_norm, gradient", **_both("layer_norm_backward", eps=EPS),
        takes={"grad_out": rows, "x": rows, "weight": column}, bound=of_terms, has_out=False, of="layer_norm"),
    Row("rope", **_rope(), takes=X, bound=absolute(64), alone=False),
    Row("rope of pairs, inverse", **_rope(2, interleaved=True, inverse=True), takes=X, bound=absolute(64), alone=False),
    Row("causal_conv", **_both("causal_conv", activation="silu"), takes={"x": rows, "weight": taps, "bias": column},
        bound=absolute(32), alone=False),
    Row("causal_conv, gradient", **_both("causal_conv_backward", activation="silu"),
        takes={"grad_out": rows, "x": rows, "weight": taps, "bias": column}, bound=absolute(64), alone=False,
        has_out=False, of="causal_conv"),
    *_activation("gelu", lambda torch: torch.nn.functional.gelu),
    *_activation("gelu", lambda torch: partial(torch.nn.functional.gelu, approximate="tanh"), approximate="tanh"),
    *_activation("silu", lambda torch: torch.nn.functional.silu),
    Row("linear", **_both("linear"), takes={"x": rows, "weight": matrix, "bias": matrix_column}, bound=of_products,
        torch=lambda torch: torch.nn.functional.linear),
    Row("linear, gradient", **_both("linear_backward"),
        takes={"grad_out": projected, "x": rows, "weight": matrix}, bound=of_products, has_out=False, of="linear"),
]  # fmt: skip
BY_NAME = {row.name: row for row in TABLE}


def each_row(keep: Callable[[Row], bool] = lambda row: True) -> Callable[[Any], Any]:
    """Give a test all rows that `keep` keeps, one after the other in one item: an item costs more than most of them."""
    chosen = [row for row in TABLE if keep(row)]
    assert len(chosen) > 3

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def run(subtests: Any, **fixtures: Any) -> None:
            for row in chosen:
                with subtests.test(row.name):
                    test(row=row, **fixtures | ({"subtests": subtests} if is_looped else {}))

        signature = inspect.signature(test)
        is_looped = "subtests" in signature.parameters  # as support.looped makes it
        kept = [parameter for name, parameter in signature.parameters.items() if name not in ("row", "subtests")]
        added = inspect.Parameter("subtests", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        run.__signature__ = signature.replace(parameters=[added, *kept])  # type: ignore[attr-defined]
        return run

    return decorate
