"""float16 and bfloat16 are storage: results have the bits of the float32 call on the same numbers, rounded once."""

import itertools
import subprocess
import sys
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cattn
from support import (
    HALVES,
    NAN,
    assert_same_bits,
    bits,
    forced,
    quiet,
    widened,
)

BLOCK, CHUNK = cattn._cattn._block_keys(), cattn._cattn._chunk_keys()
KINDS = {dtype.name: dtype for dtype in HALVES}

Call = dict[str, Any]


@pytest.fixture(params=KINDS)
def half(request: pytest.FixtureRequest) -> np.dtype:
    return KINDS[request.param]


def all_numbers(half: np.dtype) -> np.ndarray:
    return np.arange(1 << 16, dtype=np.uint16).view(half)


# ---- conversions ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("path", ["tile", "rows", "tiny"])
def test_every_half_is_converted_exactly(isa: str, path: str, half: np.dtype) -> None:
    """With one key the output is the value. Every NaN becomes the canonical NaN, and -0 becomes 0."""
    value = all_numbers(half).reshape(-1, 1, 64)
    one = np.ones((len(value), 1, 3), half)
    with forced(path):
        out = cattn.scaled_dot_product_attention(one, one, value)
    wide = quiet(value, np.float32)
    expected = np.where(wide == 0, 0, wide)  # results never hold -0
    assert_same_bits(out, quiet(np.where(np.isnan(wide), NAN, expected).astype(np.float32), half))


@pytest.mark.promise("halves")
def test_results_are_rounded_as_numpy_rounds_them(isa: str, half: np.dtype) -> None:
    """All halves times several factors: subnormals, ties and overflow."""
    x = all_numbers(half)
    x = x[np.isfinite(quiet(x, np.float32))]
    for p in (0.5, 0.75, 1 / 3, 0.999):
        out, mask = cattn.dropout(x, p, rng=1, return_mask=True)
        scale = np.float32(1 / (1 - p))
        with np.errstate(over="ignore"):
            assert_same_bits(out[mask], quiet(quiet(x, np.float32)[mask] * scale, half))
        assert not bits(out[~mask]).any()
    # the mean of two neighbours is a tie
    for a, b in ((x[:-1], x[1:]), (x[:-2], x[2:])):
        value = np.stack([a, b]).T[:, :, None]
        zero = np.zeros((len(a), 1, 1), half)
        mean = cattn.scaled_dot_product_attention(zero, np.zeros((len(a), 2, 1), half), np.ascontiguousarray(value))
        with np.errstate(over="ignore"):
            wide = quiet(a, np.float32) + quiet(b, np.float32)
        same = np.isfinite(wide)
        assert (bits(mean[:, 0, 0])[same] == bits(quiet(wide * np.float32(0.5) + np.float32(0), half))[same]).all()


# ---- attention -----------------------------------------------------------------------------------------------------
def inputs(
    generator: np.random.Generator, half: np.dtype, T_q: int, T_k: int, *, heads: int = 4, **options: Any
) -> Call:
    shapes = {"query": (2, heads, T_q, 11), "key": (2, 2, T_k, 11), "value": (2, 2, T_k, 19)}
    return {name: generator.standard_normal(shape).astype(half) for name, shape in shapes.items()} | options


# ---- the other functions -------------------------------------------------------------------------------------------
def test_weights_of_halves_after_dropout_are_rounded_once(half: np.dtype, rng: np.random.Generator) -> None:
    """Also into a strided out. A wrong out is refused before anything is drawn."""
    call = inputs(rng, half, 40, 50, dropout_p=0.3, rng=1, stage="dropout")
    del call["value"]
    exact = cattn.attention_weights(**widened(call))
    assert_same_bits(cattn.attention_weights(**call), quiet(exact, half))
    out = np.zeros((*exact.shape[:-1], 100), half)[..., ::2]
    assert cattn.attention_weights(**call, out=out) is out
    assert_same_bits(np.ascontiguousarray(out), quiet(exact, half))
    stream = call["rng"] = cattn.TorchGenerator(1)
    state, still = stream.get_state(), out.copy()
    still.flags.writeable = False
    for wrong in (still, out[..., 1:], out.astype(np.float32), "out"):
        with pytest.raises((TypeError, ValueError), match=r"^out "):
            cattn.attention_weights(**call, out=wrong)
        np.testing.assert_array_equal(stream.get_state(), state)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.8])
@pytest.mark.parametrize("shape", [(7,), (50, 41), (3, 40, 40)])
def test_dropout_of_halves_is_that_of_pytorch(
    p: float, shape: tuple[int, ...], half: np.dtype, rng: np.random.Generator
) -> None:
    """PyTorch first rounds 1 / (1 - p) to the dtype of the tensor."""
    torch = pytest.importorskip("torch")
    x = torch.from_numpy(rng.standard_normal(shape).astype(np.float32))
    x = x.half() if half == np.float16 else x.bfloat16()
    torch.manual_seed(123)
    expected = torch.dropout(x, p, True).view(torch.int16).numpy()
    ours = cattn.dropout(x.view(torch.int16).numpy().view(half), p, rng=cattn.TorchGenerator(123))
    assert (ours == expected.view(half)).all()  # == ignores the sign of zero, which may differ


def test_varlen_and_merge_take_halves(half: np.dtype, rng: np.random.Generator) -> None:
    packed = [rng.standard_normal((60, 2, 8)).astype(half) for _ in range(3)]
    lengths = [0, 10, 10, 60], [0, 10, 10, 60]
    out = cattn.varlen_attention(*packed, *lengths, is_causal=True)
    wide = cattn.varlen_attention(*(quiet(a, np.float32) for a in packed), *lengths, is_causal=True)
    assert_same_bits(out, quiet(wide, half))
    query, key, value = (a.swapaxes(0, 1) for a in packed)
    parts = [
        cattn.scaled_dot_product_attention(query, key[:, here], value[:, here], return_lse=True)
        for here in (slice(0, 20), slice(20, 60))
    ]
    merged, lse = cattn.merge_attention([part.out for part in parts], [part.lse for part in parts])
    assert (merged.dtype, lse.dtype) == (half, np.float32)
    whole = cattn.scaled_dot_product_attention(query, key, value).astype(np.float64)
    np.testing.assert_allclose(merged.astype(np.float64), whole, atol=2 * float(ml_dtypes.finfo(half).eps))


def test_caches_of_halves_round_wider_numbers_once(half: np.dtype, rng: np.random.Generator) -> None:
    wide = rng.standard_normal((2, 1, 2, 5, 3)).astype(np.float32)
    rounded, given = (cattn.KVCache(1, 2, 5, 3, dtype=half) for _ in range(2))
    rounded.append(*wide)
    given.append(*wide.astype(half))
    assert rounded.dtype == half == cattn.KVCache(1, 1, 1, 1, dtype=half.name).dtype
    assert_same_bits(rounded.k, given.k)
    assert_same_bits(rounded.v, given.v)
    rounded.truncate(0)
    with pytest.raises(ValueError, match="value holds numbers beyond the range of"):
        rounded.append(wide[0], np.full((1, 2, 5, 3), 1e39))
    assert rounded.lengths == 0
    infinite = np.full((1, 2, 5, 3), np.inf, np.float32)
    rounded.append(infinite, infinite)  # is given, not made
    with pytest.raises(TypeError, match=r"key has dtype float64, the cache holds float32: pass key\.astype\(cache"):
        cattn.KVCache(1, 1, 1, 1).append(np.ones((1, 1, 1, 1)), np.ones((1, 1, 1, 1)))


# ---- mixed dtypes --------------------------------------------------------------------------------------------------
def test_mixed_dtypes_promote_and_two_kinds_of_halves_are_refused(half: np.dtype) -> None:
    for dtypes in itertools.product([half, np.dtype("f4"), np.dtype("f8")], repeat=3):
        arrays = [np.ones((3, 4), dtype) for dtype in dtypes]
        assert cattn.scaled_dot_product_attention(*arrays).dtype == np.result_type(*dtypes), dtypes
    both = np.ones((3, 4), np.float16), np.ones((3, 4), ml_dtypes.bfloat16)
    with pytest.raises(TypeError, match="mix float16 and bfloat16"):
        cattn.scaled_dot_product_attention(both[0], both[1], both[1])


def test_wrong_dtypes_are_refused(half: np.dtype) -> None:
    x = np.ones((3, 4), half)
    with pytest.raises(TypeError, match=f"out has dtype float32, the result has {half.name}"):
        cattn.causal_attention(x, x, x, out=np.empty((3, 4), np.float32))
    with pytest.raises(TypeError, match=f"out has dtype {half.name}, the result has float32"):
        cattn.softmax(x.astype(np.float32), out=np.empty((3, 4), half))
    with pytest.raises(TypeError, match="query has dtype float8_e4m3fn and no scale: pass"):
        cattn.causal_attention(x.astype(ml_dtypes.float8_e4m3fn), x, x)


@pytest.mark.promise("kinds of arrays")
def test_torch_tensors_of_halves_are_inputs(half: np.dtype) -> None:
    torch = pytest.importorskip("torch")
    x = torch.randn(5, 8, generator=torch.Generator().manual_seed(0))
    x = x.half() if half == np.float16 else x.bfloat16()
    array = x.view(torch.int16).numpy().view(half)
    out = cattn.causal_attention(x, x, x)
    assert_same_bits(out, cattn.causal_attention(array, array, array))
    with pytest.raises(TypeError, match="detach"):
        cattn.causal_attention(x.clone().requires_grad_(), x, x)


def test_onnx_attention_of_halves_returns_halves(half: np.dtype, rng: np.random.Generator) -> None:
    pytest.importorskip("onnx")
    from cattn.integrations import onnx

    q, k, v = (rng.standard_normal((2, 3, 7, 8)).astype(half) for _ in range(3))
    outputs = onnx.attention(q, k, v, is_causal=1, past_key=k, past_value=v, return_qk=True)
    assert {a.dtype for a in outputs} == {half}
    assert_same_bits(outputs.present_key, np.concatenate([k, k], axis=2))


def test_ml_dtypes_is_needed_only_for_bfloat16() -> None:
    """Without ml_dtypes installed float16 works, and bfloat16 gives an error that says what to install."""
    code = (
        "import sys; sys.modules['ml_dtypes'] = None\n"
        "import numpy as np, cattn\n"
        "x = np.ones((3, 4), np.float16)\n"
        "assert cattn.causal_attention(x, x, x).dtype == np.float16\n"
        "try: cattn.KVCache(1, 1, 1, 1, dtype='bfloat16')\n"
        "except TypeError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (
        done.stdout == "dtype is bfloat16, which NumPy does not have: install ml_dtypes (pip install 'cattn[bf16]')\n"
    )


def test_tensors_of_bfloat16_need_ml_dtypes() -> None:
    pytest.importorskip("torch")
    code = (
        "import sys; sys.modules['ml_dtypes'] = None\n"
        "import cattn, torch\n"
        "try: cattn.softmax(torch.ones(3, dtype=torch.bfloat16))\n"
        "except TypeError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("x is a tensor of bfloat16, which NumPy does not have: install ml_dtypes")
