"""Hostile sizes, numbers and files: an error or the right answer, no access outside the arrays, and Ctrl-C works.

Arrays that repeat one element (stride 0) can have any size without memory, so sizes are no measure of memory. The
promises are in SECURITY.md.
"""

from __future__ import annotations

import io
import itertools
import signal
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.lib.stride_tricks import as_strided

import cattn
from cattn import reference
from cattn._cli.files import InputError, load
from cattn.nn._files import load_arrays, save_arrays
from support import ROOT
from support.calls import Call, Function, Limits, again, from_rng
from support.functions import BY_BLAS, FUNCTIONS, OF_THE_PROCESS, arrays, assert_near
from support.processes import ALARM, run_command, set_alarm

F = np.float32
MOST = 2**48  # the limit of T_q, T_k, head_dim and d_v


def repeated(*shape: int, dtype: Any = F) -> np.ndarray:
    """Return an array that repeats one element, all strides 0."""
    return as_strided(np.ones(1, dtype), shape, (0,) * len(shape))


def torch_dropout() -> dict[str, Any]:
    return {"dropout_p": 0.5, "rng": cattn.TorchGenerator(1)}


attend, backward = cattn.scaled_dot_product_attention, cattn.attention_backward
X = np.ones((3, 2), F)
# For these shapes a product of sizes wraps around to 0 or a small number in 64 bits: scratch of that size is too small.
WRAPS = 2**64 // 12 + 1
TOO_LARGE: dict[str, Callable[[], object]] = {
    "packed query": lambda: attend(repeated(1, 2**59), repeated(1, 2**59), np.ones((1, 1), F)),
    "packed query, weights": lambda: cattn.attention_weights(repeated(1, 2**59), repeated(1, 2**59)),
    "packed query, rank": lambda: cattn.explain(repeated(1, 2**59), repeated(1, 2**59), np.ones((1, 1), F)),
    "a row of halves": lambda: attend(*[repeated(1, 2**60, dtype=ml_dtypes.bfloat16)] * 2, np.ones((1, 1), F)),
    "values without queries": lambda: attend(np.ones((0, 1), F), np.ones((1, 1), F), repeated(1, 2**59)),
    "bits of a serial stream": lambda: attend(
        np.ones((20, 0), np.float16), *[repeated(WRAPS, 0, dtype=np.float16)] * 2, **torch_dropout()
    ),
    "bits drawn for gradients": lambda: backward(
        np.ones((1, 0), np.float16),
        np.ones((1, 0), np.float16),
        *[repeated(WRAPS, 0, dtype=np.float16)] * 2,
        np.ones((1, 0), np.float16),
        np.ones(1, F),
        **torch_dropout(),
    ),
    "pairs": lambda: cattn.explain(repeated(2**40, 1), repeated(2**40, 1), repeated(2**40, 1)),
    "batch": lambda: attend(repeated(2**31, 1, 2**10, 0), repeated(1, 2**31, 1, 0), np.ones((1, 1, 1, 0), F)),
    "packed sequences": lambda: cattn.varlen_attention(
        *[repeated(2**28, 2**30, 0)] * 3, np.array([0, 2**28]), np.array([0, 2**28])
    ),
}


@pytest.mark.promise("sizes")
@pytest.mark.parametrize("name", TOO_LARGE)
def test_sizes_that_would_overflow_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"is too large$"):
        TOO_LARGE[name]()


def test_a_batch_with_too_many_states_is_named() -> None:
    query, key, value = (repeated(*batch, 8, 1, 1) for batch in ((2**30, 1), (1, 2**30), (1, 1)))
    with pytest.raises(ValueError, match="query, key, value and state broadcast to a batch that is too large"):
        cattn.linear_attention(query, key, value)


@pytest.mark.parametrize("last", [MOST, MOST + 1])
def test_the_largest_sizes_are_accepted_and_larger_ones_refused(last: int) -> None:
    """Calls without rows or with an empty batch compute and allocate nothing, so they may have the largest sizes."""
    calls = [
        lambda: attend(np.ones((0, 1), F), np.ones((1, 1), F), repeated(1, last)).shape == (0, last),
        lambda: attend(repeated(0, last), repeated(1, last), np.ones((1, 1), F)).shape == (0, 1),
        lambda: attend(np.ones((0, 1), F), repeated(last, 1), repeated(last, 1)).shape == (0, 1),
        lambda: attend(repeated(0, last, 1), np.ones((0, 1, 1), F), np.ones((1, 1), F)).shape == (0, last, 1),
    ]
    for call in calls:
        if last == MOST:
            assert call()
        else:
            with pytest.raises(ValueError, match=str(last)):
                call()


NO_MEMORY: dict[str, Callable[[], object]] = {
    "scratch": lambda: attend(repeated(1, MOST), repeated(1, MOST), np.ones((1, 1), F)),
    "scratch of gradients": lambda: backward(
        X[:1], repeated(1, 2), repeated(MOST, 2), repeated(MOST, 2), X[:1], np.ones(1, F)
    ),
    "scratch of statistics": lambda: cattn.attention_statistics(repeated(1, MOST), repeated(1, MOST)),
    "softmax": lambda: cattn.softmax(repeated(2**60)),
    "masked_softmax": lambda: cattn.masked_softmax(repeated(2**60)),
    "dropout": lambda: cattn.dropout(repeated(2**60), 0.5, rng=1),
    "causal_mask": lambda: cattn.causal_mask(2**30, 2**31),
    "softmax_backward": lambda: cattn.softmax_backward(repeated(2**60), repeated(2**60)),
    "rope": lambda: cattn.rope(repeated(2**59, 2)),
    "rms_norm": lambda: cattn.rms_norm(repeated(2**60)),
    "linear": lambda: cattn.functional.linear(repeated(2**40, 1), repeated(2**20, 1)),
    "linear, long sums": lambda: cattn.functional.linear(repeated(9, 2**57), repeated(9, 2**57)),
    "linear_backward": lambda: cattn.functional.linear_backward(repeated(2**40, 2), None, repeated(2, 2**20)),
    "rms_norm_backward": lambda: cattn.rms_norm_backward(repeated(2**60), repeated(2**60)),
    "layer_norm": lambda: cattn.functional.layer_norm(repeated(2**60)),
    "layer_norm_backward": lambda: cattn.functional.layer_norm_backward(repeated(2**60), repeated(2**60)),
    "gelu": lambda: cattn.functional.gelu(repeated(2**60)),
    "silu_backward": lambda: cattn.functional.silu_backward(repeated(2**60), repeated(2**60)),
    "merge_attention": lambda: cattn.merge_attention([repeated(2**40, 2)] * 2, [repeated(2**40)] * 2),
    "merge_attention, without columns": lambda: cattn.merge_attention([repeated(2**40, 0)] * 2, [repeated(2**40)] * 2),
    "merge_attention, parts": lambda: cattn.merge_attention(repeated(2**40, 2), repeated(2**40)),
}


@pytest.mark.promise("sizes")
@pytest.mark.parametrize("name", NO_MEMORY)
def test_a_result_or_scratch_without_room_is_a_memory_error(name: str) -> None:
    with pytest.raises(MemoryError):
        NO_MEMORY[name]()


# Calls that would run for years although they produce no numbers: 2**40 queries without keys or values, and the like.
ENDLESS = {
    "queries without keys": "cattn.scaled_dot_product_attention(many, none, none[:, :0])",
    "queries without values": "cattn.scaled_dot_product_attention(many, one, one[:, :0])",
    "batch": "cattn.scaled_dot_product_attention(repeated(2**31, 1, 2**10, 1), one, one[:, :0])",
    "explain": "cattn.explain(many, one, one, is_causal='upper_left')",
    "gradients": "cattn.attention_backward(*[repeated(2**30, 0)] * 5, repeated(2**30))",
    "head_scores": "cattn.head_scores(repeated(2**20, 500, 500), np.arange(500))",
}
INTERRUPTED = """
import signal, sys
import numpy as np
import cattn
sys.path.insert(0, {tests!r})
from support.processes import ALARM, set_alarm
from numpy.lib.stride_tricks import as_strided

def repeated(*shape):
    return as_strided(np.ones(1, np.float32), shape, (0,) * len(shape))

many, one, none = repeated(2**40, 1), repeated(1, 1), repeated(0, 1)
signal.signal(ALARM, signal.default_int_handler)
set_alarm(0.3)
try:
    {call}
except KeyboardInterrupt:
    print("stopped")
"""


@pytest.mark.promise("Ctrl-C")
@pytest.mark.parametrize("name", ENDLESS)
def test_a_signal_stops_a_call_without_end(name: str) -> None:
    script = INTERRUPTED.format(call=ENDLESS[name], tests=str(ROOT / "tests"))
    done = run_command([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout == "stopped\n", done.stderr


LONG_STEPS: dict[str, Callable[[], object]] = {
    "a state of many rows": lambda: cattn.linear_attention(*[repeated(16, 2**20)] * 2, repeated(16, 1)),
    "a wide convolution": lambda: cattn.functional.causal_conv(repeated(1, 100), repeated(100, 2**19)),
}


@pytest.mark.promise("Ctrl-C")
@pytest.mark.parametrize("name", LONG_STEPS)
def test_signals_are_seen_within_one_long_step(name: str) -> None:
    """Signals come all the time, and handlers run about every 20 ms; a call without polls leaves one for its end."""
    seen: list[int] = []
    before = signal.signal(ALARM, lambda number, _: seen.append(number))
    set_alarm(1e-3, 1e-3)
    try:
        LONG_STEPS[name]()
    finally:
        set_alarm(0)
        signal.signal(ALARM, before)
    assert len(seen) >= 4


def without_size(call: Call, names: tuple[str, ...], axis: int) -> Call:
    """Return the call with nothing along an axis, counted from the end, of these arrays."""
    return call | {name: call[name].take([], axis=call[name].ndim - axis) for name in names}


def result_of(function: Function, call: Call) -> list[np.ndarray] | None:
    """Return the results, or None for a call that is refused."""
    try:
        return arrays(function(**again(call)))
    except (ValueError, TypeError):
        return None


def reference_of(name: str, call: Call) -> list[np.ndarray] | None:
    """Return the results of the reference, on the numbers of the arrays, or None if it has no such function."""
    if not hasattr(reference, name) or not isinstance(call.get("rng", 0), int):
        return None
    own = {"max_seqlen_q", "max_seqlen_k", "merged", "state_out", *(() if "lse" in call else ("out",))}
    return arrays(getattr(reference, name)(**{option: x for option, x in call.items() if option not in own}))


@pytest.mark.promise("sizes")
@pytest.mark.filterwarnings("ignore:Mean of empty slice", "ignore::cattn.CausalAlignmentWarning")
def test_a_size_of_0_in_some_arrays_alone_is_refused_or_right() -> None:
    """No heads, groups, rows, columns or batch in one array or in two, while the others have some."""
    for name, (function, make) in FUNCTIONS.items():
        if name in BY_BLAS | OF_THE_PROCESS:
            continue
        for seed in range(2):
            call = make(from_rng(np.random.default_rng(seed)), Limits((1, 2, 5), (3, 5), (2, 3)))
            some = [option for option, x in call.items() if isinstance(x, np.ndarray)]
            for names in [*itertools.combinations(some, 1), *itertools.combinations(some, 2)]:
                for axis in range(1, 1 + min(call[option].ndim for option in names)):
                    changed = without_size(call, names, axis)
                    if (found := result_of(function, changed)) is not None:
                        right = reference_of(name, changed) or result_of(function, changed)
                        assert right is not None
                        assert_near(*([x for x in each if x.ndim > 0] for each in (found, right)), 0.05)


MANY_NUMBERS = "np.lib.stride_tricks.sliding_window_view(np.zeros(2**18, np.int64), 2**17)"
WRONG_SHAPES = {
    name: f"cattn.scaled_dot_product_attention(*[np.ones((2, 3, 1), np.float32)] * 3, {name}={MANY_NUMBERS})"
    for name in ("query_seq_lengths", "key_value_seq_lengths", "key_value_seq_starts")
} | {
    "query_offset": f"cattn.masked_softmax(np.ones((2, 3, 3)), is_causal='upper_left', query_offset={MANY_NUMBERS})",
    "token_ids": f"cattn.head_scores(np.ones((1, 3, 3)), {MANY_NUMBERS})",
    "token_ids of others": f"cattn.head_scores(np.ones((4, 1, 1, 2**17)), {MANY_NUMBERS})",
    "cu_seqlens_q": f"cattn.varlen_attention(*[np.ones((3, 1, 1))] * 3, {MANY_NUMBERS}, [0, 3])",
}
# 2**34 numbers: reading them takes more processor time than the call may.
REFUSED = """
import time
import numpy as np
import cattn

before = time.process_time()
try:
    {call}
except ValueError as error:
    print(str(error).split()[0], time.process_time() - before < 4)
"""


@pytest.mark.promise("Ctrl-C")
@pytest.mark.parametrize("name", WRONG_SHAPES)
def test_a_wrong_shape_is_refused_before_its_elements_are_read(name: str) -> None:
    script = REFUSED.format(call=WRONG_SHAPES[name])
    done = run_command([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout in (f"{name.split()[0]} True\n", "weights True\n"), done.stderr


def test_numbers_that_repeat_are_read_once() -> None:
    cattn.head_scores(np.ones((4, 1, 1, 3)), repeated(4, 3, dtype=np.int64))
    lengths, x = repeated(2**34, dtype=np.int32), repeated(1, 1, 1)  # no rows: nothing is computed
    out = cattn.scaled_dot_product_attention(repeated(2**34, 0, 1), x, x, key_value_seq_lengths=lengths)
    assert out.shape == (2**34, 0, 1)


def test_a_mask_of_2_63_rows_without_columns_is_made_at_once() -> None:
    assert cattn.causal_mask(2**63 - 1, 0).shape == (2**63 - 1, 0)
    assert cattn.causal_mask(0, 2**63 - 1).shape == (0, 2**63 - 1)


@pytest.mark.parametrize("far", [2**61, -(2**61)])
@pytest.mark.parametrize("window", [None, (2**63 - 1, 2**63 - 1), (2**62, -1), (-1, 2**62)])
def test_far_positions_do_not_wrap_around(far: int, window: tuple[int, int] | None) -> None:
    """A query far after every key sees all keys, and one far before sees none."""
    q = np.arange(6, dtype=F).reshape(3, 2)
    out = attend(q, q, q, is_causal=True, query_offset=far, window_size=window)
    seen = far > 0 and (window is None or window[0] in (-1, 2**63 - 1, 2**62))
    expected = attend(q, q, q) if seen else np.zeros((3, 2), F)
    np.testing.assert_array_equal(out, expected)
    mask = cattn.causal_mask(3, 3, query_offset=far, window_size=window)
    assert mask.all() if seen else not mask.any()


OUT_OF_RANGE: dict[str, tuple[str, Callable[[], object]]] = {
    "query_offset": ("query_offset", lambda: attend(X, X, X, is_causal=True, query_offset=2**61 + 1)),
    "query_offset of each": ("query_offset", lambda: attend(X[None], X, X, query_offset=np.array([2**64 - 1]))),
    "window_size": ("window_size", lambda: attend(X, X, X, window_size=(2**63, 0))),
    "lengths": ("key_value_seq_lengths", lambda: attend(X, X, X, key_value_seq_lengths=2**64)),
    "cu_seqlens": (
        "cu_seqlens_q",
        lambda: cattn.varlen_attention(*[np.ones((3, 1, 2))] * 3, np.array([0, 2**64 - 1, 3], np.uint64), [0, 1, 3]),
    ),
    "cu_seqlens falling": (
        "cu_seqlens_k",
        lambda: cattn.varlen_attention(*[np.ones((3, 1, 2))] * 3, [0, 1, 2, 3], [0, 2, 1, 3]),
    ),
    "seed": ("rng", lambda: cattn.dropout(X, 0.5, rng=2**64)),
    "negative seed": ("rng", lambda: cattn.dropout(X, 0.5, rng=-1)),
    "seed of PyTorch": ("seed", lambda: cattn.TorchGenerator(2**64)),
    "threads": ("n must be", lambda: cattn.set_num_threads(2**31)),
}


@pytest.mark.parametrize("name", OUT_OF_RANGE)
def test_numbers_out_of_range_are_refused(name: str) -> None:
    argument, call = OUT_OF_RANGE[name]
    with pytest.raises(ValueError, match=argument):
        call()


# ---- files ---------------------------------------------------------------------------------------------------------
FIELDS = "{{'descr': {}, 'fortran_order': False, 'shape': {}}}"
HEADERS = {
    "objects": FIELDS.format("'|O'", "(1,)"),
    "objects inside": FIELDS.format("[('a', 'O')]", "(1,)"),
    "code": "__import__('pathlib').Path('ran').touch()",
    "too many": FIELDS.format("'<f4'", f"({2**63},)"),
    "wraps around": FIELDS.format("'<f4'", f"({2**62}, 4)"),
    "negative": FIELDS.format("'<f4'", "(-1,)"),
    "no integer": FIELDS.format("'<f4'", "(1e3,)"),
    "many dimensions": FIELDS.format("'<f4'", "(" + "1," * 70 + ")"),
    "wide strings": FIELDS.format("'<U999999999999'", "(1,)"),
    "nested": "(" * 500 + ")" * 500,
    "unfinished": "{'descr':",
    "nothing": "",
}


def npy(header: str) -> bytes:
    text = header.encode() + b"\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + bytes(64)


def npz(member: bytes) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        archive.writestr("a.npy", member)
    return stream.getvalue()


def read(folder: Path, suffix: str, content: bytes) -> None:
    """Read the file with both readers. Damage raises MemoryError or an error that names the file, and no other."""
    path = folder / f"file{suffix}"
    path.write_bytes(content)
    ways: list[Callable[[], object]] = [lambda: load_arrays(path)] if suffix != ".npy" else []
    ways.append(lambda: load(str(path), "a"))
    for way in ways:
        text = path.name
        try:
            result = way()
            arrays = result.values() if isinstance(result, dict) else [result]
            assert all(isinstance(array, np.ndarray) for array in arrays)
        except (ValueError, InputError) as error:
            text = str(error)
        except MemoryError:
            pass
        assert path.name in text


@pytest.mark.promise("files are data")
@pytest.mark.parametrize("name", HEADERS)
def test_a_damaged_or_malicious_header_is_refused_and_not_run(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for suffix, content in ((".npy", npy(HEADERS[name])), (".npz", npz(npy(HEADERS[name])))):
        read(tmp_path, suffix, content)
        reader = load_arrays if suffix == ".npz" else lambda path: load(str(path), "a")
        with pytest.raises((ValueError, InputError, MemoryError)):
            reader(tmp_path / f"file{suffix}")
    assert not (tmp_path / "ran").exists()


@pytest.mark.promise("files are data")
@pytest.mark.parametrize("suffix", [".npy", ".npz", ".safetensors"])
def test_random_damage_is_an_error_that_names_the_file(suffix: str, tmp_path: Path, rng: np.random.Generator) -> None:
    arrays = {"a": np.arange(12.0).reshape(3, 4), "b": np.ones(3, F)}
    whole = tmp_path / f"whole{suffix}"
    if suffix == ".npy":
        np.save(whole, arrays["a"])
    else:
        save_arrays(whole, arrays)
    content = whole.read_bytes()
    for _ in range(400):
        damaged = bytearray(content)
        for at in rng.integers(len(damaged), size=rng.choice([1, 2, 5])):
            damaged[at] = rng.integers(256)
        read(tmp_path, suffix, bytes(damaged[: rng.integers(len(damaged))] if rng.random() < 0.2 else damaged))


def test_a_member_that_is_not_an_array_is_damage(tmp_path: Path) -> None:
    """NumPy returns the bytes of such a member."""
    path = tmp_path / "file.npz"
    path.write_bytes(npz(b"these bytes are not an array"))
    for reader in (lambda: load(str(path), "a"), lambda: load_arrays(path)):
        with pytest.raises((InputError, ValueError), match=r"file\.npz.*damaged.*a is not in the \.npy format"):
            reader()


@pytest.mark.parametrize("suffix", [".npy", ".npz"])
def test_a_long_header_is_damage(suffix: str, tmp_path: Path) -> None:
    """NumPy's error advises to trust the file, which reads like an array of Python objects."""
    path = tmp_path / f"file{suffix}"
    content = npy(FIELDS.format("'<f4'", "(1,)") + " " * 20_000)
    path.write_bytes(npz(content) if suffix == ".npz" else content)
    readers = [lambda: load(str(path), "a"), *([lambda: load_arrays(path)] if suffix == ".npz" else [])]
    for reader in readers:
        with pytest.raises((InputError, ValueError), match=r"damaged.*the header of an array is too long"):
            reader()
