"""Several threads use cattn at the same time: short calls, also for ThreadSanitizer (`tools/sanitize thread`).

Each test compares bits with the same work on one thread. The threads share everything that the C code guards: the pool,
its scratch, the tickets for a serial dropout stream, a generator.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import cattn
from cattn import _cattn
from support import assert_same_bits, forced

CALLERS = 3
QUERY, KEY, VALUE = np.random.default_rng(1).standard_normal((3, 2, 3, 300, 8), dtype=np.float32)
LONG = np.random.default_rng(2).standard_normal((3, 1, 1, 12000, 8), dtype=np.float32)


@pytest.fixture(autouse=True)
def default_threads() -> Iterator[None]:
    yield
    cattn.set_num_threads(None)


def attend(**keywords: Any) -> np.ndarray:
    return np.asarray(cattn.scaled_dot_product_attention(QUERY, KEY, VALUE, **keywords))


def gradients(**keywords: Any) -> np.ndarray:
    """Return all gradients in one array, for a batch of three with two heads. Threads take tickets for each key block
    and for a bias that they share."""
    query, key, value = (array.swapaxes(0, 1) for array in (QUERY, KEY, VALUE))
    forward = cattn.scaled_dot_product_attention(query, key, value, return_lse=True, **keywords)
    parts = cattn.attention_backward(value, query, key, value, forward.out, forward.lse, **keywords)
    return np.concatenate([part.ravel() for part in parts if part is not None])


CALLS: dict[str, Callable[[], np.ndarray]] = {
    "tile": lambda: attend(is_causal=True),
    "rows": lambda: np.asarray(cattn.causal_attention(QUERY[:, :, -8:], KEY, VALUE, query_offset=292)),
    "split": lambda: np.asarray(cattn.scaled_dot_product_attention(LONG[0, :, :, :5], LONG[1], LONG[2])),
    "dropout inside": lambda: attend(dropout_p=0.3, rng=5),
    "stream inside": lambda: attend(dropout_p=0.3, rng=cattn.TorchGenerator(5)),
    "varlen": lambda: np.asarray(
        cattn.varlen_attention(*(a[0].swapaxes(0, 1) for a in (QUERY, KEY, VALUE)), [0, 90, 300], [0, 90, 300])
    ),
    "gradients": lambda: gradients(is_causal=True),
    "gradients of a shared bias": lambda: gradients(bias=QUERY[0, 0] @ KEY[0, 0].T),
    "gradients of a bias that heads share": lambda: gradients(bias=(QUERY[0] @ KEY[0].swapaxes(-1, -2))[:, None]),
    "gradients of a bias for each head": lambda: gradients(bias=QUERY[:, 0] @ KEY[:, 0].swapaxes(-1, -2)),
    "softmax": lambda: cattn.softmax(LONG, axis=-2),
    "masked softmax": lambda: cattn.masked_softmax(QUERY @ KEY.swapaxes(-1, -2), is_causal=True),
    "dropout": lambda: cattn.dropout(LONG, 0.5, rng=3),
    "stream": lambda: cattn.dropout(LONG, 0.5, rng=cattn.TorchGenerator(3)),
}


def together(work: Callable[[int], None], n: int = CALLERS) -> None:
    """Call work(0) to work(n - 1) in threads that start together. Raise the first error of any of them."""
    start, errors = threading.Barrier(n), []

    def run(i: int) -> None:
        start.wait()
        try:
            work(i)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(n)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


@pytest.mark.parametrize("name", CALLS)
def test_one_call_on_several_threads_has_the_bits_of_one_thread(name: str) -> None:
    """The paths are forced, because short calls do not use the pool by themselves."""
    with cattn.num_threads(1):
        expected = CALLS[name]()
    for path in ("auto", "tile", "split"):
        with forced(path), cattn.num_threads(4):
            assert_same_bits(CALLS[name](), expected, f"{name}, {path}")


@pytest.mark.promise("gradients' bits", "GIL")
@pytest.mark.parametrize("name", CALLS)
def test_concurrent_equal_calls_have_the_bits_of_one_thread(name: str) -> None:
    with cattn.num_threads(1):
        expected = CALLS[name]()
    cattn.set_num_threads(2)

    def work(i: int) -> None:
        for _ in range(3):
            assert_same_bits(CALLS[name](), expected, f"{name}, caller {i}")

    with forced("tile"):
        together(work)


@pytest.mark.promise("GIL")
def test_concurrent_different_calls_have_the_bits_of_one_thread() -> None:
    """The calls hand scratch of different sizes to each other, and the pool grows meanwhile."""
    with cattn.num_threads(1):
        expected = {name: call() for name, call in CALLS.items()}

    def work(i: int) -> None:
        names = list(CALLS)
        for step in range(len(names)):
            name = names[(step + i * 3) % len(names)]
            with cattn.num_threads(1 + (step + i) % 4):
                assert_same_bits(CALLS[name](), expected[name], name)

    with forced("tile"):
        together(work)


def test_threads_that_share_a_generator_draw_its_stream_once() -> None:
    """All threads together draw the numbers that one thread would draw, in any order of the calls."""
    n, p = 1000, 0.5
    generator, masks = cattn.TorchGenerator(7), [np.empty(0, bool)] * CALLERS
    x = np.ones(n, np.float32)

    def work(i: int) -> None:
        masks[i] = cattn.dropout(x, p, rng=generator) != 0
        attend(dropout_p=p, rng=generator)

    with cattn.num_threads(3), forced("tile"):
        together(work)
    after = generator.get_state()
    alone = cattn.TorchGenerator(7)
    for _ in range(CALLERS):
        cattn.dropout(x, p, rng=alone)
        attend(dropout_p=p, rng=alone)
    assert_same_bits(after, alone.get_state(), "the stream ends at the same place in any order of the calls")
    assert len({row.tobytes() for row in masks}) == CALLERS, "no two threads draw the same numbers"


def test_settings_may_change_during_calls() -> None:
    """Thread counts and kernel tables are set while other threads compute."""
    with cattn.num_threads(1):
        expected = CALLS["tile"]()
    table = _cattn._get_isa()

    def work(i: int) -> None:
        for step in range(6):
            if i == 0:
                cattn.set_num_threads(1 + step % 3)
                _cattn._set_isa(table)
                cattn.show_config("dicts")
            else:
                assert_same_bits(CALLS["tile"](), expected)

    together(work)


def test_memory_may_be_released_between_calls_of_other_threads() -> None:
    """The workers of the pool end and start again."""
    with cattn.num_threads(1):
        expected = CALLS["tile"]()
    cattn.set_num_threads(3)

    def work(i: int) -> None:
        for _ in range(4):
            if i == 0:
                _cattn._release()
            else:
                assert_same_bits(CALLS["tile"](), expected)

    with forced("tile"):
        together(work)
