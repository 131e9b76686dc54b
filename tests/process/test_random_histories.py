"""A hypothesis state machine over the whole public API: the same work gives the same bits, whatever was done before.

A piece of work from tests/support/functions.py is done once. Later it is repeated after other work and after
refused calls, with other numbers of threads, kernel tables and paths, and must give the same result. Objects with
state are compared with a model: a cache with lists of rows, a generator with one that replays its history, a layer with
its copies.
"""

from __future__ import annotations

import copy
import pickle
from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import cattn
from cattn import _cattn, reference
from conftest import table_names
from support import PATHS, assert_same_bits, bits, functions, in_contract
from support.calls import drawn
from support.functions import Results, Work, arrays
from support.wrong_calls import REFUSED, Row, refused

TABLES = [t["name"] for t in _cattn._isa_list() if t["usable"] and in_contract(t["name"])]
HEADS, DEPTH, MOST = 2, 4, 24  # of the cache
assert set(TABLES) <= set(table_names())


def same(actual: Results, right: Results, what: str) -> None:
    for a, b in zip(actual, right, strict=True):
        assert_same_bits(a, b, what)


def frozen(inputs: dict[str, Any]) -> dict[str, np.ndarray]:
    return {name: a.copy() for name, a in inputs.items() if isinstance(a, np.ndarray)}


@pytest.mark.promise("history")
class Histories(RuleBasedStateMachine):
    """A program that uses cattn. Each rule is a step that it may take next."""

    @initialize(
        batch=st.sampled_from([(), (1,), (3,)]),
        seed=st.integers(0, 2**64 - 1),
        dtype=st.sampled_from(["float32", "int8", "float8_e4m3fn"]),
    )
    def begin(self, batch: tuple[int, ...], seed: int, dtype: str) -> None:
        self.done: list[tuple[Work, Results, dict[str, np.ndarray]]] = []
        self.threads = cattn.get_num_threads()
        self.cache = cattn.KVCache(batch, HEADS, MOST, DEPTH, dtype=dtype)
        self.rows: list[list[np.ndarray]] = [[] for _ in range(int(np.prod(batch)))]  # keys of each sequence
        self.seed, self.history = seed, list[int]()  # of the generator: its seed and the sizes of its draws
        self.generator = cattn.TorchGenerator(seed)
        self.layer = cattn.MultiHeadAttention(3, 8, MOST, 0.3, HEADS, rng=seed % 2**32)
        self.counter = 0

    def teardown(self) -> None:
        cattn.set_num_threads(None)
        _cattn._set_path("auto")
        _cattn._set_isa(None)

    # ---- repeat earlier work ----
    @rule(work=drawn(functions.work))
    def do(self, work: Work) -> None:
        before = frozen(work.arguments)
        self.done.append((work, work.run(), before))

    @precondition(lambda self: self.done)
    @rule(data=st.data(), threads=st.sampled_from([None, 1, 2, 4]))
    def do_again(self, data: st.DataObject, threads: int | None) -> None:
        work, right, _ = data.draw(st.sampled_from(self.done))
        if threads is None:
            same(work.run(), right, work.name)
        else:
            with cattn.num_threads(threads):
                same(work.run(), right, f"{work.name}, {threads} threads")

    @invariant()
    def inputs_are_untouched(self) -> None:
        for work, _, before in getattr(self, "done", [])[-2:]:
            for name, a in before.items():
                now = np.ascontiguousarray(work.arguments[name])
                assert (bits(a) == bits(now)).all(), f"{work.name} changed {name}"

    # ---- settings of the process ----
    @rule(name=st.sampled_from(TABLES))
    def take_table(self, name: str) -> None:
        _cattn._set_isa(name)
        assert _cattn._get_isa() == name

    @rule(name=st.sampled_from(PATHS[:4]))
    def take_path(self, name: str) -> None:
        _cattn._set_path(name)

    @rule(n=st.sampled_from([None, 1, 2, 3]))
    def set_threads(self, n: int | None) -> None:
        cattn.set_num_threads(n)
        self.threads = cattn.get_num_threads()
        assert n in (None, self.threads)

    @rule()
    def release(self) -> None:
        assert _cattn._release()

    @invariant()
    def threads_stay_set(self) -> None:
        assert cattn.get_num_threads() == getattr(self, "threads", cattn.get_num_threads())

    @rule(case=st.sampled_from(REFUSED))
    def be_refused(self, case: tuple[str, Row]) -> None:
        """A refused call changes no state: all other rules and invariants go on comparing it."""
        message = refused(*case)
        assert message

    # ---- the cache; its model is a list of rows for each sequence ----
    def numbers(self, *shape: int) -> np.ndarray:
        self.counter += 1
        return np.random.default_rng(self.counter).standard_normal(shape, np.float32)

    def stored(self, rows: list[np.ndarray], sign: int = 1) -> np.ndarray:
        """Return the numbers (HEADS, n, DEPTH) that the cache keeps of rows: each row is quantized alone."""
        exact = np.array(rows, np.float32).reshape(len(rows), HEADS, DEPTH).swapaxes(0, 1) * np.float32(sign)
        if not isinstance(self.cache.k, cattn.Quantized):
            return exact
        return cattn.dequantize(cattn.quantize(exact, dtype=self.cache.dtype))

    @rule(count=st.integers(0, 9))
    def append(self, count: int) -> None:
        key = self.numbers(*self.cache.batch_shape, HEADS, count, DEPTH)
        if max(map(len, self.rows), default=0) + count > MOST:
            with np.testing.assert_raises_regex(ValueError, "the cache is full"):
                self.cache.append(key, -key)
            return
        self.cache.append(key, -key)
        for rows, new in zip(self.rows, key.reshape(len(self.rows), HEADS, count, DEPTH), strict=True):
            rows += list(new.swapaxes(0, 1))

    @rule(data=st.data(), ragged=st.booleans())
    def truncate(self, data: st.DataObject, ragged: bool) -> None:
        lengths = [len(rows) for rows in self.rows]
        if ragged:
            new = [data.draw(st.integers(0, n)) for n in lengths]
            self.cache.truncate(np.reshape(new, self.cache.batch_shape))
        else:
            limit = data.draw(st.integers(0, max(lengths)))
            new = [min(n, limit) for n in lengths]
            self.cache.truncate(limit)
        for rows, n in zip(self.rows, new, strict=True):
            del rows[n:]

    @rule(data=st.data(), shared=st.booleans())
    def keep(self, data: st.DataObject, shared: bool) -> None:
        """Keep tokens in any order, some of them several times."""
        lengths = [len(rows) for rows in self.rows]
        if shared:
            least = min(lengths)
            chosen = data.draw(st.lists(st.integers(0, least - 1), max_size=MOST)) if least else []
            kept, indices = [chosen] * len(lengths), chosen
        else:
            kept = [data.draw(st.lists(st.integers(0, n - 1), max_size=MOST)) if n else [] for n in lengths]
            indices = kept if self.cache.batch_shape else kept[0]
        self.cache.keep(indices)
        self.rows = [[rows[i] for i in chosen] for rows, chosen in zip(self.rows, kept, strict=True)]

    @rule(data=st.data())
    def reorder(self, data: st.DataObject) -> None:
        if self.cache.batch_shape:
            index = st.integers(0, len(self.rows) - 1)
            entries = data.draw(st.lists(index, min_size=1, max_size=4))
            self.cache.reorder(entries)
            self.rows = [list(self.rows[i]) for i in entries]

    @rule()
    def reset(self) -> None:
        self.cache.reset()
        for rows in self.rows:
            rows.clear()

    @rule(
        how=st.sampled_from(
            [cattn.KVCache.fork, copy.copy, copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache))]
        )
    )
    def copy_cache(self, how: Any) -> None:
        """Continue with the copy. Overwrite the original, so that shared memory would show."""
        old, self.cache = self.cache, how(self.cache)
        old.reset()
        old.append(*[np.full((*old.batch_shape, HEADS, MOST, DEPTH), 1e20, np.float32)] * 2)

    @rule(bad=st.sampled_from(["shape", "dtype", "NaN", "tokens", "truncate", "keep", "reorder"]))
    def misuse_cache(self, bad: str) -> None:
        if bad == "NaN" and not isinstance(self.cache.k, cattn.Quantized):  # only a scale cannot be NaN
            return
        key = np.ones((*self.cache.batch_shape, HEADS, 1, DEPTH), np.float32)
        calls: dict[str, Any] = {
            "shape": lambda: self.cache.append(key[..., :1], key),
            "dtype": lambda: self.cache.append(key.astype(int), key),
            "NaN": lambda: self.cache.append(key, key * np.nan),
            "tokens": lambda: self.cache.append(key, key.repeat(2, -2)),
            "truncate": lambda: self.cache.truncate(MOST + 1),
            "keep": lambda: self.cache.keep([0, MOST]),
            "reorder": lambda: self.cache.reorder([0, -1]),
        }
        with np.testing.assert_raises((TypeError, ValueError)):
            calls[bad]()

    @invariant()
    def cache_holds_the_rows(self) -> None:
        rows = getattr(self, "rows", None)
        if rows is None:
            return
        assert self.cache.lengths.reshape(-1).tolist() == [len(r) for r in rows]
        longest = max(map(len, rows))
        stores = [
            (cattn.dequantize(a) if isinstance(a, cattn.Quantized) else a).reshape(len(rows), HEADS, longest, DEPTH)
            for a in (self.cache.k, self.cache.v)
        ]
        for i, sequence in enumerate(rows):
            for store, sign in zip(stores, (1, -1), strict=True):
                held = store[i, :, : len(sequence)]
                np.testing.assert_array_equal(held, self.stored(sequence, sign))

    @precondition(lambda self: min(map(len, self.rows)) > 0)
    @rule()
    def attend(self) -> None:
        """Attend with the last token: each sequence has the bits it has alone, and the values of the reference."""
        query = self.numbers(*self.cache.batch_shape, HEADS, 1, DEPTH)
        out = cattn.causal_attention(query, self.cache, enable_gqa=True)
        for i, one in enumerate(out.reshape(-1, HEADS, 1, DEPTH)):
            keys, values = self.stored(self.rows[i]), self.stored(self.rows[i], -1)
            call: dict[str, Any] = {"query": query.reshape(-1, HEADS, 1, DEPTH)[i], "key": keys, "value": values}
            alone = cattn.scaled_dot_product_attention(**call, enable_gqa=True)
            assert_same_bits(one, alone, f"sequence {i}")
            np.testing.assert_allclose(
                one, reference.scaled_dot_product_attention(**call, enable_gqa=True), rtol=1e-5, atol=1e-6
            )

    # ---- the generator; its model replays all its draws ----
    def replayed(self) -> cattn.TorchGenerator:
        again = cattn.TorchGenerator(self.seed)
        for n in self.history:
            again.rand(n)
        return again

    @rule(n=st.sampled_from([1, 15, 16, 623, 625]))
    def draw(self, n: int) -> None:
        expected = self.replayed().rand(n)
        assert_same_bits(self.generator.rand(n), expected)
        self.history.append(n)

    @rule(seed=st.integers(0, 2**64 - 1))
    def reseed(self, seed: int) -> None:
        assert self.generator.manual_seed(seed) is self.generator
        self.seed, self.history = seed, []

    @rule()
    def hand_over(self) -> None:
        """Continue with another generator that takes over the state."""
        other = cattn.TorchGenerator(1)
        other.randn(3)
        other.set_state(self.generator.get_state())
        self.generator = other

    @rule(seed=st.integers(0, 2**32 - 1))
    def seed_them_all(self, seed: int) -> None:
        """manual_seed() seeds the generator that layers use without an rng."""
        cattn.manual_seed(seed)
        first = cattn.Linear(3, 2).weight
        assert_same_bits(first, cattn.Linear(3, 2, rng=seed).weight)

    @rule()
    def misuse_generator(self) -> None:
        bad = np.zeros(5056, np.uint8)
        with np.testing.assert_raises(ValueError):
            self.generator.set_state(bad)
        x = np.ones((2, 3), np.float32)
        with np.testing.assert_raises(ValueError):
            cattn.dropout(x, 0.5, rng=self.generator, out=np.empty((3, 2), np.float32))

    @invariant()
    def generator_stands_where_it_should(self) -> None:
        if hasattr(self, "generator"):
            assert_same_bits(self.generator.get_state(), self.replayed().get_state())

    # ---- the layer, copied in every way ----
    @rule(tokens=st.integers(1, 9), training=st.booleans(), how=st.sampled_from(["state_dict", "pickle", "deepcopy"]))
    def copy_layer(self, tokens: int, training: bool, how: str) -> None:
        if how == "state_dict":
            other = cattn.MultiHeadAttention(3, 8, MOST, 0.3, HEADS, rng=1)
            other.load_state_dict(self.layer.state_dict())
            training = False  # a state_dict holds no generator
        else:
            other = copy.deepcopy(self.layer) if how == "deepcopy" else pickle.loads(pickle.dumps(self.layer))
        for layer in (self.layer, other):
            layer.train(training)
            layer.zero_grad()
        x = self.numbers(tokens, 3)
        same(*(arrays(layer(x, return_weights=True)) for layer in (self.layer, other)), how)
        if training:
            grad_out = self.numbers(tokens, 8)
            same(*([layer.backward(grad_out), *layer.grads.values()] for layer in (self.layer, other)), how)
        self.layer = other

    @rule()
    def load_nonsense(self) -> None:
        before = {name: a.copy() for name, a in self.layer.state_dict().items()}
        state = dict(self.layer.state_dict())
        state["W_value.weight"] = np.zeros((1, 1), np.float32)
        with np.testing.assert_raises(ValueError):
            self.layer.load_state_dict(state)
        same(list(self.layer.state_dict().values()), list(before.values()), "a load that failed")


# Twenty seconds at most in the suite; HYPOTHESIS_PROFILE=long may run for a night.
_long = hypothesis.settings.get_current_profile_name() == "long"
Histories.TestCase.settings = hypothesis.settings(
    max_examples=1000 if _long else 80, stateful_step_count=60 if _long else 40
)
test_results_do_not_depend_on_the_history = Histories.TestCase
