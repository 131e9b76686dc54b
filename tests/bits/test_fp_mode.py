"""The caller's floating-point mode changes no result and is restored; registers; cattn's own fused multiply-add."""

import ctypes
import mmap
import os
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest

import cattn
from cattn import _cattn
from support import FP_MODES, ROOT, assert_same_bits, everything, floating_point_mode, forced, in_contract
from support.bit_cases import build, plain, yardstick_of
from support.calls import STORED, Choose, Limits, drawn, from_rng
from support.functions import BY_BLAS, FUNCTIONS, IN_NUMPY, OF_THE_PROCESS, Work, work
from support.processes import run_command
from support.public_calls import CALLS, contents, fresh

Normal = Callable[..., np.ndarray]


def test_every_mode_changes_results_of_numpy() -> None:
    """Each mode changes some result of NumPy, so it is in force."""
    third, tiny = np.full(2, 3.0), np.full(2, 1e-310)
    changed = set()
    for mode in FP_MODES:
        with floating_point_mode(mode):
            changed |= {mode} if (1 / third * third != 1).any() or (-1 / third)[0] != -1 / 3 else set()
            changed |= {mode} if not (tiny * third).any() else set()
    assert changed == set(FP_MODES)


@pytest.mark.promise("floating-point mode")
@pytest.mark.parametrize("mode", FP_MODES)
def test_the_mode_changes_no_bit_of_attention(isa: str, dtype: type, mode: str) -> None:
    """The scale 1/sqrt(11) and the dropout factor 1/0.9 are rounded, so another rounding direction would show."""
    for name in (
        "plain",
        "dropout",
        "tiny",
        "subnormal values",
        "one row",
        "bias and mask",
        "first block -inf",
        "scale",
    ):
        call = build(name, dtype)
        right = yardstick_of(name, dtype, "scalar" if in_contract(isa) else isa)
        results = []
        for path in ("auto", "tile", "rows", "split"):
            with forced(path), cattn.num_threads(2), floating_point_mode(mode):
                results.append(
                    cattn.scaled_dot_product_attention(
                        **call, return_weights=True, return_lse=True, return_dropout_mask=True
                    )
                )
        for result in results:
            assert_same_bits(result, right, name)


@pytest.mark.parametrize("mode", FP_MODES)
def test_the_mode_changes_no_bit_of_converted_masks(mode: str, normal: Normal) -> None:
    """A float64 mask is rounded to float32, and so are slopes and sinks."""
    call = plain(normal, attn_mask=np.random.default_rng(1).standard_normal((101, 200)) / 3)
    call |= {"alibi_slopes": [1 / 3], "sinks": [-1 / 3]}
    right = everything(**call)
    with floating_point_mode(mode):
        result = cattn.scaled_dot_product_attention(**call, return_weights=True, return_lse=True)
    assert_same_bits(result[:3], right[:3])


@pytest.mark.parametrize("mode", FP_MODES)
def test_the_mode_does_not_change_which_ranges_uniform_takes(dtype: type, mode: str) -> None:
    """3.4028235e38 rounds to the largest float32, or to inf in another mode."""
    right = cattn.TorchGenerator(1).uniform(0.0, 3.4028235e38, 3, dtype=dtype)
    with floating_point_mode(mode):
        result = cattn.TorchGenerator(1).uniform(0.0, 3.4028235e38, 3, dtype=dtype)
    assert_same_bits(result, right)


@pytest.mark.promise("floating-point mode")
@pytest.mark.parametrize("name", [name for name in CALLS if name.split(",")[0] not in {*IN_NUMPY, *BY_BLAS}])
def test_the_mode_changes_no_bit_of_any_public_function(name: str) -> None:
    right = contents(fresh(name))
    for mode in FP_MODES:
        with floating_point_mode(mode):
            result = fresh(name)
        assert contents(result) == right, mode


def default_arguments(choose: Choose) -> Choose:
    """Choose float64 and the first of all numbers, which leaves out whatever a call may leave out."""

    def chosen(options: Sequence[Any]) -> Any:
        if options is STORED:
            return np.float64
        return options[0] if isinstance(options, range) or options == (False, True) else choose(options)

    return chosen


@pytest.mark.promise("floating-point mode")
def test_the_mode_changes_no_bit_where_arguments_are_left_out() -> None:
    """In float64, where no rounding of the result hides the last bit of a default scale; 1 / sqrt(7) is rounded."""
    for name, (function, make) in FUNCTIONS.items():
        if name in {*IN_NUMPY, *BY_BLAS, *OF_THE_PROCESS}:
            continue
        choose = default_arguments(from_rng(np.random.default_rng(1)))
        work = Work(name, function, make(choose, Limits((9,), (7,), (7,))))
        right = work.run()
        for mode in FP_MODES:
            with floating_point_mode(mode):
                results = work.run()
            for actual, expected in zip(results, right, strict=True):
                assert_same_bits(actual, expected, f"{name}, {mode}")


@pytest.mark.parametrize("mode", FP_MODES)
def test_the_mode_changes_no_weight_drawn_by_a_numpy_generator(mode: str) -> None:
    right = cattn.Linear(7, 50, rng=np.random.default_rng(1)).weight
    with floating_point_mode(mode):
        result = cattn.Linear(7, 50, rng=np.random.default_rng(1)).weight
    assert_same_bits(result, right)


@pytest.mark.parametrize("mode", FP_MODES)
def test_an_error_restores_the_mode(mode: str) -> None:
    with floating_point_mode(mode):
        with pytest.raises(ValueError, match="outs and lses must be as many"):
            cattn.merge_attention([], [])
        with pytest.raises(TypeError):
            _cattn._in_default_mode(len, [], {})  # type: ignore[arg-type]


@pytest.mark.promise("floating-point mode")
@hypothesis.given(work=drawn(work, IN_NUMPY))
def test_the_mode_changes_no_bit_of_random_work(work: Work) -> None:
    right = work.run()
    for mode in FP_MODES:
        with floating_point_mode(mode):
            results = work.run()
        for actual, expected in zip(results, right, strict=True):
            assert_same_bits(actual, expected, mode)


@pytest.mark.parametrize("mode", FP_MODES)
def test_the_mode_changes_no_bit_of_gradients(isa: str, dtype: type, mode: str, normal: Normal) -> None:
    """Including the sums over broadcast dimensions, some of which NumPy computes."""
    query, grad_out = normal(2, 1, 200, 11, dtype=dtype), normal(2, 1, 200, 11, dtype=dtype)
    key, value = normal(2, 2, 1, 30, 11, dtype=dtype)
    bias = normal(2, 1, 200, 30, dtype=np.float64) / 3  # the call rounds it to float32
    options = {"bias": bias, "sinks": [0.3], "dropout_p": 0.1, "rng": 3, "softcap": 3}
    forward = cattn.scaled_dot_product_attention(query, key, value, **options, return_lse=True)
    arrays = (grad_out, query, key, value, forward.out, forward.lse)
    weights = cattn.softmax(query)
    for call in (
        lambda: cattn.attention_backward(*arrays, **options),
        lambda: (cattn.softmax_backward(grad_out, weights, scale=1 / 3),),
        lambda: (cattn.dropout_backward(grad_out, 0.1, rng=3),),
    ):
        right = call()
        for threads in (1, 2):
            with cattn.num_threads(threads), floating_point_mode(mode):
                result = call()
            for a, b in zip(result, right, strict=True):
                assert_same_bits(a, b)


# ---- registers -------------------------------------------------------------------------------------------------------
def flags_of_the_processor() -> list[str]:
    file = Path("/proc/cpuinfo")
    return re.findall(r"^flags\s*: (.*)", file.read_text(), re.MULTILINE)[0].split() if file.exists() else []


@pytest.mark.skipif("xgetbv1" not in flags_of_the_processor(), reason="the processor does not say what is in use")
def test_no_call_leaves_the_upper_halves_of_registers_in_use(isa: str, dtype: type, normal: Normal) -> None:
    """Otherwise code without AVX is slow after a call, as the mathematical functions of the C library are."""
    x = normal(2, 150, 32, dtype=dtype)
    out, _, lse, *_ = cattn.scaled_dot_product_attention(x, x, x, return_lse=True)
    calls: dict[str, Callable[[], Any]] = {
        "attention": lambda: cattn.scaled_dot_product_attention(x, x, x, is_causal=True),
        "a step": lambda: cattn.scaled_dot_product_attention(x[:, :1], x, x),
        "gradients": lambda: cattn.attention_backward(x, x, x, x, out, lse),
        "softmax": lambda: cattn.softmax(x),
        "dropout": lambda: cattn.dropout(x, 0.5, rng=1),
        "a norm": lambda: cattn.rms_norm(x),
        "rope": lambda: cattn.rope(x),
        "linear": lambda: cattn.functional.linear(x, x[0]),
    }
    page = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    page[:4] = b"\xc5\xf8\x77\xc3"  # vzeroupper; ret
    page[16:25] = b"\xb9\x01\x00\x00\x00\x0f\x01\xd0\xc3"  # mov ecx, 1; xgetbv; ret
    start = ctypes.addressof(ctypes.c_char.from_buffer(page))
    clear, in_use = (ctypes.CFUNCTYPE(ctypes.c_uint32)(start + at) for at in (0, 16))
    for name, call in calls.items():
        with cattn.num_threads(1):
            clear()
            call()
            assert not in_use() & 0x44, name  # of registers of 256 and of 512 bits


# ---- the own fused multiply-add, for C libraries whose fma() is wrong ------------------------------------------------
# Of the program's results, on every machine.
HASHES = {"fma": "734b7981b6393354", "fmaf": "00098094f593f017"}


def test_the_own_fma_rounds_as_the_one_of_the_c_library(tmp_path: Path) -> None:
    """All triples of special values and millions of random ones; the last column says that they are hard ones."""
    compiler = shutil.which(os.environ.get("CC", "gcc"))
    if compiler is None:
        pytest.skip("needs a C compiler")
    program = tmp_path / "fma"
    flags = ["-std=gnu11", "-O2", "-ffp-contract=off", "-fno-math-errno", f"-I{ROOT / 'csrc'}"]
    command = [compiler, *flags, ROOT / "tests" / "core" / "fma.c", "-o", program, "-lm"]
    run_command(command, check=True)
    done = run_command([program, "2000000"], capture_output=True, text=True)
    assert done.stderr == ""
    assert done.returncode == 0
    first, *lines = done.stdout.splitlines()
    assert [line.split(":")[0] for line in lines] == ["fma", "fmaf"]
    for line in lines:
        found = re.fullmatch(r"\w+: (\d+) triples, hash (\w{16}), wrong: library (\d+), plain (\d+)", line)
        assert found is not None
        n, results, library, plain = found.groups()
        assert int(n) > 2_000_000
        assert results == HASHES[line.split(":")[0]]
        assert "own" in first or int(library) == 0
        assert int(plain) > 50_000
