"""Memory: scratch is small, no input is copied whole, and no byte outside an array is read or written."""

from __future__ import annotations

import sys

import pytest

from support import UNDER_SANITIZER
from support.processes import run_command

measured = pytest.mark.skipif(UNDER_SANITIZER, reason="the sanitizer adds memory of its own to each block")
GROWTH = """
import ctypes, re, sys
import numpy as np
import cattn

def peak():
    # in KiB; not by getrusage: a child inherits the maximum of its parent
    if sys.platform == "win32":
        counters = (ctypes.c_size_t * 9)()  # two 32-bit numbers, then the maximum of the working set
        this_process = ctypes.c_void_p(-1)
        assert ctypes.WinDLL("kernel32").K32GetProcessMemoryInfo(this_process, counters, ctypes.sizeof(counters))
        return counters[1] // 1024
    return int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1])

shape, dtype, threads, options = {shape}, np.{dtype}, {threads}, {options}
cattn.set_num_threads(threads)
query, key, value = (np.ones(shape, dtype) for _ in range(3))
if {strided}:
    query, key, value = (x[..., ::-1] for x in (query, key, value))
out = np.ones(shape, dtype)
small = np.ones((2, 300, 8), dtype)
cattn.causal_attention(small, small, small, **options)  # starts the threads, loads every page of code
before = peak()
cattn.causal_attention(query, key, value, out=out, **options)
print(peak() - before)
"""


@measured
def test_the_measurement_sees_a_copy_of_the_keys() -> None:
    """Without this, the tests below might measure nothing."""
    code = GROWTH.format(shape=(1, 2, 4096, 64), dtype="float32", threads=1, options={}, strided=False)
    code = code.replace("before = peak()", "before = peak(); extra = key.copy()")
    done = run_command([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) > 1500


@pytest.mark.promise("memory")
@measured
@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((1, 2, 4096, 64), "float32"), ((1, 1, 2000, 256), "float32"), ((1, 1, 2000, 256), "float64")],
)
def test_a_call_holds_at_most_one_mebibyte_a_thread(
    shape: tuple[int, ...], dtype: str, threads: int, strided: bool
) -> None:
    """The scores of the first case would take 128 MiB. 256 KiB more are allowed: code and stack pages touched first."""
    code = GROWTH.format(shape=shape, dtype=dtype, threads=threads, options={}, strided=strided)
    done = run_command([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) <= 1024 * threads + 256, "KiB"


@pytest.mark.promise("memory")
@measured
def test_statistics_hold_no_matrix_of_weights() -> None:
    """A matrix of one head would take 256 MiB. The results are 10 numbers a token, and a thread may hold 1 MiB."""
    code = GROWTH.format(shape=(1, 2, 8192, 16), dtype="float32", threads=2, options={}, strided=False)
    code = code.replace(
        "cattn.causal_attention(query, key, value, out=out, **options)\n",
        "kept = cattn.attention_statistics(query, key, is_causal=True, top_k=1)\n",
    ).replace("before = peak()", "cattn.attention_statistics(small, small, top_k=1); before = peak()")
    done = run_command([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    results = 2 * 8192 * (9 * 4 + 8 + 8) // 1024  # with the lse in float64
    assert int(done.stdout) <= results + 1024 * 2 + 512, "KiB"


@pytest.mark.promise("memory")
@measured
@pytest.mark.parametrize(
    "call", ["rope(query", "rope(query, np.arange(16384) + 2.0**40, interleaved=True", "rms_norm(query"]
)
def test_rows_hold_at_most_one_mebibyte_a_thread(call: str) -> None:
    """The sines and cosines of all tokens would take 16 MiB."""
    code = GROWTH.format(shape=(1, 1, 16384, 128), dtype="float64", threads=2, options={}, strided=True)
    code = code.replace("cattn.causal_attention(query, key, value,", f"cattn.{call},")
    done = run_command([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) <= 1024 * 2 + 256, "KiB"


@pytest.mark.promise("memory")
@measured
def test_gradients_hold_no_matrix_of_scores() -> None:
    """Beside its results the backward pass holds a few blocks a thread: at most 3 MiB (the documentation says 20)."""
    code = GROWTH.format(
        shape=(1, 12, 4096, 64), dtype="float32", threads=2, options={"dropout_p": 0.1, "rng": 1}, strided=False
    ).replace(
        "before = peak()\n",
        "lse = np.zeros(shape[:-1], dtype)\n"
        "cattn.attention_backward(small, small, small, small, small, small[..., 0], merged=True, **options)\n"
        "before = peak()\n",
    )
    code = code.replace(
        "cattn.causal_attention(query, key, value, out=out, **options)\n",
        "cattn.attention_backward(out, query, key, value, out, lse, is_causal=True, merged=True, **options)\n",
    )
    done = run_command([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) <= 3 * 12 * 1024 + 3 * 1024, "KiB"


GUARDED = """
import ctypes, mmap, sys
import ml_dtypes
import numpy as np
import cattn
from cattn import _cattn
from cattn.functional import linear, linear_backward

PAGE = mmap.PAGESIZE
ROOM = 64 * PAGE
if sys.platform == "win32":
    kernel = ctypes.WinDLL("kernel32")
    kernel.VirtualAlloc.restype = ctypes.c_void_p
    kernel.VirtualAlloc.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_ulong, ctypes.c_ulong]
    kernel.VirtualProtect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_ulong, ctypes.c_void_p]
    allocate = lambda size: kernel.VirtualAlloc(None, size, 0x3000, 4)
    forbid = lambda start, size: kernel.VirtualProtect(start, size, 1, ctypes.byref(ctypes.c_ulong())) != 0
else:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    allocate = lambda size: libc.mmap(None, size, 3, 0x22, -1, 0)
    forbid = lambda start, size: libc.mprotect(start, size, 0) == 0


class Guarded:
    "Pages of memory between two pages that may not be accessed."

    def __init__(self):
        self.base = allocate(ROOM + 2 * PAGE)
        assert forbid(self.base, PAGE)
        assert forbid(self.base + PAGE + ROOM, PAGE)

    def array(self, shape, dtype, at_end):
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        start = self.base + PAGE + (ROOM - size if at_end else 0)
        buffer = (ctypes.c_char * size).from_address(start)
        return np.frombuffer(buffer, dtype).reshape(shape)


places = [Guarded() for _ in range(9)]
_cattn._set_isa(sys.argv[1])
rng = np.random.default_rng(0)
for dtype in (np.float16, np.float32, np.float64):
    for n in [*range(1, 40), 47, 48, 49, 63, 64, 65, 70]:
        m, d, e = 1 + n * 7 % 70, 1 + n * 5 % 37, 1 + n * 3 % 41
        for at_end in (False, True):
            def make(i, *shape, kind=dtype):
                array = places[i].array(shape, kind, at_end)
                array[...] = rng.random(shape) < 0.8 if kind is bool else rng.standard_normal(shape)
                return array
            query, key, value = make(0, m, d), make(1, n, d), make(2, n, e)
            mask, bias = make(3, m, n, kind=bool), make(4, m, n)
            out, weights, scores = make(5, m, e), make(6, m, n), make(7, m, n)
            for path in ("auto", "tile", "rows", "split"):
                _cattn._set_path(path)
                full = cattn.AttentionOutput(out=out, weights=weights)
                cattn.scaled_dot_product_attention(
                    query, key, value, mask, 0.3, bias=bias, rng=1, return_weights=True, out=full
                )
                expected = cattn.reference.scaled_dot_product_attention(query, key, value, mask, 0.3, bias=bias, rng=1)
                tolerance = 2e-3 if dtype is np.float16 else 1e-4
                np.testing.assert_allclose(out, expected, rtol=tolerance, atol=tolerance)
            lse = make(8, m, kind=np.result_type(dtype, np.float32))
            options = {"attn_mask": mask, "dropout_p": 0.3, "bias": bias, "rng": 1}
            cattn.attention_backward(out, query, key, value, out, lse, merged=True, **options)
            cattn.masked_softmax(scores, mask, out=weights)
            cattn.softmax(scores, axis=0, out=weights)
            cattn.dropout(scores, 0.5, rng=1, out=weights)
BF16 = ml_dtypes.bfloat16
# The arrays of x and of the weight, and compute_dtype.
KINDS = [
    (np.float32, np.float32, None), (np.float64, np.float64, None), (np.float16, np.float16, None), (BF16, BF16, None),
    (np.float32, np.int8, None), (np.float32, np.float16, None),
    (np.float32, np.float32, "bfloat16"), (BF16, BF16, "bfloat16"), (np.float32, BF16, "bfloat16"),
    (np.float32, np.int8, "bfloat16"),
]
for x_kind, kind, compute_dtype in KINDS:
    for rows in (1, 5, 8, 9, 33):
        for n, k in [(1, 1), (3, 7), (17, 33), (40, 16), (50, 31), (200, 5), (19, 513)]:
            for at_end in (False, True):
                x = make(0, rows, k, kind=x_kind)
                for values in (make(1, n, k, kind=kind), make(2, k, n, kind=kind).T):
                    scaled = kind is np.int8
                    weight = cattn.Quantized(values, np.abs(make(3, n, 1, kind=np.float32)) + 0.1) if scaled else values
                    bias = make(4, n, kind=x_kind)
                    y = linear(x, weight, bias, out=make(5, rows, n, kind=x_kind), compute_dtype=compute_dtype)
                    right = cattn.reference.linear(x, weight, bias, compute_dtype=compute_dtype)
                    tolerance = 1e-4 if y.dtype.itemsize > 2 else 0.05
                    np.testing.assert_allclose(y.astype(float), right.astype(float), rtol=tolerance, atol=tolerance)
                    linear_backward(y, x, weight, compute_dtype=compute_dtype)
for kind in (np.float32, BF16):
    for n, d in [(1, 1), (5, 3), (17, 33), (40, 16), (70, 31), (200, 5)]:
        for at_end in (False, True):
            query, key, value = make(0, 33, d, kind=kind), make(1, n, d, kind=kind), make(2, n, d, kind=kind)
            tangents = [make(3, 33, d, kind=kind), make(4, n, d, kind=kind), make(5, n, d, kind=kind)]
            for m in (1, 8, 33):
                for path in ("auto", "tile", "rows", "split"):
                    _cattn._set_path(path)
                    given = query[:m], key, value
                    out = cattn.scaled_dot_product_attention(*given, compute_dtype="bfloat16")
                    right = cattn.reference.scaled_dot_product_attention(*given, compute_dtype="bfloat16")
                    np.testing.assert_allclose(out.astype(float), right.astype(float), rtol=0.05, atol=0.05)
                _cattn._set_path("auto")
                cattn.attention_jvp(query[:m], key, value, tangents[0][:m], *tangents[1:])
                cattn.attention_statistics(query[:m], key, top_k=min(2, n))
            cattn.rms_norm(query, out=make(6, 33, d, kind=kind))
            cattn.functional.layer_norm(query, make(7, d, kind=kind), out=make(6, 33, d, kind=kind))
            cattn.functional.gelu(query, out=make(6, 33, d, kind=kind))
            if d % 2 == 0:
                cattn.rope(query, out=make(6, 33, d, kind=kind))
print("untouched")
"""


@pytest.mark.promise("bounds")
@pytest.mark.skipif(
    sys.platform not in ("linux", "win32"), reason="memory is protected by the numbers of Linux and Windows"
)
def test_nothing_outside_an_array_is_accessed(isa: str) -> None:
    done = run_command([sys.executable, "-c", GUARDED, isa], capture_output=True, text=True)
    assert done.returncode == 0, f"exit {done.returncode}: {done.stderr[-2000:]}"
    assert done.stdout.strip() == "untouched"
