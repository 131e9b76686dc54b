"""TorchGenerator as an object: state exchanged with torch, copies, threads, signals, errors that change no state."""

import copy
import functools
import itertools
import pickle
import signal
import subprocess
import sys
import threading
import timeit
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import cattn
import cattn.random
from cattn import TorchGenerator
from cattn._input import arrays
from support import assert_same_bits
from support.processes import ALARM, set_alarm

Draw = Callable[[TorchGenerator], Any]


@pytest.fixture
def torch() -> Iterator[types.ModuleType]:
    module = pytest.importorskip("torch")
    state = module.get_rng_state()
    yield module
    module.set_rng_state(state)


# Positions in the stream: just seeded, within a block of 624 words, at its end, after it; with a cached normal number.
PLACES: dict[str, Draw] = {
    "fresh": lambda g: None,
    "one word": lambda g: g.rand(1),
    "most of a block": lambda g: g.rand(623),
    "a block": lambda g: g.rand(624),
    "more than a block": lambda g: g.rand(625),
    "a cached normal": lambda g: g.randn(3),
    "a cached normal at the end of a block": lambda g: (g.randn(1), g.rand(620)),
    "a cached normal was used": lambda g: g.randn(4),
}


def and_now(generator: TorchGenerator) -> list[np.ndarray]:
    return [generator.randn(3), generator.rand(700), generator.randn(20, dtype="d"), generator.dropout_mask(0.5, 9)]


def assert_same_future(a: TorchGenerator, b: TorchGenerator) -> None:
    for ours, theirs in zip(and_now(a), and_now(b), strict=True):
        assert_same_bits(ours, theirs)


# ---- state ---------------------------------------------------------------------------------------------------------
@pytest.mark.promise("PyTorch's generator")
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("seed", [0, 123, -7])
def test_the_state_can_be_exchanged_with_torch(torch: types.ModuleType, seed: int, place: str) -> None:
    generator = TorchGenerator(seed)
    PLACES[place](generator)
    torch.set_rng_state(torch.from_numpy(generator.get_state()))
    np.testing.assert_array_equal(torch.get_rng_state().numpy(), generator.get_state())
    assert torch.initial_seed() == generator.initial_seed() == seed % 2**64
    assert_same_bits(generator.randn(3), torch.randn(3).numpy())
    assert_same_bits(generator.rand(700), torch.rand(700).numpy())

    other = TorchGenerator(999)
    torch.manual_seed(seed)
    torch.randn(5)
    other.set_state(torch.get_rng_state())  # a tensor is accepted
    assert other.initial_seed() == seed % 2**64
    assert_same_bits(other.randn(3), torch.randn(3).numpy())
    assert_same_bits(other.rand(700), torch.rand(700).numpy())
    np.testing.assert_array_equal(other.get_state(), torch.get_rng_state().numpy())


@pytest.mark.parametrize("place", PLACES)
def test_the_state_has_the_bytes_of_torch(torch: types.ModuleType, place: str) -> None:
    class Twin:
        """The generator's methods, computed by torch."""

        rand = staticmethod(torch.rand)
        randn = staticmethod(torch.randn)

    generator = TorchGenerator(31)
    torch.manual_seed(31)
    PLACES[place](generator)
    PLACES[place](Twin())  # type: ignore[arg-type]
    np.testing.assert_array_equal(generator.get_state(), torch.get_rng_state().numpy())


def broken_states() -> dict[str, np.ndarray]:
    state = TorchGenerator(3).get_state()
    result = {"seeded": state.copy(), "left": state.copy(), "next": state.copy(), "word": state.copy()}
    result["seeded"][12] = 0
    result["left"][8] = 7
    result["next"][16:18] = 255
    result["word"][24 + 8 * 500 + 5] = 1
    return result


@pytest.mark.parametrize("what", broken_states())
def test_an_inconsistent_state_is_refused(what: str) -> None:
    generator = TorchGenerator(5)
    before = generator.get_state()
    with pytest.raises(ValueError, match="state is not the state of a torch CPU generator"):
        generator.set_state(broken_states()[what])
    np.testing.assert_array_equal(generator.get_state(), before)


def test_a_state_of_another_size_or_dtype_is_refused() -> None:
    generator = TorchGenerator(5)
    with pytest.raises(ValueError, match="state must have 5056 bytes, got 5048"):
        generator.set_state(generator.get_state()[:5048])
    with pytest.raises(TypeError, match="state must be uint8, got int64"):
        generator.set_state(generator.get_state().astype(np.int64))


# ---- seeds ---------------------------------------------------------------------------------------------------------
def test_seeds_are_those_of_torch_and_others_are_refused() -> None:
    assert TorchGenerator(-1).initial_seed() == 2**64 - 1
    assert TorchGenerator(-(2**63)).initial_seed() == 2**63
    assert TorchGenerator(np.int8(-1)).initial_seed() == 2**64 - 1  # type: ignore[arg-type]
    assert_same_bits(TorchGenerator(5).rand(9), TorchGenerator(2**32 + 5).rand(9))
    for seed in (2**64, -(2**63) - 1, 10**30):
        with pytest.raises(ValueError, match=r"seed must be in -2\*\*63 <= seed < 2\*\*64, got"):
            TorchGenerator(seed)
    for wrong in (True, np.True_, 1.0, "1", None):
        with pytest.raises(TypeError, match="seed must be an int, got"):
            TorchGenerator(wrong)  # type: ignore[arg-type]
    for word in ("ATEN", "", None, 3):
        if word is not None:
            with pytest.raises(ValueError, match="dropout must be 'aten' or 'mkl', got"):
                TorchGenerator(1, word)  # type: ignore[arg-type]


def test_manual_seed_seeds_the_default_generator() -> None:
    generator = cattn.manual_seed(123)
    assert generator is cattn.random.default_generator() is cattn.manual_seed(123)
    assert_same_bits(generator.rand(5), TorchGenerator(123).rand(5))
    with pytest.raises(ValueError, match="seed must be in"):
        cattn.manual_seed(2**64)
    assert_same_future(generator, copy.copy(generator))


def test_the_default_generator_starts_from_entropy() -> None:
    code = "import cattn.random as r; print(r.default_generator().initial_seed())"
    seeds = {subprocess.run([sys.executable, "-c", code], check=True, capture_output=True).stdout for _ in range(3)}
    assert len(seeds) == 3


# ---- copies --------------------------------------------------------------------------------------------------------
class Named(TorchGenerator):
    """A subclass with an attribute of its own."""

    label: str


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("stream", ["aten", "mkl"])
def test_copies_continue_independently(place: str, stream: Any) -> None:
    generator = TorchGenerator(8, stream)
    PLACES[place](generator)
    copies = [copy.copy(generator), copy.deepcopy(generator)]
    copies += [pickle.loads(pickle.dumps(generator, protocol)) for protocol in range(pickle.HIGHEST_PROTOCOL + 1)]
    expected = and_now(generator)
    for other in copies:
        assert type(other) is TorchGenerator
        assert other.dropout == stream
        for ours, theirs in zip(and_now(other), expected, strict=True):
            assert_same_bits(ours, theirs)


def test_deepcopy_keeps_one_generator_one() -> None:
    generator = TorchGenerator(8)
    first, second = copy.deepcopy([generator, generator])
    assert first is second
    assert first is not generator


def test_a_pickled_subclass_keeps_its_attributes() -> None:
    generator = Named(8, "mkl")
    generator.label = "weights"
    generator.rand(3)
    other = pickle.loads(pickle.dumps(generator))
    assert type(other) is Named
    assert other.label == "weights"
    assert_same_future(generator, other)
    cattn.dropout(np.ones(3), rng=generator)


def test_repr_and_attributes_are_documented_ones() -> None:
    assert repr(TorchGenerator(123)) == "TorchGenerator(123)"
    assert repr(TorchGenerator(-1, "mkl")) == "TorchGenerator(18446744073709551615, 'mkl')"
    assert repr(TorchGenerator(1).manual_seed(7)) == "TorchGenerator(7)"
    assert TorchGenerator(1, "mkl").manual_seed(7).dropout == "mkl"
    with pytest.raises(AttributeError):
        TorchGenerator(1).seed = 3  # type: ignore[attr-defined]


# ---- threads and signals -------------------------------------------------------------------------------------------
@pytest.mark.parametrize("n", [100, 60000], ids=["with the GIL", "without"])
def test_calls_of_several_threads_draw_the_stream_once(n: int) -> None:
    """Every call draws consecutive numbers; all calls together draw the stream."""
    calls, workers = 12, 4
    generator, results, start = TorchGenerator(77), list[np.ndarray](), threading.Barrier(workers)

    def work() -> None:
        start.wait()
        for _ in range(calls):
            results.append(generator.rand(n))

    threads = [threading.Thread(target=work) for _ in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expected = TorchGenerator(77).rand(calls * workers, n)
    assert sorted(r.tobytes() for r in results) == sorted(row.tobytes() for row in expected)


@pytest.fixture
def alarm() -> Iterator[Callable[[Callable[[], None]], None]]:
    before = signal.getsignal(ALARM)

    def arm(action: Callable[[], None]) -> None:
        signal.signal(ALARM, lambda *_: action())
        set_alarm(0.03)

    yield arm
    set_alarm(0)
    signal.signal(ALARM, before)


@pytest.mark.promise("failed calls")
def test_an_interrupted_draw_leaves_the_generator_unchanged(alarm: Callable[[Callable[[], None]], None]) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    generator = TorchGenerator(12)
    generator.randn(3)
    before = generator.get_state()
    alarm(interrupt)
    with pytest.raises(KeyboardInterrupt):
        generator.randn(1 << 25, dtype="d")
    np.testing.assert_array_equal(generator.get_state(), before)
    assert generator.rand(3).shape == (3,)  # it is not locked


def test_a_signal_handler_cannot_use_a_generator_that_is_drawing(alarm: Callable[[Callable[[], None]], None]) -> None:
    other = TorchGenerator(13)
    said = drawn = None

    def handler() -> None:
        nonlocal drawn
        drawn = other.rand(2)
        generator.rand(2)

    for _ in range(5):  # on a busy machine the alarm may come before the draw
        generator = TorchGenerator(12)
        alarm(handler)
        try:
            generator.randn(1 << 25, dtype="d")
        except RuntimeError as error:
            said = str(error)
            break
    assert said == "this TorchGenerator is drawing already; a signal handler must not use it"
    assert drawn is not None
    assert_same_future(generator, TorchGenerator(12))


# ---- errors --------------------------------------------------------------------------------------------------------
WRONG: list[tuple[type[Exception], str, Draw]] = [
    (TypeError, "dtype must be float32 or float64, got float16", lambda g: g.rand(3, dtype=np.float16)),
    (TypeError, "dtype must be float32 or float64, got None", lambda g: g.randn(3, dtype=None)),
    (TypeError, "dtype must be float32 or float64, got int64", lambda g: g.uniform(0, 1, 3, dtype=int)),
    (TypeError, "dtype must be float32 or float64, got >f4", lambda g: g.linear(3, 2, dtype=">f4")),
    (TypeError, "size must be ints or one tuple of ints, got float", lambda g: g.rand(2.0)),
    (TypeError, "size must be ints or one tuple of ints, got bool", lambda g: g.randn(True)),
    (TypeError, "size must be ints or one tuple of ints, got str", lambda g: g.dropout_mask(0.5, (2, "3"))),
    (TypeError, "size must be ints or one tuple of ints, got tuple", lambda g: g.rand((2, 3), (4,))),
    (ValueError, "size must not be negative, got -1", lambda g: g.rand(3, -1)),
    (ValueError, "out_features must be at least 0, got -2", lambda g: g.linear(3, -2)),
    (TypeError, "in_features must be an int, got float", lambda g: g.linear(3.0, 2)),
    (ValueError, "array is too big|too large|maximum", lambda g: g.rand(2**40, 2**40)),
    (ValueError, "low must not be above high, got low=2 and high=1", lambda g: g.uniform(2, 1, 3)),
    (ValueError, "low must be finite", lambda g: g.uniform(np.nan, 1, 3)),
    (ValueError, "high must be finite", lambda g: g.uniform(0, np.inf, 3)),
    (ValueError, r"low=0 to high=1e\+39 is too wide for float32", lambda g: g.uniform(0, 1e39, 3)),
    (ValueError, r"low=-3e\+38 to high=3e\+38 is too wide for float32", lambda g: g.uniform(-3e38, 3e38, 3)),
    (ValueError, r"low=-1e\+308 to high=1e\+308 is too wide", lambda g: g.uniform(-1e308, 1e308, dtype="d")),
    (TypeError, "low must be a real number, got str", lambda g: g.uniform("0", 1, 3)),
    (ValueError, r"p must be in \[0, 1\], got 1.5", lambda g: g.bernoulli(1.5, 3)),
    (ValueError, r"p must be in \[0, 1\], got -0.1", lambda g: g.dropout_mask(-0.1, 3)),
    (ValueError, "p must be finite", lambda g: g.dropout_mask(np.nan, 3)),
    (ValueError, r"p must be in \[0, 1\] everywhere", lambda g: g.bernoulli(np.array([0.5, np.nan]))),
    (ValueError, r"p must be in \[0, 1\] everywhere", lambda g: g.bernoulli([0.5, 2])),
    (TypeError, "size is that of p", lambda g: g.bernoulli([0.5], 1)),
    (TypeError, "p has dtype complex128", lambda g: g.bernoulli([0.5j])),
    (TypeError, "randint needs high and size", lambda g: g.randint(10)),
    (TypeError, "randint needs high and size", lambda g: g.randint(size=(3,))),
    (ValueError, "low must be below high, got low=5 and high=5", lambda g: g.randint(5, 5, (2,))),
    (ValueError, "low must be below high, got low=0 and high=-3", lambda g: g.randint(-3, (2,))),
    (TypeError, "low must be an int, got float", lambda g: g.randint(0.0, 5, (2,))),
    (TypeError, "high must be an int, got bool", lambda g: g.randint(True, (2,))),
    (ValueError, r"high must be in -2\*\*63", lambda g: g.randint(0, 2**63, (2,))),
    (TypeError, "dtype must be an integer type, got float32", lambda g: g.randint(3, (2,), dtype="f")),
    (ValueError, "dtype uint8 cannot hold low=0 to high=257", lambda g: g.randint(257, (2,), dtype=np.uint8)),
    (ValueError, r"p must be in \[0, 1\], got 2", lambda g: cattn.dropout(np.ones(3), 2, rng=g)),
    (TypeError, "x has dtype complex128", lambda g: cattn.dropout([1j], rng=g)),
    (ValueError, "out", lambda g: cattn.dropout(np.ones(3), rng=g, out=np.ones(4))),
]


@pytest.mark.parametrize(("kind", "message", "call"), WRONG)
def test_a_call_that_raises_leaves_the_generator_unchanged(kind: type[Exception], message: str, call: Draw) -> None:
    generator = TorchGenerator(6)
    generator.randn(1)
    before = generator.get_state()
    with pytest.raises(kind, match=message):
        call(generator)
    np.testing.assert_array_equal(generator.get_state(), before)


def test_private_methods_check_their_output_arrays() -> None:
    generator = TorchGenerator(6)
    for out in (np.ones(3, int), np.ones((4, 4))[:, ::2], np.ones(3, ">f8"), [1.0], np.broadcast_to(1.0, (2,))):
        with pytest.raises(TypeError, match="out is not an array that can be filled"):
            generator._uniform(out, 0, 1)  # type: ignore[arg-type]
    for method, n in itertools.product(("_uniform", "_normal", "_linear", "_seed", "_bernoulli"), (0, 7)):
        with pytest.raises(TypeError, match="takes exactly"):
            getattr(generator, method)(*[None] * n)


# ---- calls that raise after the draw -------------------------------------------------------------------------------
Q = np.random.default_rng(3).standard_normal((2, 4, 5), dtype=np.float32)
WIDE = np.broadcast_to(Q, (3, 2, 4, 5))  # its gradient is summed after the core has computed it
LSE = np.zeros((3, 2, 4), np.float32)


def no_memory(*_: object, **__: object) -> Any:
    raise MemoryError


def unmoved(generator: TorchGenerator, kind: type[BaseException], call: Callable[[], object]) -> None:
    before = generator.get_state()
    with pytest.raises(kind):
        call()
    np.testing.assert_array_equal(generator.get_state(), before)


def test_no_memory_for_rounded_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights of halves are rounded after the generator has drawn, by the last conversion of the call."""
    generator, x, weights = TorchGenerator(6), Q.astype(np.float16), (2, 4, 4)
    convert, shapes = arrays._without_repetition, list[tuple[int, ...]]()

    def fail_for_weights(array: np.ndarray) -> np.ndarray:
        shapes.append(array.shape)
        return no_memory() if array.shape == weights else convert(array)

    def call(rng: TorchGenerator) -> np.ndarray:
        return cattn.attention_weights(x, x, stage="dropout", dropout_p=0.5, rng=rng)

    monkeypatch.setattr(arrays, "_without_repetition", fail_for_weights)
    unmoved(generator, MemoryError, lambda: call(generator))
    assert shapes[-1] == weights
    monkeypatch.undo()
    np.testing.assert_array_equal(call(generator), call(TorchGenerator(6)))


def test_no_memory_for_the_sums_of_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = TorchGenerator(6)
    monkeypatch.setattr("cattn.functional._derivatives.sum_to", no_memory)
    call = functools.partial(cattn.attention_backward, WIDE, Q, Q, WIDE, WIDE, LSE, dropout_p=0.5, merged=True)
    unmoved(generator, MemoryError, lambda: call(rng=generator))


def test_gradients_read_their_arguments_once() -> None:
    class Lazy:
        reads = 0

        def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
            self.reads += 1
            if self.reads > 1:
                raise ValueError("read once more")
            return Q

    generator, lazy = TorchGenerator(6), Lazy()
    cattn.attention_backward(Q, lazy, Q, Q, Q, LSE[0], dropout_p=0.5, rng=generator, merged=True)
    assert lazy.reads == 1


def stop(*_: object) -> None:
    raise ZeroDivisionError


@pytest.mark.parametrize("name", ["rand", "dropout", "attention"])
def test_a_handler_that_raises_during_a_short_call(name: str) -> None:
    """Shorter than the 20 ms between two polls: the handler runs when the core is done, before the generator moves."""
    generator = TorchGenerator(6)
    x, q = np.ones(400_000, np.float32), np.ones((200, 200), np.float32)
    call: Callable[[], object] = {
        "rand": lambda: generator.rand(700_000),
        "dropout": lambda: cattn.dropout(x, 0.5, rng=generator),
        "attention": lambda: cattn.attention_weights(q, q, stage="dropout", dropout_p=0.5, rng=generator),
    }[name]
    duration = min(timeit.repeat(call, number=1, repeat=10))
    before = generator.get_state()
    handler = signal.signal(ALARM, stop)
    stopped = 0
    try:
        for step in range(80):
            generator.set_state(before)
            try:
                set_alarm(duration * (step % 4 + 1) / 6)
                call()
                set_alarm(0)
            except ZeroDivisionError:
                stopped += 1
                np.testing.assert_array_equal(generator.get_state(), before)
    finally:
        set_alarm(0)
        signal.signal(ALARM, handler)
    assert stopped > 0


def test_errors_of_sizes_and_dtypes_name_the_argument() -> None:
    g = cattn.TorchGenerator(1)
    for size in ((2**62, 2**62), (2**63,), (1,) * 65):
        with pytest.raises(ValueError, match=r"^size \("):
            g.rand(*size)
    with pytest.raises(ValueError, match=r"^size \("):
        g.dropout_mask(0.5, 2**63)
    with pytest.raises(TypeError, match="size must be ints or one tuple of ints, got ndarray"):
        g.rand(np.ones((2, 2), int))
    with pytest.raises(TypeError, match="dtype must be an integer type, got 'zz'"):
        g.randint(5, (2,), dtype="zz")
