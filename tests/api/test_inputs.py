"""Inputs: array-likes of every kind, any layout, mixed dtypes, empty arrays; and no input is modified."""

import array
import decimal
import fractions
import functools
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cattn
from cattn import reference
from cattn._input import arrays as _arrays
from support import PATHS, assert_same_bits, forced, looped

Normal = Callable[..., np.ndarray]
INF, NAN = np.inf, np.nan
EXTRAS: dict[str, Any] = {"return_weights": True, "return_lse": True, "return_dropout_mask": True}


# ---- every function with all of its array arguments ----------------------------------------------------------------
def calls(rng: np.random.Generator, dtype: Any = np.float32) -> dict[str, tuple[Callable[..., Any], dict[str, Any]]]:
    """Return functions and arguments by name. Arrays among these may be replaced by others with the same numbers."""

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(dtype)

    attention = {
        "query": normal(2, 4, 5, 8),
        "key": normal(2, 2, 7, 8),
        "value": normal(2, 2, 7, 3),
        "attn_mask": rng.random((2, 1, 5, 7)) < 0.7,
        "bias": normal(4, 5, 7),
        "query_offset": np.array([1, -2]),
    }
    drop = {"dropout_p": 0.3, "rng": 7}
    floating = {**attention, "attn_mask": normal(5, 7)}
    weights = {name: x for name, x in floating.items() if name != "value"}
    scores = {"scores": normal(2, 5, 7), "mask": rng.random((2, 5, 1)) < 0.8, "query_offset": np.array([3, 0])}
    return {
        "attention": (cattn.scaled_dot_product_attention, {**attention, **EXTRAS, **drop, "is_causal": "upper_left"}),
        "attention, float mask": (cattn.scaled_dot_product_attention, floating),
        "causal": (cattn.causal_attention, {**floating, "dropout_p": 1.0}),
        "weights": (cattn.attention_weights, {**weights, "is_causal": True}),
        "softmax": (cattn.softmax, {"x": normal(5, 7), "where": rng.random(7) < 0.7}),
        "softmax, axes": (cattn.softmax, {"x": normal(5, 7, 2), "where": rng.random((7, 1)) < 0.7, "axis": (0, 2)}),
        "masked_softmax": (cattn.masked_softmax, {**scores, "is_causal": True}),
        "renormalize": (cattn.masked_softmax, {**scores, "method": "renormalize"}),
        "dropout": (cattn.dropout, {"x": normal(3, 50), "rng": 3, "return_mask": True}),
        "no dropout": (cattn.dropout, {"x": normal(3, 50), "training": False}),
    }


CALLS = list(calls(np.random.default_rng(0)))


def run(call: tuple[Callable[..., Any], dict[str, Any]], change: Callable[[np.ndarray], Any] | None = None) -> Any:
    function, arguments = call
    if change is not None:
        arguments = {n: change(x) if isinstance(x, np.ndarray) else x for n, x in arguments.items()}
    return function(**arguments)


@pytest.mark.promise("inputs stay")
@pytest.mark.parametrize("name", CALLS)
def test_inputs_are_not_modified(name: str, isa: str, dtype: Any, rng: np.random.Generator) -> None:
    """Whole buffers are compared, including the memory between the elements of a view."""
    buffers = []

    def hold(x: np.ndarray) -> np.ndarray:
        buffer = rng.integers(0, 2, (*x.shape[:-1], 2 * x.shape[-1] + 3)).astype(x.dtype)
        view = buffer[..., 1:-1:2][..., : x.shape[-1]]
        view[...] = x
        buffers.append((buffer, buffer.tobytes()))
        return view

    run(calls(rng, dtype)[name], hold)
    assert buffers
    for buffer, before in buffers:
        assert buffer.tobytes() == before


@pytest.mark.promise("inputs stay")
@pytest.mark.parametrize("path", PATHS)
def test_no_path_modifies_its_inputs(path: str, rng: np.random.Generator) -> None:
    function, arguments = calls(rng)["attention"]
    arguments = {n: x.copy() if isinstance(x, np.ndarray) else x for n, x in arguments.items()}
    arguments["key"][:, :, 3] = NAN
    arguments["value"][:, :, 2] = INF
    before = {n: x.tobytes() for n, x in arguments.items() if isinstance(x, np.ndarray)}
    with forced(path):
        function(**arguments)
    assert {n: x.tobytes() for n, x in arguments.items() if isinstance(x, np.ndarray)} == before


# ---- other containers of the same numbers --------------------------------------------------------------------------
class OnlyArray:
    """An object with __array__ and nothing else."""

    def __init__(self, x: np.ndarray) -> None:
        self._x = x

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        return self._x if dtype is None else self._x.astype(dtype)


class OnlyInterface:
    def __init__(self, x: np.ndarray) -> None:
        self._x = x
        self.__array_interface__ = x.__array_interface__


class OnlyDLPack:
    """An object with the two methods of the DLPack protocol and nothing else."""

    def __init__(self, x: Any) -> None:
        self._x = x

    def __dlpack__(self, **keywords: Any) -> Any:
        return self._x.__dlpack__(**keywords)

    def __dlpack_device__(self) -> Any:
        return self._x.__dlpack_device__()


class Subclass(np.ndarray):
    """An array that raises when it is computed with or indexed."""

    def __array_ufunc__(self, *_: Any, **__: Any) -> Any:
        raise AssertionError("no ufunc may run on a subclass")

    def __getitem__(self, index: Any) -> Any:
        raise AssertionError("a subclass may index as it likes")


def as_subclass(x: np.ndarray) -> Any:
    return x.view(Subclass)


def structured_field(x: np.ndarray) -> np.ndarray:
    """Return a field of packed records: misaligned, with strides that are no multiple of the element size."""
    records = np.zeros(x.shape, [("flag", "u1"), ("x", x.dtype), ("pad", "u2")])
    records["x"] = x
    return records["x"]


def misaligned(x: np.ndarray) -> np.ndarray:
    memory = np.zeros(x.nbytes + 1, np.uint8)[1:]
    view = memory.view(x.dtype).reshape(x.shape)
    view[...] = x
    return view


def read_only(x: np.ndarray) -> np.ndarray:
    x = x.copy()
    x.flags.writeable = False
    return x


def reversed_view(x: np.ndarray) -> np.ndarray:
    every = (slice(None, None, -1),) * x.ndim
    return np.ascontiguousarray(x[every])[every]


def spaced(x: np.ndarray) -> np.ndarray:
    wide = np.zeros([3 * n for n in x.shape], x.dtype)
    view = wide[(slice(1, None, 3),) * x.ndim]
    view[...] = x
    return view


def swapped_axes(x: np.ndarray) -> np.ndarray:
    return x if x.ndim < 2 else np.ascontiguousarray(x.swapaxes(0, -1)).swapaxes(0, -1)


def torch_tensor(x: np.ndarray) -> Any:
    torch = pytest.importorskip("torch")

    return torch.from_numpy(x.copy())


LAYOUTS = [np.asfortranarray, misaligned, read_only, reversed_view, spaced, swapped_axes, structured_field]
CONTAINERS = [memoryview, OnlyArray, OnlyInterface, OnlyDLPack, as_subclass, torch_tensor]
CONTAINERS += [lambda x: x.astype(x.dtype.newbyteorder()), lambda x: OnlyDLPack(torch_tensor(x))]
KINDS = [*LAYOUTS, *CONTAINERS]


@pytest.mark.promise("kinds of arrays")
@pytest.mark.parametrize("kind", KINDS, ids=lambda f: f.__name__)
@looped("name", CALLS)
def test_every_kind_of_array_gives_the_same_bits(name: str, kind: Any, dtype: Any, rng: np.random.Generator) -> None:
    call = calls(rng, dtype)[name]
    expected = run(call)
    result = run(call, kind)
    assert_same_bits(result, expected)
    assert all(type(x) is np.ndarray for x in (result if isinstance(result, tuple) else [result])[:2])


def test_objects_without_a_shape_have_gradients_and_explanations(rng: np.random.Generator) -> None:
    """Gradients have the shape of their argument even if that object has no attribute `shape`."""
    query, key, value = (rng.standard_normal(shape) for shape in ((3, 4), (5, 4), (5, 2)))
    bias, sinks = np.zeros((3, 1)), np.zeros(1)
    result = cattn.scaled_dot_product_attention(query, key, value, bias=bias, sinks=sinks, return_lse=True)
    arrays = (result.out, query, key, value, result.out, result.lse)
    expected = cattn.attention_backward(*arrays, bias=bias, sinks=sinks)
    others = map(OnlyDLPack, arrays)
    for a, b in zip(
        cattn.attention_backward(*others, bias=OnlyDLPack(bias), sinks=OnlyDLPack(sinks)), expected, strict=True
    ):
        assert_same_bits(a, b)
    others = map(OnlyDLPack, (query, key, value))
    assert cattn.explain(*others) == cattn.explain(query, key, value)


def test_an_array_that_dlpack_cannot_export_is_refused_by_name() -> None:
    torch = pytest.importorskip("torch")

    tensor = OnlyDLPack(torch.ones(2, 3, requires_grad=True))
    with pytest.raises(TypeError, match=r"^key cannot be read by DLPack: .*gradient"):
        cattn.causal_attention(np.ones((2, 3)), tensor, np.ones((2, 3)))


@pytest.mark.parametrize("name", CALLS)
def test_lists_and_tuples_are_float64(name: str, rng: np.random.Generator) -> None:
    call = calls(rng, np.float64)[name]
    assert_same_bits(run(call, lambda x: x.tolist()), run(call))
    assert_same_bits(run(call, lambda x: tuple(x.tolist())), run(call))


@pytest.mark.promise("conversions")
@pytest.mark.parametrize("kind", [bool, np.uint8, np.int16, np.int32, np.uint32, np.int64, np.uint64])
def test_integers_and_booleans_are_float64(kind: Any, rng: np.random.Generator) -> None:
    x = rng.integers(0, 2, (4, 3)).astype(kind)
    wide = x.astype(np.float64)
    assert_same_bits(cattn.causal_attention(x, x, x), cattn.causal_attention(wide, wide, wide))
    assert_same_bits(cattn.softmax(x), cattn.softmax(wide))
    assert_same_bits(cattn.masked_softmax(x), cattn.masked_softmax(wide))
    assert_same_bits(cattn.dropout(x, rng=1), cattn.dropout(wide, rng=1))
    assert_same_bits(cattn.softmax(x.tolist()), cattn.softmax(wide))


def test_array_bytearray_and_matrix_are_inputs(rng: np.random.Generator) -> None:
    numbers = rng.standard_normal(6)
    for other in (array.array("d", numbers), memoryview(numbers), numbers.tolist(), tuple(numbers)):
        assert_same_bits(cattn.softmax(other), cattn.softmax(numbers))
        assert_same_bits(cattn.dropout(other, rng=1), cattn.dropout(numbers, rng=1))
    single = numbers.astype(np.float32)
    assert_same_bits(cattn.softmax(array.array("f", single)), cattn.softmax(single))
    assert_same_bits(cattn.softmax(bytearray(b"\0\1\2")), cattn.softmax([0, 1, 2]))
    where = numbers > 0
    assert_same_bits(cattn.softmax(numbers, where=memoryview(where)), cattn.softmax(numbers, where=where))
    with pytest.warns(PendingDeprecationWarning):
        matrix = np.matrix(numbers.reshape(2, 3))
    result = cattn.causal_attention(matrix, matrix, matrix)
    assert type(result) is np.ndarray
    assert_same_bits(result, cattn.causal_attention(*[numbers.reshape(2, 3)] * 3))


def test_memory_maps_are_inputs(tmp_path: Path, rng: np.random.Generator) -> None:
    x = rng.standard_normal((20, 6)).astype(np.float32)
    np.save(tmp_path / "x.npy", x)
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    assert isinstance(mapped, np.memmap)
    result = cattn.causal_attention(mapped, mapped, mapped)
    assert type(result) is np.ndarray
    assert_same_bits(result, cattn.causal_attention(x, x, x))


def test_broadcast_arrays_give_the_bits_of_copies(dtype: Any, normal: Normal) -> None:
    q, k, v = normal(1, 3, 1, 8, dtype=dtype), normal(1, 1, 8, dtype=dtype), normal(7, 1, dtype=dtype)
    mask, bias = normal(5, 1) > 0, normal(1, 7, dtype=dtype)
    views = [np.broadcast_to(x, s) for x, s in ((q, (2, 3, 5, 8)), (k, (2, 3, 7, 8)), (v, (2, 3, 7, 4)))]
    masks = [np.broadcast_to(x, (2, 3, 5, 7)) for x in (mask, bias)]
    result = cattn.causal_attention(*views, masks[0], bias=masks[1], **EXTRAS)
    copies = [x.copy() for x in views]
    assert_same_bits(result, cattn.causal_attention(*copies, masks[0].copy(), bias=masks[1].copy(), **EXTRAS))
    assert_same_bits(cattn.softmax(views[0], 2), cattn.softmax(copies[0], 2))
    assert_same_bits(cattn.softmax(views[0], (1, 2)), cattn.softmax(copies[0], (1, 2)))
    assert_same_bits(cattn.dropout(views[0], rng=1), cattn.dropout(copies[0], rng=1))


def test_sliding_windows_give_the_bits_of_copies(dtype: Any, normal: Normal) -> None:
    windows = np.lib.stride_tricks.sliding_window_view(normal(40, dtype=dtype), 8)
    copy = windows.copy()
    assert_same_bits(cattn.causal_attention(windows, windows, windows), cattn.causal_attention(copy, copy, copy))


# ---- no copies -----------------------------------------------------------------------------------------------------
def check_not_copied(x: np.ndarray, kinds: list[Any], mask: np.ndarray, masks: list[Any]) -> None:
    """Check that the kinds of array that hold x are read in place, and those that hold the mask."""
    for y in kinds:
        assert np.shares_memory(_arrays.as_array(y, "x"), x)
        assert np.shares_memory(_arrays.as_bias(y, "bias", x.dtype.char), x)
    for y in masks:
        assert np.shares_memory(_arrays.as_mask(y, "attn_mask", "f"), mask)
        assert np.shares_memory(_arrays.as_bool(y, "where", ""), mask)


@pytest.mark.promise("conversions")
def test_arrays_of_a_supported_dtype_are_not_copied(dtype: Any) -> None:
    x = np.arange(12.0, dtype=dtype).reshape(3, 4)
    views = [x, x.T, x[::-1], x[:, ::2], np.broadcast_to(x, (5, 3, 4)), as_subclass(x), OnlyArray(x), memoryview(x)]
    mask = x > 3
    check_not_copied(x, [*views, OnlyInterface(x), OnlyDLPack(x)], mask, [mask, mask.T, OnlyDLPack(mask)])


@pytest.mark.promise("conversions")
def test_tensors_of_a_supported_dtype_are_not_copied(dtype: Any) -> None:
    torch = pytest.importorskip("torch")
    x = np.arange(12.0, dtype=dtype).reshape(3, 4)
    mask, tensor = x > 3, torch.from_numpy(x)
    kinds = [tensor, tensor.t(), tensor[1:, ::3], OnlyDLPack(tensor)]
    check_not_copied(x, kinds, mask, [torch.from_numpy(mask), OnlyDLPack(torch.from_numpy(mask))])


def test_torch_tensors_give_the_bits_of_arrays(rng: np.random.Generator) -> None:
    torch = pytest.importorskip("torch")

    call = calls(rng)["attention"]
    tensors = {n: torch.from_numpy(x) if isinstance(x, np.ndarray) else x for n, x in call[1].items()}
    assert_same_bits(call[0](**tensors), run(call))
    transposed = torch.from_numpy(np.ascontiguousarray(call[1]["query"].swapaxes(1, 2))).transpose(1, 2)
    assert_same_bits(call[0](**{**tensors, "query": transposed}), run(call))


# ---- dtypes --------------------------------------------------------------------------------------------------------
@pytest.mark.promise("conversions")
@pytest.mark.parametrize("kinds", list(itertools.product([np.float32, np.float64, np.int32], repeat=3)))
def test_mixed_dtypes_promote(kinds: tuple[Any, Any, Any], rng: np.random.Generator) -> None:
    q, k, v = (rng.integers(-3, 4, (5, 4)).astype(kind) for kind in kinds)
    result = cattn.causal_attention(q, k, v)
    common = np.float32 if set(kinds) == {np.float32} else np.float64
    assert result.dtype == common
    assert_same_bits(result, cattn.causal_attention(*(x.astype(common) for x in (q, k, v))))
    weights = cattn.attention_weights(q, k)
    assert weights.dtype == (np.float32 if set(kinds[:2]) == {np.float32} else np.float64)


@pytest.mark.parametrize("kind", [np.float16, np.float32, np.float64, ">f8", "<f2", ">f4"])
def test_additive_masks_are_converted_to_the_dtype_of_the_computation(kind: Any, dtype: Any, normal: Normal) -> None:
    q = normal(5, 4, dtype=dtype)
    mask = normal(5, 5, dtype=kind)
    mask[2] = -INF
    expected = cattn.scaled_dot_product_attention(q, q, q, mask.astype(dtype))
    assert expected.dtype == dtype
    assert_same_bits(cattn.scaled_dot_product_attention(q, q, q, mask), expected)
    assert_same_bits(cattn.scaled_dot_product_attention(q, q, q, bias=mask), expected)
    broadcast = np.broadcast_to(mask[:1], (5, 5))
    full = broadcast.astype(dtype)
    call = functools.partial(cattn.scaled_dot_product_attention, q, q, q)
    assert_same_bits(call(broadcast), call(full))


FLAGS: dict[str, Callable[[Any, Any], Any]] = {
    "attn_mask of attention": lambda x, flag: cattn.scaled_dot_product_attention(x, x, x, flag),
    "attn_mask of causal_attention": lambda x, flag: cattn.causal_attention(x, x, x, flag),
    "attn_mask of weights": lambda x, flag: cattn.attention_weights(x, x, flag),
    "attn_mask of statistics": lambda x, flag: cattn.attention_statistics(x, x, flag),
    "attn_mask of gradients": lambda x, flag: cattn.attention_backward(x, x, x, x, x, x[:, 0], attn_mask=flag),
    "attn_mask of tangents": lambda x, flag: cattn.attention_jvp(x, x, x, attn_mask=flag),
    "attn_mask of explain": lambda x, flag: cattn.explain(x, x, x, flag),
    "attn_mask of the reference": lambda x, flag: reference.scaled_dot_product_attention(x, x, x, flag),
    "mask of masked_softmax": lambda x, flag: cattn.masked_softmax(x, flag),
}


@pytest.mark.parametrize("flag", [True, False, np.True_, 1, 0.5], ids=repr)
@pytest.mark.parametrize("name", FLAGS)
def test_a_number_is_no_mask(name: str, flag: Any) -> None:
    """PyTorch refuses True, too. A mask without axes is an array, and broadcasts."""
    hint = r": is_causal=True\?" if flag is True and "mask of" in name and "dropout" not in name else ""
    with pytest.raises(TypeError, match=rf"^{name.split()[0]} must be an array, got .*{hint}"):
        FLAGS[name](np.eye(4), flag)
    x = np.eye(4)
    for mask in (np.array(True), np.array(0.0)):
        assert_same_bits(cattn.scaled_dot_product_attention(x, x, x, mask), cattn.scaled_dot_product_attention(x, x, x))


@pytest.mark.parametrize("argument", ["attn_mask", "bias"])
def test_a_finite_mask_stays_finite(argument: str, normal: Normal) -> None:
    """finfo(float64).min does not hide a key from a float32 query; -inf does, and NaN stays NaN."""
    q = normal(4, 4)
    low = np.finfo(np.float64).min
    single = np.finfo(np.float32).min
    mask = np.zeros((4, 4))
    mask[0], mask[1, :2], mask[2], mask[3, 1] = low, low, -INF, NAN
    as_single = np.where(mask == low, single, mask).astype(np.float32)
    result = cattn.scaled_dot_product_attention(q, q, q, **EXTRAS, **{argument: mask})
    expected = cattn.scaled_dot_product_attention(q, q, q, **EXTRAS, **{argument: as_single})
    assert_same_bits(result, expected)
    assert np.isfinite(result.out[:2]).all()
    assert (result.weights[0] > 0).all(), "a row of finfo.min only is an ordinary row"
    assert (result.out[2] == 0).all()
    assert np.isnan(result.out[3]).all()
    high = np.full((4, 4), -low)
    assert not np.isnan(cattn.scaled_dot_product_attention(q, q, q, **{argument: high})).any()


SIGNALLING = np.array([0x7FA00000], np.uint32).view(np.float32)[0]  # a NaN whose conversion raises the flag "invalid"


@pytest.mark.parametrize("value", [1e-50, 1e-320, 1e300, NAN, INF])
def test_conversion_of_masks_raises_no_floating_point_error(value: float, normal: Normal) -> None:
    q, mask = normal(4, 4), np.full((4, 4), -value)
    with np.errstate(all="raise"):
        cattn.scaled_dot_product_attention(q, q, q, mask)
        cattn.scaled_dot_product_attention(q, q, q, bias=mask)


@pytest.mark.parametrize("value", [1e-40, SIGNALLING, NAN, INF, 0.0])
def test_promotion_raises_no_floating_point_error(value: Any, normal: Normal) -> None:
    single, double = np.full((4, 4), value, np.float32), normal(4, 4, dtype=np.float64)
    with np.errstate(all="raise"):
        cattn.scaled_dot_product_attention(single, double, double)
        cattn.scaled_dot_product_attention(double, double, single)


def test_numbers_may_be_of_any_real_type(normal: Normal) -> None:
    q, x = normal(5, 4), normal(3, 5, 4)
    call, batch = functools.partial(cattn.causal_attention, q, q, q), functools.partial(cattn.causal_attention, x, x, x)
    half = call(scale=0.5, dropout_p=0.5, rng=3)
    for real in (np.float16, np.float32, np.float64, np.longdouble, np.array, decimal.Decimal, fractions.Fraction):
        assert_same_bits(call(scale=real(0.5), dropout_p=real(0.5), rng=3), half)
        assert_same_bits(cattn.dropout(q, real(0.5), rng=3), cattn.dropout(q, 0.5, rng=3))
        assert_same_bits(cattn.softmax(q, scale=real(0.5)), cattn.softmax(q, scale=0.5))
    for scale in (-2, -1):  # C functions also return -1 on failure
        assert_same_bits(call(scale=np.int8(scale)), call(scale=float(scale)))
    for whole in (np.int8, np.uint64, np.array):
        assert_same_bits(cattn.softmax(q, whole(0)), cattn.softmax(q, 0))
        assert_same_bits(call(dropout_p=0.5, rng=whole(3)), call(dropout_p=0.5, rng=3))
        assert_same_bits(call(query_offset=whole(3)), call(query_offset=3))
        assert cattn.causal_mask(whole(2), whole(3)).shape == (2, 3)
    for offset in ([0, 1, 2], (0, 1, 2), np.array([0, 1, 2], np.uint8), np.array([0, 1, 2], ">i8"), range(3)):
        assert_same_bits(batch(query_offset=offset), batch(query_offset=np.arange(3)))


def layouts(numbers: np.ndarray) -> list[np.ndarray]:
    """Return the numbers with other strides, at an odd address, read-only, and with an axis that repeats."""
    odd = np.zeros(numbers.nbytes + 1, np.uint8)[1:].view(numbers.dtype).reshape(numbers.shape)
    odd[:] = numbers
    fixed = numbers.copy()
    fixed.flags.writeable = False
    return [numbers, np.repeat(numbers, 2, -1)[..., ::2], numbers[..., ::-1].copy()[..., ::-1], odd, fixed]


@pytest.mark.promise("conversions")
@pytest.mark.parametrize("order", "<>")
@pytest.mark.parametrize("kind", "bhilqBHILQ")
def test_integers_are_read_in_any_type_and_layout(kind: str, order: str, normal: Normal) -> None:
    x, packed = normal(3, 2, 7, 4), normal(7, 2, 4)
    for name, numbers in {
        "query_seq_lengths": [7, 0, 4], "key_value_seq_lengths": [5, 7, 1], "key_value_seq_starts": [0, 3, 7],
        "query_offset": [2, 0, 5], "key_indices": np.arange(3 * 7 * 3).reshape(3, 1, 7, 3) % 7,
    }.items():  # fmt: skip
        right = cattn.scaled_dot_product_attention(x, x, x, **{name: np.array(numbers)})
        for given in layouts(np.array(numbers, order + kind)):
            assert_same_bits(cattn.scaled_dot_product_attention(x, x, x, **{name: given}), right)
    edges = np.array([0, 2, 2, 7])
    right = cattn.varlen_attention(packed, packed, packed, edges, edges)
    for given in layouts(edges.astype(order + kind)):
        assert_same_bits(cattn.varlen_attention(packed, packed, packed, given, edges), right)
    repeated = np.broadcast_to(np.array([[4]], order + kind), (3, 1))[:, 0]
    right = cattn.scaled_dot_product_attention(x, x, x, key_value_seq_lengths=4)
    assert_same_bits(cattn.scaled_dot_product_attention(x, x, x, key_value_seq_lengths=repeated), right)


def test_flags_may_be_of_any_truth_value_type(normal: Normal) -> None:
    q = normal(5, 4)
    causal = cattn.scaled_dot_product_attention(q, q, q, is_causal=True)
    for true in (np.True_, "upper_left", np.str_("upper_left"), "".join(["upper", "_left"])):
        assert_same_bits(cattn.scaled_dot_product_attention(q, q, q, is_causal=true), causal)
    for flag in (np.True_, 1, "yes"):
        assert isinstance(cattn.causal_attention(q, q, q, return_lse=flag), cattn.AttentionOutput)
    assert isinstance(cattn.causal_attention(q, q, q, return_lse=0), np.ndarray)


# ---- empty dimensions ----------------------------------------------------------------------------------------------
EMPTY = ["B", "H", "T_q", "T_k", "head_dim", "d_v", "B T_q", "T_q T_k", "head_dim d_v", "T_k d_v"]
OPTIONS = [{}, {"is_causal": "lower_right"}, {"attn_mask": np.array(True)}, {"bias": 0.5, "dropout_p": 0.5, "rng": 3}]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("empty", EMPTY)
@looped("extra", OPTIONS)
def test_attention_with_empty_dimensions_agrees_with_the_reference(
    empty: str, path: str, extra: dict[str, Any], dtype: Any
) -> None:
    sizes = {"B": 2, "H": 3, "T_q": 4, "T_k": 5, "head_dim": 6, "d_v": 7} | dict.fromkeys(empty.split(), 0)
    B, H, T_q, T_k, D, D_v = sizes.values()
    q, k, v = np.ones((B, H, T_q, D), dtype), np.ones((B, H, T_k, D), dtype), np.ones((B, H, T_k, D_v), dtype)
    with forced(path):
        result = cattn.scaled_dot_product_attention(q, k, v, **extra, **EXTRAS)
    expected = reference.scaled_dot_product_attention(q, k, v, **extra, **EXTRAS)
    for name, a, b in zip(result._fields, result[:4], expected[:4], strict=False):
        assert a.shape == b.shape, name
        assert a.dtype == (bool if name == "dropout_mask" else dtype)
        np.testing.assert_allclose(a, b, rtol=1e-5, err_msg=name)
    np.testing.assert_allclose(cattn.attention_weights(q, k), reference.attention_weights(q, k), rtol=1e-5)


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 3), (2, 0, 3), (0, 0)])
def test_softmax_and_dropout_with_empty_dimensions_keep_the_shape(shape: tuple[int, ...], dtype: Any) -> None:
    x = np.ones(shape, dtype)
    for axis in (*range(-len(shape), len(shape)), None, tuple(range(len(shape)))):
        result = cattn.softmax(x, axis)
        assert (result.shape, result.dtype) == (shape, dtype)
        assert cattn.softmax(x, axis, where=x > 0, out=np.ones(shape, dtype)).shape == shape
    assert cattn.masked_softmax(x, x > 0).shape == shape
    assert cattn.masked_softmax(x, method="renormalize").shape == shape
    for result in (*cattn.dropout(x, return_mask=True), cattn.dropout(x, 0.0), cattn.dropout(x, 1.0)):
        assert result.shape == shape


def test_masks_and_offsets_may_be_empty() -> None:
    assert cattn.causal_mask(0).shape == (0, 0)
    assert cattn.causal_mask(0, 3).shape == (0, 3)
    assert cattn.causal_mask(3, 0).shape == (3, 0)
    assert cattn.causal_attention(*[np.ones((0, 3, 2))] * 3, query_offset=[]).shape == (0, 3, 2)
    assert cattn.causal_attention(*[np.ones((0, 3, 2))] * 3, query_offset=np.zeros(0)).shape == (0, 3, 2)


def test_softmax_and_dropout_take_single_numbers() -> None:
    for axis in (-1, 0, None):
        result = cattn.softmax(np.float32(3), axis)
        assert (type(result), result.shape, result.dtype, result[()]) == (np.ndarray, (), np.float32, 1)
    assert cattn.softmax(3) == 1
    assert cattn.softmax(3.0, where=False) == 0
    assert np.isnan(cattn.softmax(-INF))
    assert cattn.dropout(3.0, 0.0) == 3
    assert cattn.dropout(3.0, 1.0).shape == ()
    assert cattn.dropout(np.array(3.0), rng=1) in (0, 6)


@pytest.mark.parametrize("heads", [(0, 2), (0, 1), (1, 0), (0, 0)])
def test_attention_without_heads_has_empty_gradients(heads: tuple[int, int]) -> None:
    q, k, v = np.ones((1, heads[0], 3, 4)), np.ones((1, heads[1], 5, 4)), np.ones((1, heads[1], 5, 6))
    result = cattn.scaled_dot_product_attention(q, k, v, return_lse=True)
    grads = cattn.attention_backward(result.out, q, k, v, result.out, result.lse)
    assert [g.shape for g in grads[:3]] == [q.shape, k.shape, v.shape]
    assert not any(g.any() for g in grads[:3])


def test_weights_of_more_than_half_of_the_memory_have_a_warning_before(monkeypatch: pytest.MonkeyPatch) -> None:
    x = np.zeros((1024, 2), np.float32)
    out = cattn.attention_weights(x, x)
    assert _arrays.memory_of_machine() > 2 * out.nbytes
    monkeypatch.setattr(_arrays, "memory_of_machine", lambda: 2 * out.nbytes - 1)
    for call in (cattn.attention_weights, lambda *a: cattn.scaled_dot_product_attention(*a, x, return_weights=True)):
        with pytest.warns(
            UserWarning, match=r"^the weights take 0\.0 GiB, more .* machine: attention_statistics tells"
        ):
            call(x, x)
    cattn.attention_weights(x, x, out=out)
    monkeypatch.setattr(_arrays, "memory_of_machine", lambda: 2 * out.nbytes)
    cattn.attention_weights(x, x)
