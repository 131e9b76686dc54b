"""Functions of rows of numbers: a row of TABLE says how one is called; each file of questions asks every row.

The arrays are those of csrc/call/functions.h. A new function gets a row here, and all questions are asked: values,
gradients, torch, empty arrays, promotion, tables, threads, rows alone, strides, halves, `out` that overlaps an input,
the caller's floating-point mode and random calls.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

import cattn
from cattn import reference
from support import find
from support.rows import arrays_of, parameters_of

Arrays = dict[str, Any]
Bound = Callable[[Arrays, np.ndarray, float], Any]
WIDTH, TAPS = 12, 4  # of the results of `linear`, and of a convolution
EPS = 1e-3  # of both norms
MASKS = ("mask", "where")


def relative(ulps: int, tiny: float = 1e-37) -> Bound:
    """Bound errors by units of each number. Weights that underflow have a few digits only."""
    return lambda arrays, right, eps: ulps * eps * np.abs(right) + tiny


def absolute(ulps: int) -> Bound:
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


@dataclasses.dataclass(frozen=True, repr=False)
class Row:
    """A function, which the name begins with, and what the questions need of it."""

    name: str
    bound: Bound
    given: tuple[str, ...] = ()  # the arrays that it gets although it may do without them
    options: dict[str, Any] = dataclasses.field(default_factory=dict)  # the value, or a function of the columns
    alone: bool = True  # whether a row alone has the bits of the first result among others
    torch: Callable[[Any], Callable[..., Any]] | None = None  # given the module
    of: str = ""  # the row whose gradient it is, for `grad_out` and by the other arrays in their order

    def __repr__(self) -> str:
        return self.name

    @functools.cached_property
    def function(self) -> str:
        return re.findall(r"\w+", self.name)[0] + "_backward" * (", gradient" in self.name)

    @functools.cached_property
    def takes(self) -> dict[str, str]:
        """The arrays that it gets, and their axes. Masks have the shape of the rows."""
        rows, parameters = arrays_of(self.function), parameters_of(self.function)
        required = {name for name in rows if parameters[name].default is inspect.Parameter.empty}
        return {name: rows[name].axes if name in rows else "*"
                for name in parameters if name in {*required, *self.given}}  # fmt: skip

    @property
    def has_out(self) -> bool:
        return "out" in parameters_of(self.function)

    def arrays(self, rng: np.random.Generator, shape: tuple[int, ...], dtype: Any = np.float64) -> Arrays:
        sizes = {"N": WIDTH, "K": TAPS}
        sizes.pop(self.takes.get("x", "*")[-1], None)
        found = {}
        for name, axes in self.takes.items():
            own = tuple(sizes.get(letter, shape[-1]) for letter in axes.replace("*", ""))
            a = self._numbers(name, rng, (*shape[:-1], *(own or shape)[-1:]) if "*" in axes else own)
            found[name] = a if a.dtype == bool else a.astype(dtype)
        return found

    def _numbers(self, name: str, rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        if name in MASKS:  # hides each fifth column, and others
            mask = rng.random(shape) < 0.7
            mask[..., 2::5] = False
            return mask
        x = rng.standard_normal(shape)
        if self.takes.keys() & {*MASKS} and x.ndim > 1:  # so large that "renormalize" computes the row again
            x[..., ::3, 2::5] = 2000
        return cattn.softmax(x) if name == "weights" else x

    def moving(self) -> list[str]:
        """Return the names of the arrays of numbers that have the shape of the rows."""
        return [name for name, axes in self.takes.items() if "*" in axes and axes[-1] != "N" and name not in MASKS]

    def columns(self) -> list[str]:
        """Return the names of the arrays of one number a column."""
        return [name for name, axes in self.takes.items() if len(axes) == 1 and axes not in "*N"]

    def _with_options(self, function: Callable[..., Any], arrays: Arrays) -> Any:
        n = np.shape(next(iter(arrays.values())))[-1]
        return function(**arrays, **{name: x(n) if callable(x) else x for name, x in self.options.items()})

    def call(self, **arrays: Any) -> Any:
        return self._with_options(find(self.function), arrays)

    def right(self, **arrays: Any) -> Any:
        return self._with_options(getattr(reference, self.function), arrays)

    def results(self, arrays: Arrays) -> list[np.ndarray]:
        return as_list(self.call(**arrays))


def as_list(results: Any) -> list[np.ndarray]:
    return [a for a in results if a is not None] if isinstance(results, tuple) else [results]


def with_gradient(bound: Bound, row: Row) -> list[Row]:
    """Return a row, and one for its gradient with this bound."""
    return [row, dataclasses.replace(row, name=f"{row.name}, gradient", bound=bound, torch=None, of=row.name)]


CAUSAL = {"is_causal": "lower_right"}
SCALED = {"scale": -2.5}
RENORMALIZED = {"method": "renormalize"}
DROPPED: dict[str, Any] = {"p": 0.4, "rng": 77}
PAIRS = {"rotary_dim": lambda n: n // 4 * 2, "interleaved": True, "inverse": True}  # of the first half of the columns
W, WB = ("weight",), ("weight", "bias")

TABLE: list[Row] = [
    *with_gradient(
        absolute(8),
        Row("softmax", relative(100), options=SCALED, torch=lambda torch: lambda x: torch.softmax(-2.5 * x, -1)),
    ),
    *with_gradient(absolute(64), Row("softmax of columns", relative(100), options={"axis": 0}, alone=False)),
    Row("softmax of two axes", relative(100), options={"axis": (0, -1)}, alone=False),
    Row("softmax where", relative(100), ("where",)),
    Row("masked_softmax", relative(100), ("mask",)),
    Row("masked_softmax, renormalize", relative(100), ("mask",), RENORMALIZED),
    Row("masked_softmax, causal", relative(100), (), CAUSAL, alone=False),
    Row("masked_softmax, causal, renormalize", relative(100), ("mask",), RENORMALIZED | CAUSAL, alone=False),
    Row("masked_softmax of columns", relative(100), (), {"axis": -2} | CAUSAL, alone=False),
    *with_gradient(relative(2), Row("dropout", relative(2), options=DROPPED, alone=False)),
    Row("dropout, gradient by a mask", relative(2), ("mask",), {"p": 0.4}),
    *with_gradient(
        of_terms,
        Row("rms_norm", relative(16), W, {"eps": EPS},
            torch=lambda torch: lambda x, weight: torch.nn.functional.rms_norm(x, x.shape[-1:], weight, EPS)),
    ),
    *with_gradient(of_terms, Row("rms_norm without a weight", relative(16), (), {"eps": EPS})),
    *with_gradient(
        of_terms,
        Row("layer_norm", of_terms, WB, {"eps": EPS},
            torch=lambda torch: lambda x, *WB: torch.nn.functional.layer_norm(x, x.shape[-1:], *WB, EPS)),
    ),
    Row("layer_norm without a weight", of_terms, (), {"eps": EPS}),
    Row("rope", absolute(64), (), {"rotary_dim": lambda n: n // 2 * 2}, alone=False),
    Row("rope of pairs, inverse", absolute(64), (), PAIRS, alone=False),
    *with_gradient(absolute(64), Row("causal_conv", absolute(32), WB, {"activation": "silu"}, alone=False)),
    *with_gradient(absolute(8), Row("gelu", absolute(8), torch=lambda torch: torch.nn.functional.gelu)),
    *with_gradient(
        absolute(8),
        Row("gelu tanh", absolute(8), (), {"approximate": "tanh"},
            torch=lambda torch: partial(torch.nn.functional.gelu, approximate="tanh")),
    ),
    *with_gradient(absolute(8), Row("silu", absolute(8), torch=lambda torch: torch.nn.functional.silu)),
    *with_gradient(of_products, Row("linear", of_products, WB, torch=lambda torch: torch.nn.functional.linear)),
]  # fmt: skip
CALLED = {row.function for row in TABLE}
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
