"""Helpers of the tests: forcing a path, comparing bits, and textbook attention in the dtype under test."""

import contextlib
import ctypes
import ctypes.util
import dataclasses
import functools
import inspect
import os
import platform
import signal
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

import hypothesis
import ml_dtypes
import numpy as np
import pytest

import cattn
from cattn import _cattn, reference
from cattn.reference._attention import match_heads, score
from cattn.reference._masks import Ranges
from cattn.testing import Report

ROOT = Path(__file__).parents[2]  # of the project
Call = Mapping[str, Any]  # the keyword arguments of scaled_dot_product_attention
FIELDS = ("out", "weights", "lse", "dropout_mask")
PATHS = ("auto", "tile", "rows", "split", "tiny")
INF, NAN = np.inf, np.nan
# Under tools/sanitize malloc is the sanitizer's, also for Python's objects.
UNDER_SANITIZER = any(name in os.environ.get("LD_PRELOAD", "") for name in ("libasan", "libtsan"))
# The dtypes whose accuracy can be measured: float64 only where long double is wider.
ACCURACY_DTYPES = [np.float32, np.float64][: 2 if np.finfo(np.longdouble).nmant > 52 else 1]

needs_links = pytest.mark.skipif(sys.platform == "win32", reason="on Windows links need a privilege")
own_blocks = pytest.mark.skipif(UNDER_SANITIZER, reason="Python counts the blocks of its own allocator")
needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")


def press_ctrl_c() -> None:
    """Interrupt this process from any thread. On Windows os.kill would end it at once."""
    if sys.platform == "win32":
        signal.raise_signal(signal.SIGINT)
    else:
        os.kill(os.getpid(), signal.SIGINT)


@contextlib.contextmanager
def ctrl_c_after(seconds: float) -> Iterator[list[float]]:
    """Press Ctrl-C while the block runs; yield a list that gets the processor time at the press.

    If the block ends before, nothing is pressed: an interrupt outside of the test would end the whole run.
    """
    sent: list[float] = []
    inside = True

    def press() -> None:
        sent.append(time.process_time())
        press_ctrl_c()

    def interrupt(*_: object) -> None:
        if inside:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, interrupt)
    timer = threading.Timer(seconds, press)
    timer.start()
    try:
        yield sent
    finally:
        inside = False
        timer.cancel()
        timer.join()
        signal.signal(signal.SIGINT, before)


# A child has a console of its own, without a window. A thread of the child presses Ctrl-C there: the event goes to all
# processes of a console, and a process cannot send it to another console. The thread waits for a file. If it waited for
# standard input, libraries that ask for the type of this stream while they are loaded would wait, too.
_ON_WINDOWS = """
import ctypes, os, runpy, signal, threading, time

def press():
    while not os.path.exists(os.environ["PRESS_CTRL_C"]):
        time.sleep(0.01)
    os.kill(0, signal.CTRL_C_EVENT)

ctypes.WinDLL("kernel32").SetConsoleCtrlHandler(None, False)
threading.Thread(target=press, daemon=True).start()
runpy.run_module("cattn", run_name="__main__", alter_sys=True)
"""


_press_files: dict[int, str] = {}


def start_command(*arguments: str) -> subprocess.Popen[str]:
    """Start ``python -m cattn`` so that `interrupt_command` can interrupt it."""
    command, options = [sys.executable, "-m", "cattn"], {}
    if sys.platform == "win32":
        file = os.path.join(tempfile.mkdtemp(), "press")
        command = [sys.executable, "-c", _ON_WINDOWS]
        options = {"creationflags": subprocess.CREATE_NO_WINDOW, "env": {**os.environ, "PRESS_CTRL_C": file}}
    run = subprocess.Popen([*command, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)
    if sys.platform == "win32":
        _press_files[run.pid] = file
    return run


def interrupt_command(command: subprocess.Popen[str]) -> None:
    """Press Ctrl-C in a command that `start_command` started."""
    if sys.platform == "win32":
        Path(_press_files.pop(command.pid)).touch()
    else:
        command.send_signal(signal.SIGINT)


@contextlib.contextmanager
def benchmarks_importable() -> Iterator[None]:
    """Make the package `benchmarks` importable. Its import sets variables for thread pools; they are restored here."""
    environment = dict(os.environ)
    sys.path.insert(0, str(ROOT))
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(environment)


# ---- many cases ----------------------------------------------------------------------------------------------------
# The quick form runs this many cases of each test function.
QUICK_CASES = 3


def examples(usual: int, long: int = 0) -> Any:
    """Draw so many examples, or `long` of them in a run for a night; the quick form draws a third."""
    of_hundred = hypothesis.settings().max_examples  # of the profile
    n = usual if of_hundred == 100 else usual // 3 if of_hundred < 100 else long or usual
    return hypothesis.settings(max_examples=n)


def number_of(name: str) -> int:
    """Return a number that belongs to a name, the same in every run."""
    return zlib.crc32(name.encode())


def looped(names: str, cases: Iterable[Any], ids: Callable[[Any], str] = str) -> Callable[[Any], Any]:
    """Parametrize a test as pytest.mark.parametrize does, but with subtests, because an item costs milliseconds.

    There are two items: one with a few cases, which the quick form runs, and one with the others. The cases of an item
    share its fixtures.
    """
    every = list(cases)
    assert len(every) > QUICK_CASES, "pytest.mark.parametrize serves a few cases"
    given = [name.strip() for name in names.split(",")]

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        order = sorted(range(len(every)), key=lambda i: number_of(f"{test.__name__}{i}"))
        shares = {"a few": sorted(order[:QUICK_CASES]), "others": sorted(order[QUICK_CASES:])}

        @functools.wraps(test)
        def run(share: str, subtests: Any, **fixtures: Any) -> None:
            for i in shares[share]:
                values = every[i] if len(given) > 1 else (every[i],)
                with subtests.test(ids(every[i])):
                    test(**dict(zip(given, values, strict=True)), **fixtures)

        signature = inspect.signature(test)
        kept = [parameter for name, parameter in signature.parameters.items() if name not in given]
        added = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in ("share", "subtests")]
        run.__signature__ = signature.replace(parameters=[*added, *kept])  # type: ignore[attr-defined]
        return pytest.mark.parametrize("share", shares)(run)

    return decorate


# ---- ways to compute -----------------------------------------------------------------------------------------------
def in_contract(name: str) -> bool:
    """Return whether this kernel table is in the bit contract: all tables in it give the same bits."""
    return {table["name"]: table["bit_contract"] for table in cattn.show_config("dicts")["tables"]}[name]


@contextlib.contextmanager
def table(name: str) -> Iterator[None]:
    before = _cattn._get_isa()
    _cattn._set_isa(name)
    try:
        yield
    finally:
        _cattn._set_isa(before)


@contextlib.contextmanager
def forced(path: str) -> Iterator[None]:
    _cattn._set_path(path)
    try:
        yield
    finally:
        _cattn._set_path("auto")


def every_way(call: Callable[[], Any], *, tiny: bool, threads: tuple[int, ...] = (1, 3)) -> Iterator[tuple[str, Any]]:
    """Yield a label and the result of `call` for every path. `tiny`: whether the tiny path must accept the call."""
    for path in PATHS:
        for n in threads if path in ("auto", "split") else threads[:1]:
            with forced(path), cattn.num_threads(n):
                try:
                    result = call()
                except ValueError as error:
                    if path == "tiny" and not tiny and "forced path" in str(error):
                        continue
                    raise
            yield f"{path}, {n} threads", result


def everything(**call: Any) -> cattn.AttentionOutput:
    """Return attention with every optional output. Check that these do not change the output itself."""
    extras = {"return_weights": True, "return_lse": True, "return_dropout_mask": call.get("key_indices") is None}
    result = cattn.scaled_dot_product_attention(**call, **extras)
    assert_same_bits(cattn.scaled_dot_product_attention(**call), result.out, "output without extras")
    return result


def without(call: Call, *names: str) -> dict[str, Any]:
    """Return the call without these arguments."""
    return {name: x for name, x in call.items() if name not in names}


# ---- halves --------------------------------------------------------------------------------------------------------
HALVES = [np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)]


def quiet(a: np.ndarray, dtype: Any) -> np.ndarray:
    """Convert with NumPy, which rounds to nearest, ties to even; without warnings."""
    with np.errstate(all="ignore"):
        return a.astype(dtype)


def layouts(array: np.ndarray) -> list[np.ndarray]:
    """Return the same matrix with other strides: Fortran's, with gaps along each axis, reversed."""
    wide = np.zeros((*array.shape[:-1], 3 * array.shape[-1] + 1), array.dtype)
    wide[..., 1::3] = array
    gaps = np.zeros((array.shape[1], 2 * array.shape[0]), array.dtype)
    gaps[:, ::2] = array.T
    return [np.asfortranarray(array), wide[..., 1::3], gaps[:, ::2].T, array[::-1, ::-1].copy()[::-1, ::-1]]


def widened(call: Call) -> dict[str, Any]:
    """Return the call with its halves converted to float32."""
    halves = {name: a for name, a in call.items() if isinstance(a, np.ndarray) and a.dtype in HALVES}
    return dict(call) | {name: quiet(a, np.float32) for name, a in halves.items()}


def rounded(result: cattn.AttentionOutput, half: np.dtype) -> cattn.AttentionOutput:
    """Return the result that a call on halves must give, from the result of the float32 call."""
    weights = None if result.weights is None else quiet(result.weights, half)
    return result._replace(out=quiet(result.out, half), weights=weights)


# ---- comparisons ---------------------------------------------------------------------------------------------------
def bits(a: np.ndarray) -> np.ndarray:
    """View the memory as unsigned integers, which tell -0 from 0 and one NaN from another."""
    return a.view(f"u{a.dtype.itemsize}")


def assert_same_bits(actual: Any, expected: Any, what: str = "") -> None:
    if isinstance(expected, tuple):
        for name, a, b in zip(FIELDS, actual, expected, strict=False):
            assert (a is None) == (b is None), f"{name}: {what}"
            if b is not None:
                assert_same_bits(a, b, f"{name}: {what}")
        return
    if expected is None:
        assert actual is None, what
        return
    assert actual.shape == expected.shape, what
    assert actual.dtype == expected.dtype, what
    same = bits(actual) == bits(expected)
    if not same.all():
        at = tuple(np.argwhere(~same)[0].tolist())
        n = same.size - same.sum()
        raise AssertionError(f"{n} of {same.size} differ, first at {at}: {actual[at]} != {expected[at]}; {what}")


def part(result: cattn.AttentionOutput, index: Any) -> cattn.AttentionOutput:
    """Return the rows `index` of every array of a result."""
    return cattn.AttentionOutput(*(None if a is None else a[index] for a in result[:4]))


# ---- the textbook --------------------------------------------------------------------------------------------------
@dataclasses.dataclass
class Textbook:
    """Unfused attention in NumPy, with full matrices in one dtype; NumPy chooses the order of the sums."""

    out: np.ndarray
    weights: np.ndarray
    lse: np.ndarray
    size: float  # the largest score if every term counts with its absolute value


def each(change: Callable[[Any], Any], stored: Any) -> Any:
    """Return change(array), of a quantized key or value with both of its arrays changed."""
    return cattn.Quantized(*map(change, stored)) if isinstance(stored, cattn.Quantized) else change(stored)


def paired(call: Call, quantized: Any = cattn.Quantized, blocks: Any = cattn.BlockMask) -> Call:
    """Return the call with keys and values together with their scales, and blocks with their size."""
    call = dict(call)
    for name in ("key", "value"):
        if f"{name}_scale" in call:
            call[name] = quantized(call[name], call.pop(f"{name}_scale"))
    if "block_size" in call:
        call["block_mask"] = blocks(call["block_mask"], call.pop("block_size"))
    return call


def as_tuple(*parts: Any) -> tuple[Any, ...]:
    """Return the pair that the functions for JAX and PyTorch take."""
    return parts


def visibility_of(call: Call) -> Call:
    """Return the options that decide which keys are visible."""
    names = ("attn_mask", "bias", "block_mask", "enable_gqa", *Ranges._fields)
    return {name: call[name] for name in names if name in call}


def textbook(call: Call, dtype: Any, dropout_mask: np.ndarray | None = None) -> Textbook:
    """Compute `call` in `dtype`, with this dropout mask. The reference determines which keys are visible."""
    q, k, v = (np.asarray(call[name]).astype(dtype) for name in ("query", "key", "value"))
    masks = call.get("attn_mask"), call.get("bias")
    gqa = call.get("enable_gqa")
    problem = score((q, k, v), **visibility_of(call), scale=call.get("scale"))  # for visible keys and positions
    rank = max(a.ndim for a in (q, k, v))
    q, k, v = (a.reshape((1,) * (rank - a.ndim) + a.shape) for a in (q, k, v))
    if problem.one_head:
        q, k, v = (np.expand_dims(a, -3) for a in (q, k, v))
    q, k, v = match_heads(q, k, v, gqa)
    # 1/sqrt in the widest type: the code under test may round its scale once, the wide textbook should not.
    scale = 1 / np.sqrt(np.longdouble(max(q.shape[-1], 1))) if call.get("scale") is None else call["scale"]
    scale = np.dtype(dtype).type(scale)

    visible = problem.visible
    products = (q * scale) @ k.swapaxes(-1, -2)
    if call.get("softcap"):
        cap = np.dtype(dtype).type(call["softcap"])
        products = cap * np.tanh(products / cap)
    scores = np.array(np.broadcast_to(products, visible.shape))
    size = np.array(np.broadcast_to(np.abs(q * scale) @ np.abs(k).swapaxes(-1, -2), visible.shape))
    if call.get("alibi_slopes") is not None:
        distance = np.abs(problem.position[..., None, :, None] - np.arange(visible.shape[-1]))
        slopes = np.asarray(call["alibi_slopes"], dtype)[..., None, None]
        scores -= slopes * distance.astype(dtype)
        size += slopes * distance.astype(dtype)
    for term in masks:
        term = None if term is None else np.asarray(term)
        if term is not None and term.dtype.kind == "f":
            term = np.expand_dims(term, -3) if problem.one_head and term.ndim > 2 else term
            scores += np.where(visible, term, 0).astype(dtype)
            size += np.abs(np.where(visible, term, 0)).astype(dtype)
    row_max = scores.max(axis=-1, keepdims=True, initial=-INF, where=visible)
    sinks = np.asarray(-INF if call.get("sinks") is None else call["sinks"], dtype)[..., None, None]
    row_max = np.maximum(row_max, sinks)
    row_max = np.where(row_max == -INF, 0, row_max)
    e = np.exp(np.where(visible, scores - row_max, -INF))
    total = e.sum(axis=-1, keepdims=True) + np.exp(sinks - row_max)
    weights = e / np.where(total == 0, 1, total)
    with np.errstate(divide="ignore"):
        lse = (row_max + np.log(total))[..., 0]
    dropped, p = weights, call.get("dropout_p", 0.0)
    if p:
        dropout_mask = np.expand_dims(dropout_mask, -3) if problem.one_head else dropout_mask
        dropped = weights * dropout_mask * np.dtype(dtype).type(1 / (1 - p) if p < 1 else 0)
    out = dropped @ v
    largest = float(size.max(initial=0, where=visible))
    if problem.one_head:
        out, weights, lse = out[..., 0, :, :], weights[..., 0, :, :], lse[..., 0, :]
    if call.get("gate") is not None:
        out = out / (1 + np.exp(-np.asarray(call["gate"]).astype(dtype)))
    return Textbook(out, weights, lse, largest)


@dataclasses.dataclass
class Expected:
    """The exact result of a call, and the tolerance of each output."""

    result: cattn.AttentionOutput
    tolerance: dict[str, float]

    def check(self, actual: cattn.AttentionOutput, what: str) -> None:
        for name, tolerance in self.tolerance.items():
            a, b = getattr(actual, name), getattr(self.result, name)
            if a is not None:
                assert a.shape == b.shape, f"{name}: {what}"
                np.testing.assert_allclose(a, b, rtol=0, atol=tolerance, err_msg=f"{name}: {what}")
        if actual.dropout_mask is not None:
            assert_same_bits(actual.dropout_mask, self.result.dropout_mask, f"dropout_mask: {what}")


def expected(call: Call, dtype: Any) -> Expected:
    """Return the result of the reference, and the tolerance for `dtype`.

    The tolerance is twice the largest error of the textbook in the same dtype, so that fusing loses nothing, plus a few
    ULP for cases where the textbook happens to round well. A score whose terms have absolute values of sum s may be
    off by an ULP of s in any order of summation, and its weight by the same relative error: the few are 4 (1 + s).
    """
    extras = {"return_weights": True, "return_lse": True, "return_dropout_mask": True}
    right = reference.scaled_dot_product_attention(**call, **extras)
    assert isinstance(right, cattn.AttentionOutput)
    if np.dtype(dtype) == np.float64:
        # The reference itself has errors of float64: check it against the textbook in long double, and use that.
        wide = textbook(call, np.longdouble, right.dropout_mask)
        for name in FIELDS[:3]:
            np.testing.assert_allclose(getattr(wide, name), getattr(right, name), rtol=1e-11, atol=1e-11)
        right = right._replace(out=wide.out, weights=wide.weights, lse=wide.lse)
    same = textbook(call, dtype, right.dropout_mask)
    few = 4 * np.finfo(dtype).eps * (1 + same.size)
    assert few < 0.01, "scores too large for a useful comparison"
    p = call.get("dropout_p", 0.0)
    sizes = {
        "out": np.abs(np.asarray(call["value"])).max(initial=0) / (1 - p if p < 1 else 1),
        "weights": 1.0,
        "lse": 1 + np.abs(right.lse).max(initial=0, where=np.isfinite(right.lse)),
    }
    tolerance = {}
    for name, size in sizes.items():
        a, b = getattr(same, name), getattr(right, name)
        finite = np.isfinite(b)
        tolerance[name] = float(2 * np.abs(np.where(finite, a, 0) - np.where(finite, b, 0)).max(initial=0) + few * size)
    return Expected(right, tolerance)


# ---- the caller's floating-point mode ------------------------------------------------------------------------------
# The C library that has fesetround(), and its FE_DOWNWARD, FE_UPWARD and FE_TOWARDZERO.
if sys.platform == "win32":
    _libm = ctypes.CDLL("ucrtbase")
    _ROUNDING = {"down": 0x100, "up": 0x200, "to zero": 0x300}
else:
    _libm = ctypes.CDLL(None if sys.platform == "darwin" else ctypes.util.find_library("m"))
    _ROUNDING = (
        {"down": 0x800000, "up": 0x400000, "to zero": 0xC00000}
        if platform.machine() in ("aarch64", "arm64")
        else {"down": 0x400, "up": 0x800, "to zero": 0xC00}
    )
FP_MODES = (*_ROUNDING, "flush")


@contextlib.contextmanager
def floating_point_mode(mode: str) -> Iterator[None]:
    """Set a rounding direction, or flush to zero, in this thread. Check at the end that it is still set."""
    if mode == "flush":
        import pytest

        torch = pytest.importorskip("torch")  # it sets the mode
        tiny = np.full(4, 1e-310)
        assert torch.set_flush_denormal(True)
        try:
            assert not (tiny * np.ones(4)).any()
            yield
            assert not (tiny * np.ones(4)).any(), "flush to zero is off"
        finally:
            torch.set_flush_denormal(False)
        return
    assert _libm.fesetround(_ROUNDING[mode]) == 0
    try:
        yield
        assert _libm.fegetround() == _ROUNDING[mode], "the rounding direction has changed"
    finally:
        _libm.fesetround(0)


def sum_by_law(terms: np.ndarray) -> Any:
    """Add in the order of the bit contract: runs of 512 columns, 8 chains each, and a tree."""
    total = terms.dtype.type(0)
    for start in range(0, len(terms), 512):
        chain = [terms.dtype.type(0)] * 8
        for k, term in enumerate(terms[start : start + 512]):
            chain[k % 8] += term
        total += ((chain[0] + chain[4]) + (chain[2] + chain[6])) + ((chain[1] + chain[5]) + (chain[3] + chain[7]))
    return total


# ---- products of bfloat16, one exact number at a time ----------------------------------------------------------------
BF16 = np.dtype(ml_dtypes.bfloat16)
WORDS = ("bfloat16", "bfloat16_tiles")  # of compute_dtype


def fma(a: float, b: float, c: float) -> float:
    """Return c + a * b, rounded once to float32; 0 if it is below 2**-126 after rounding to 24 bits."""
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    if exact == 0:
        return 0.0
    if abs(exact) < Fraction(2) ** -126 - Fraction(2) ** -151:
        return 0.0
    near = np.float32(float(exact))  # may have been rounded twice
    around = [np.nextafter(near, np.float32(-np.inf)), near, np.nextafter(near, np.float32(np.inf))]
    least = min(abs(Fraction(float(x)) - exact) for x in around)
    nearest = [x for x in around if abs(Fraction(float(x)) - exact) == least]
    return float(next(x for x in nearest if len(nearest) == 1 or int(x.view(np.uint32)) % 2 == 0))


def add(a: float, b: float) -> float:
    """Return a + b as fma has it."""
    return fma(a, 1.0, b)


def product(a: np.ndarray, b: np.ndarray, word: str) -> float:
    """Return the sum of products of two rows of bfloat16, by pairs or by tiles."""
    return sum_of_pairs(a, b) if word == "bfloat16" else sum_of_groups(a, b)


def sum_of_groups(a: np.ndarray, b: np.ndarray) -> float:
    """Add groups of 32 terms: in each, a chain of the first 16 terms and a chain of the others."""
    total = 0.0
    for start in range(0, len(a), 32):
        chains = [0.0, 0.0]
        for i in range(start, min(start + 32, len(a))):
            half = (i - start) // 16
            chains[half] = fma(float(a[i]), float(b[i]), chains[half])
        total = add(total, add(*chains))
    return total


def sum_of_pairs(a: np.ndarray, b: np.ndarray) -> float:
    """Add pairs of elements: of each, the second one comes first."""
    total = 0.0
    for left, right in zip(pairs(a), pairs(b), strict=True):
        total = fma(left[0], right[0], fma(left[1], right[1], total))
    return total


def pairs(row: np.ndarray) -> np.ndarray:
    """Return the pairs of a row, the last one filled up with 0."""
    return np.append(row, [0.0] * (len(row) % 2)).reshape(-1, 2)


def flushed(a: np.ndarray) -> np.ndarray:
    return np.where(np.abs(a) < np.finfo(np.float32).tiny, 0.0, a)


def find(name: str) -> Any:
    """The public function of this name: a few are in cattn.functional only."""
    return getattr(cattn, name) if name in cattn.__all__ else getattr(cattn.functional, name)


# ---- reports of cattn.testing ----------------------------------------------------------------------------------------
def assert_passes(report: Report, unknown: bool) -> None:
    """Check a report on right attention. Where the names of its weights are unknown, some things are not checked."""
    assert report.ok, report
    assert report.checked
    report.raise_if_wrong()
    assert unknown == bool(report.not_checked)
