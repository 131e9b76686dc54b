"""Functions of rows of numbers: one set of bits for any table, thread, batch, stride, storage and place of `out`."""

from __future__ import annotations

import inspect
import tracemalloc
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from row_table import CALLED, TABLE, WIDTH, Arrays, Row, as_list, each_row

import cattn
from cattn import functional
from support import (
    FP_MODES,
    HALVES,
    INF,
    NAN,
    assert_same_bits,
    examples,
    floating_point_mode,
    in_contract,
    looped,
    quiet,
    table,
)

COLUMNS = [1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 23, 24, 25, 31, 32, 33, 63, 64, 65, 511, 512, 513, 519, 520, 1024, 1100]
LONG = 70_003  # kernels look at a stop every 65,536 columns
SHAPE = (3, 37, 77)
# These copy an input whose memory is `out`.
COPIES = ("linear", "causal_conv", "softmax of two axes", "softmax of columns, gradient", "dropout, gradient by a mask")


def yardstick(isa: str, call: Callable[[], list[np.ndarray]]) -> list[np.ndarray]:
    """Make the call with the scalar kernel table (a table outside the bit contract: with itself) on one thread."""
    with table("scalar" if in_contract(isa) else isa), cattn.num_threads(1):
        return call()


def assert_all_same(actual: list[np.ndarray], expected: list[np.ndarray], what: str = "") -> None:
    for a, b in zip(actual, expected, strict=True):
        assert_same_bits(np.ascontiguousarray(a), np.ascontiguousarray(b), what)


@pytest.mark.promise("softmax and dropout", "rotary positions' bits")
@each_row()
@looped("n", [*COLUMNS, LONG])
def test_every_table_gives_the_same_bits(isa: str, dtype: type, row: Row, n: int, rng: np.random.Generator) -> None:
    arrays = row.arrays(rng, (4 if n < LONG else 2, n), dtype)
    for name in row.moving():
        arrays[name][0, :: max(1, n // 3)] *= dtype(1e-30)
    assert_all_same(row.results(arrays), yardstick(isa, lambda: row.results(arrays)))


@pytest.mark.promise("softmax and dropout", "rotary positions' bits")
@each_row()
def test_threads_and_the_batch_change_no_bit(isa: str, dtype: type, row: Row, rng: np.random.Generator) -> None:
    """Enough rows for many tasks and for blocks of a sum over rows. A row alone has the bits it has in a batch."""
    arrays = row.arrays(rng, (3, 170, 77), dtype)
    expected = yardstick(isa, lambda: row.results(arrays))
    for threads in (1, 2, 5):
        with cattn.num_threads(threads):
            assert_all_same(row.results(arrays), expected, f"{threads} threads")
    if row.alone:
        for index in ((0, 0), (1, 100), (2, slice(168, 170)), (1, slice(3, 40))):
            part = {name: a if a.ndim < 3 else a[index] for name, a in arrays.items()}
            assert_all_same(row.results(part)[:1], [expected[0][index]], str(index))


def views(a: np.ndarray) -> dict[str, np.ndarray]:
    """Return the same numbers in other memory layouts, by name."""
    if a.ndim == 1:
        return dict.fromkeys(("Fortran", "backwards", "apart", "off by one", "swapped"), np.repeat(a, 3)[::3])
    around = np.full((*a.shape[:-2], 3 * a.shape[-2] + 1, 2 * a.shape[-1] + 1), 7).astype(a.dtype)
    inside = np.full((*a.shape[:-2], a.shape[-2] + 2, a.shape[-1] + 3), 7).astype(a.dtype)
    made = {
        "Fortran": np.empty_like(a, order="F"),
        "backwards": np.empty_like(a)[..., ::-1, ::-1],
        "apart": around[..., 1::3, 1::2],
        "off by one": inside[..., 1:-1, 1:-2],
        "swapped": np.empty(a.shape[::-1], a.dtype).T if a.ndim < 3 else np.empty_like(a.swapaxes(0, 1)).swapaxes(0, 1),
    }
    for view in made.values():
        view[...] = a
    return made


@pytest.mark.promise("out")
@each_row()
@looped("shape", [SHAPE, (2, 16, 33), (2, 6, 8), (6, 77)])
def test_strides_change_no_bit_and_nothing_beside_out_is_written(
    isa: str, dtype: type, row: Row, shape: tuple[int, ...], rng: np.random.Generator
) -> None:
    """The kernels compute 16 rows together if they are adjacent in memory."""
    arrays = row.arrays(rng, shape, dtype)
    expected = row.results(arrays)
    others = {name: views(a) for name, a in arrays.items()}
    for layout in views(arrays[row.moving()[0]]):
        view = {name: made[layout] for name, made in others.items()}
        assert_all_same(row.results(view), expected, layout)
        if row.has_out:
            out = views(np.full_like(expected[0], 7))[layout]
            for given in (arrays, view):
                out[...] = 0
                assert row.call(**given, out=out) is out
                assert_all_same([out], expected, f"out {layout}")
            out[...] = 7
            memory = out.base if out.base is not None else out
            assert (memory == 7).all(), "memory beside out was written"


@each_row()
def test_repeated_rows_give_the_bits_of_copies(dtype: type, row: Row, rng: np.random.Generator) -> None:
    arrays = row.arrays(rng, (1, 1, 33), dtype)
    moving = [name for name, a in arrays.items() if a.ndim == 3]
    repeated = arrays | {name: np.broadcast_to(arrays[name], (2, 5, arrays[name].shape[-1])) for name in moving}
    copied = {name: a.copy() for name, a in repeated.items()}
    assert_all_same(row.results(repeated), row.results(copied))
    same = repeated | {name: np.broadcast_to(a[..., :1], a.shape) for name, a in repeated.items() if name in moving}
    assert_all_same(row.results(same), row.results({name: a.copy() for name, a in same.items()}), "one number")


@pytest.mark.promise("halves")
@pytest.mark.parametrize("half", HALVES, ids=str)
@each_row()
def test_halves_are_computed_in_float32_and_rounded_once(
    isa: str, half: np.dtype, row: Row, rng: np.random.Generator
) -> None:
    for shape in ((2, 20, 50), (7, 600)):
        arrays = row.arrays(rng, shape, half)
        wide = {name: a if a.dtype == bool else a.astype(np.float32) for name, a in arrays.items()}
        expected = [quiet(a, half) for a in row.results(wide)]
        assert_all_same(row.results(arrays), expected)
        if row.has_out:
            out = np.empty_like(expected[0])
            assert row.call(**arrays, out=out) is out
            assert_all_same([out], expected, "out")
        for layout in ("Fortran", "backwards"):
            assert_all_same(row.results({name: views(a)[layout] for name, a in arrays.items()}), expected, layout)


@pytest.mark.promise("floating-point mode")
@pytest.mark.parametrize("mode", FP_MODES)
@each_row()
def test_the_mode_of_the_caller_changes_no_bit(
    isa: str, dtype: type, mode: str, row: Row, rng: np.random.Generator
) -> None:
    arrays = row.arrays(rng, (20, 50), dtype)
    for name in row.moving():
        arrays[name][3] *= dtype(1e-39 if dtype == np.float32 else 1e-309)
    expected = row.results(arrays)
    with floating_point_mode(mode):
        found = row.results(arrays)
    assert_all_same(found, expected, mode)


# ---- where the result lies -------------------------------------------------------------------------------------------
@pytest.mark.promise("out")
@each_row(keep=lambda row: row.has_out)
def test_out_may_overlap_each_input(isa: str, row: Row, rng: np.random.Generator) -> None:
    """In place, shifted, backwards and transposed; the arrays of one number a column lie across the ends."""
    for name in row.moving():
        arrays = row.arrays(rng, (WIDTH, WIDTH))
        expected = row.results(arrays)
        for step, shift in ((1, 0), (1, 1), (1, 5), (1, -3), (-1, 0), (-1, 5), (1, WIDTH)):
            memory = rng.standard_normal(400)
            x = memory[100:244].reshape(WIDTH, WIDTH)
            overlapping = dict(zip(row.columns(), (memory[94:106], memory[240:252]), strict=False))
            given = arrays | overlapping | {name: x}
            x[...] = arrays[name]
            right = row.results({key: a.copy() for key, a in given.items()})
            out = memory[100 + shift : 244 + shift][::step].reshape(WIDTH, WIDTH)
            assert row.call(**given, out=out) is out
            assert_all_same([out], right, f"{name}, step {step}, shift {shift}")
        x = arrays[name].copy()
        assert_all_same([row.call(**arrays | {name: x}, out=x.T)], expected, f"{name}, transposed")


@each_row(keep=lambda row: row.has_out and row.name not in COPIES)
def test_calls_in_place_copy_nothing(row: Row) -> None:
    arrays = row.arrays(np.random.default_rng(0), (500, 500))

    def peak(name: str, step: int) -> int:
        x = arrays[name].copy()
        tracemalloc.start()
        try:
            row.call(**arrays | {name: x}, out=x if step == 1 else x[::step])
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    for name in row.moving():
        size = arrays[name].nbytes
        assert peak(name, -1) >= size, "the measurement does not see a copy"
        assert peak(name, 1) < size // 10


# ---- random calls ----------------------------------------------------------------------------------------------------
@given(st.data())
@examples(60)
def test_random_calls_have_the_bits_of_the_yardstick(isa: str, data: st.DataObject) -> None:
    """Any row, shape, stride and thread count, with special numbers anywhere."""
    row = data.draw(st.sampled_from(TABLE))
    lead, n = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)), data.draw(st.integers(1, 600))
    dtype, step = data.draw(st.sampled_from([np.float32, np.float64])), data.draw(st.sampled_from([1, -1, 2]))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    arrays: Arrays = {}
    for name, a in row.arrays(rng, (*lead, n), dtype).items():
        arrays[name] = np.repeat(a, abs(step), -1)[..., ::step] if step > 0 else a[..., ::-1].copy()[..., ::-1]
    special = data.draw(st.none() | st.sampled_from([NAN, INF, -INF, 0.0, -0.0, np.finfo(dtype).max]))
    for name in row.moving() if special is not None else []:
        arrays[name][rng.random(arrays[name].shape) < 0.05] = special
    with cattn.num_threads(data.draw(st.integers(1, 4))), np.errstate(all="ignore"):
        results = row.results(arrays)
    assert_all_same(results, yardstick(isa, lambda: row.results(arrays)), row.name)
    if special is None:
        for actual, right in zip(results, as_list(row.right(**arrays)), strict=True):
            assert (np.abs(actual - right) <= row.bound(arrays, right, np.finfo(dtype).eps)).all(), row.name


def test_every_function_of_rows_is_in_the_table() -> None:
    """They have `out` or a `grad_out`, and neither queries nor partial results."""
    names = {name for module in (cattn, functional) for name in module.__all__}
    found = set()
    for name in names:
        function = getattr(cattn, name, None) or getattr(functional, name)
        parameters = set(inspect.signature(function).parameters) if inspect.isroutine(function) else set()
        if {"out", "grad_out"} & parameters and not {"query", "outs"} & parameters:
            found.add(name)
    assert found == CALLED
