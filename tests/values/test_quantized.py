"""Quantized keys and values: a call has the bits of the float32 call on ``array.astype(np.float32) * scale``."""

import warnings
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cattn
from support import INF, NAN, assert_same_bits, every_way, everything, forced, quiet, table
from support.attention_strategy import F8, calls, quantize, random_bytes

Call = dict[str, Any]
BLOCK, CHUNK = cattn._cattn._block_keys(), cattn._cattn._chunk_keys()
NAMES = ("key", "value")
KINDS = [np.int8, F8]


def scale_shape(shape: tuple[int, ...], scales: str) -> tuple[int, ...]:
    *lead, T, D = shape
    return {
        "token": (*lead, T, 1),
        "channel": (*lead, 1, D),
        "one": (),
        "element": (*lead, T, D),
        "head": (*lead, 1, 1),
    }[scales]


def quantized(call: Call, kind: Any, scales: str, *, names: tuple[str, ...] = NAMES) -> Call:
    """Return the call with random bytes for key and value, laid out as its own arrays."""
    rng = np.random.default_rng(call["key"].shape)
    call = dict(call)
    for name in names:
        old = call[name]
        new = np.empty_like(old, dtype=kind)  # with the order of axes in memory, if not the gaps
        new[...] = random_bytes(rng, old.shape, kind)
        size = scale_shape(old.shape, scales)
        step = 0.02 if kind is np.int8 else 0.01
        call |= {name: new, f"{name}_scale": (rng.uniform(0.5, 1.5, size) * step).astype(np.float32)}
    return call


def dequantized(call: Call) -> Call:
    """Return the call that the law compares with."""
    call = dict(call)
    for name in NAMES:
        if (scale := call.pop(f"{name}_scale", None)) is not None:
            call[name] = quiet(call[name], np.float32) * np.asarray(scale, np.float32)
    return call


def attend(T_q: int, T_k: int, *, heads: int = 4, D: int = 11, D_v: int = 19, **options: Any) -> Call:
    rng = np.random.default_rng([T_q, T_k])
    shapes = {"query": (2, heads, T_q, D), "key": (2, 2, T_k, D), "value": (2, 2, T_k, D_v)}
    return {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()} | options


CASES: dict[str, Call] = {
    "many queries": attend(150, 500),
    "causal": attend(150, 150, is_causal=True),
    "a step of decoding": attend(1, 700, D=64, D_v=64, is_causal="lower_right"),
    "a step with wide heads": attend(1, 300, D=128, D_v=144),
    "a step for one query head": attend(1, 300, heads=2, D=96, D_v=80),
    "two heads a group, odd widths": attend(1, 333, D=77, D_v=33),
    "a few steps": attend(4, 2 * CHUNK + 90, D=64, D_v=16, is_causal="lower_right"),
    "few tokens": attend(2, 30, heads=2, is_causal="lower_right"),
    "one key": attend(3, 1, heads=2),
    "no keys": attend(3, 0, heads=2),
    "no columns": attend(3, 20, heads=2, D=0, D_v=0),
    "window, softcap, slopes, sinks": attend(
        99, 400, is_causal="lower_right", window_size=(150, 0), softcap=3.0,
        alibi_slopes=[0.5, 0.1, 0.02, 0.0], sinks=[0.5, -1, -INF, 2.0],
    ),
    "masks, lengths and dropout": attend(
        40, 300, attn_mask=np.random.default_rng(1).random((40, 300)) < 0.5,
        bias=np.random.default_rng(2).standard_normal((4, 1, 300)), dropout_p=0.3, rng=9,
        query_seq_lengths=[40, 7], key_value_seq_lengths=[290, 190], key_value_seq_starts=[0, 25],
    ),
}  # fmt: skip


@pytest.mark.promise("quantized")
@pytest.mark.parametrize(("kind", "scales"), [(np.int8, "token"), (np.int8, "element"), (F8, "channel")])
@pytest.mark.parametrize("name", CASES)
def test_the_bits_are_those_of_the_float32_call(name: str, kind: Any, scales: str, isa: str) -> None:
    call = quantized(CASES[name], kind, scales)
    with cattn.num_threads(1):
        right = everything(**dequantized(call))
    for way, result in every_way(lambda: everything(**call), tiny=name in ("few tokens", "one key")):
        assert_same_bits(result, right, way)


@pytest.mark.parametrize("scales", ["token", "channel"])
@pytest.mark.parametrize("names", [("key",), ("value",)])
def test_one_of_the_two_may_be_quantized(names: tuple[str, ...], scales: str, isa: str) -> None:
    for T_q in (1, 100):
        call = quantized(attend(T_q, 300, D=64, D_v=64), np.int8, scales, names=names)
        right = everything(**dequantized(call))
        for way, result in every_way(lambda of=call: everything(**of), tiny=False):
            assert_same_bits(result, right, way)
    mixed = quantized(quantized(CASES["a step of decoding"], F8, scales), np.int8, "token", names=names)
    assert_same_bits(everything(**mixed), everything(**dequantized(mixed)))


@pytest.mark.parametrize("query_dtype", [np.float64, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("kind", KINDS, ids=["int8", "float8"])
def test_queries_of_other_dtypes(kind: Any, query_dtype: Any) -> None:
    """The result has the dtype that NumPy promotes query and float32 to."""
    for name in ("many queries", "a step of decoding"):
        call = quantized(CASES[name], kind, "token")
        call["query"] = call["query"].astype(query_dtype)
        result = everything(**call)
        assert result.out.dtype == (np.float64 if query_dtype is np.float64 else np.float32)
        assert_same_bits(result, everything(**dequantized(call)))


@pytest.mark.parametrize("scales", ["token", "channel"])
def test_every_float8_and_every_int8_stands_for_its_number(scales: str, isa: str) -> None:
    """With one key, the output is the value itself."""
    codes = np.arange(256, dtype=np.uint8)
    for kind in KINDS:
        value = codes.view(kind).reshape(1, 256)
        for scale in (0.1, 3e-20, 2.0**-100, 2.0**100, 1e30):
            shape = (1, 1) if scales == "token" else (1, 256)
            value_scale = np.full(shape, scale, np.float32)
            for T_q in (1, 100):
                out = cattn.scaled_dot_product_attention(
                    np.zeros((T_q, 1), np.float32), np.zeros((1, 1), np.float32), value, value_scale=value_scale
                )
                right = quiet(value, np.float32) * value_scale
                assert np.array_equal(out, np.broadcast_to(right, out.shape) + 0, equal_nan=True)


@pytest.mark.promise("hidden keys")
@pytest.mark.parametrize("T_q", [1, 5, 100])
def test_nan_in_hidden_places_does_not_leak(T_q: int, path: str) -> None:
    T_k = 150 if path == "tiny" else 700
    call = quantized(attend(T_q if path != "tiny" else 1, T_k, heads=2, is_causal="lower_right"), F8, "token")
    mask = np.random.default_rng(0).random(T_k) < 0.5
    right = everything(**call, attn_mask=mask)
    for name in NAMES:
        call[name][..., ~mask, :] = NAN
    assert_same_bits(everything(**call, attn_mask=mask), right)
    call["value"][..., mask, 0] = NAN
    assert np.isnan(everything(**call, attn_mask=mask).out[..., 0]).all()


def gradients(call: Call, grad_out: np.ndarray) -> cattn.AttentionGradients:
    result = cattn.scaled_dot_product_attention(**call, return_lse=np.float64)
    return cattn.attention_backward(grad_out, out=result.out, lse=result.lse, **call)


@pytest.mark.promise("gradients' bits")
@pytest.mark.parametrize(("kind", "scales"), [(np.int8, "channel"), (F8, "token")])
@pytest.mark.parametrize("name", [name for name in CASES if name != "no columns"])
def test_gradients_have_the_bits_of_the_float32_call(name: str, kind: Any, scales: str, isa: str, normal: Any) -> None:
    call = quantized(CASES[name], kind, scales)
    grad_out = normal(*call["query"].shape[:3], call["value"].shape[-1], dtype=np.float32)
    with cattn.num_threads(1):
        right = gradients(dequantized(call), grad_out)
    assert right.key.dtype == right.value.dtype == np.float32
    for threads in (1, 3):
        with cattn.num_threads(threads):
            found = gradients(call, grad_out)
        for field, a in found._asdict().items():
            if a is not None:
                assert_same_bits(a, getattr(right, field), f"{field}, {threads} threads")


@pytest.mark.parametrize("scales", ["token", "channel"])
@pytest.mark.parametrize("kind", KINDS, ids=["int8", "float8"])
def test_weights_and_statistics(kind: Any, scales: str, isa: str) -> None:
    call = quantized(CASES["window, softcap, slopes, sinks"], kind, scales)
    call.pop("value"), call.pop("value_scale")
    right = dequantized(call)
    for stage in ("qk", "softcap", "bias", "mask", "softmax"):
        assert_same_bits(cattn.attention_weights(**call, stage=stage), cattn.attention_weights(**right, stage=stage))
    dropped = {"stage": "dropout", "dropout_p": 0.4, "rng": 3}
    assert_same_bits(cattn.attention_weights(**call, **dropped), cattn.attention_weights(**right, **dropped))
    found, wanted = cattn.attention_statistics(**call, top_k=3), cattn.attention_statistics(**right, top_k=3)
    for field, a in found._asdict().items():
        assert_same_bits(a, getattr(wanted, field), field)


@pytest.mark.parametrize("kind", KINDS, ids=["int8", "float8"])
@pytest.mark.parametrize("shapes", [((9, 2, 1), (9, 1, 11)), ((2, 16), (9, 2, 1)), ((9, 1, 1), (2, 11)), ((), (11,))])
def test_packed_sequences(kind: Any, shapes: tuple[tuple[int, ...], tuple[int, ...]], normal: Any) -> None:
    rng = np.random.default_rng(3)
    call: Call = {"query": normal(7, 4, 16, dtype=np.float32)}
    for name, shape, width in zip(NAMES, shapes, (16, 11), strict=True):
        call |= {name: random_bytes(rng, (9, 2, width), kind), f"{name}_scale": rng.uniform(0.01, 0.03, shape)}
    options: Call = {"cu_seqlens_q": [0, 3, 7], "cu_seqlens_k": [0, 5, 9], "is_causal": "lower_right"}
    right = cattn.varlen_attention(**dequantized(call), **options, return_lse=True)
    found = cattn.varlen_attention(**call, **options, return_lse=True)
    assert_same_bits(found.out, right.out)
    assert_same_bits(found.lse, right.lse)
    grads, wanted = (
        cattn.varlen_attention_backward(np.ones_like(right.out), **of, out=right.out, lse=right.lse, **options)
        for of in (call, dequantized(call))
    )
    assert all(np.array_equal(a, b) for a, b in zip(grads[:3], wanted[:3], strict=True))
    del call["value"], call["value_scale"]
    received = [cattn.varlen_attention_statistics(**of, **options).received for of in (call, dequantized(call))]
    assert_same_bits(received[0], received[1])
    long = call | {"key_scale": np.ones((1, 9, 2, 16))}
    with pytest.raises(ValueError, match=r"key_scale has shape \(1, 9, 2, 16\)"):
        cattn.varlen_attention_statistics(**long, **options)


@given(st.data())
@settings(max_examples=max(60, settings().max_examples))
def test_random_calls_have_the_bits_of_the_float32_call(isa: str, data: st.DataObject) -> None:
    """With every option, rank and stride of the arrays and the scales."""
    draw = data.draw
    call, _ = draw(calls())
    call = quantize(draw, call)
    if draw(st.booleans()) and "value_scale" in call:
        call["value_scale"] = draw(st.sampled_from([0.5, np.float64(0.1), [[0.25]]]))
    right = everything(**dequantized(call))
    for way, result in every_way(lambda: everything(**call), tiny=False):
        assert_same_bits(result, right, way)
    grad_out = np.ones_like(right.out)
    found, wanted = gradients(call, grad_out), gradients(dequantized(call), grad_out)
    for field, a in found._asdict().items():
        if a is not None:
            assert_same_bits(a, getattr(wanted, field), field)


def test_tables_and_threads_agree() -> None:
    """Where another test compares with the float32 call, this one compares the kernels among themselves."""
    for kind in KINDS:
        call = quantized(CASES["a few steps"], kind, "token")
        with table("scalar"), forced("rows"), cattn.num_threads(1):
            right = everything(**call)
        for entry in cattn.show_config("dicts")["tables"]:
            if entry["usable"] and entry["bit_contract"]:
                with table(entry["name"]), forced("split"), cattn.num_threads(3):
                    assert_same_bits(everything(**call), right, entry["name"])


def test_the_reference_dequantizes_in_float32(normal: Any) -> None:
    call = quantized(CASES["window, softcap, slopes, sinks"], np.int8, "channel")
    found = cattn.reference.scaled_dot_product_attention(**call, return_lse=True)
    right = cattn.reference.scaled_dot_product_attention(**dequantized(call), return_lse=True)
    assert np.array_equal(found.out, right.out)
    assert np.allclose(cattn.scaled_dot_product_attention(**call), found.out, atol=1e-5)


class Subclass(np.ndarray):
    pass


@pytest.mark.parametrize("store", [np.int8, ml_dtypes.float8_e4m3fn])
@pytest.mark.parametrize("name", ["query", "key", "value"])
def test_quantized_numbers_without_a_scale_are_refused(name: str, store: Any) -> None:
    """Whatever the object, and in every function of attention. Other integers are numbers."""
    torch = pytest.importorskip("torch")
    x, edges = np.ones((3, 2, 4), np.float32), [0, 3]
    stored, lse = x.astype(store), np.log(3 * np.ones((2, 3)))
    stored.flags.writeable = False
    tensor = torch.ones(3, 2, 4).to(torch.int8 if store is np.int8 else torch.float8_e4m3fn)
    objects = [stored, stored.view(Subclass), stored[::-1], tensor, list(stored) if store is np.int8 else stored.T]
    calls: list[Any] = [
        cattn.scaled_dot_product_attention, cattn.causal_attention, cattn.explain,
        lambda query, key, value: cattn.attention_backward(x, query, key, value, x, lse.T),
        lambda query, key, value: cattn.varlen_attention(query, key, value, edges, edges),
        lambda query, key, value: cattn.varlen_attention_backward(x, query, key, value, x, lse, edges, edges),
    ]  # fmt: skip
    if name != "value":
        calls += [
            lambda query, key, value: cattn.attention_weights(query, key),
            lambda query, key, value: cattn.attention_weights(query, key, stage="qk"),
            lambda query, key, value: cattn.attention_statistics(query, key),
            lambda query, key, value: cattn.varlen_attention_statistics(query, key, edges, edges),
        ]
    cure = "cattn.dequantize" if name == "query" else rf"{name}_scale, of cattn\.quantize"
    for call in calls:
        for wrong in objects:
            with pytest.raises(
                TypeError, match=rf"^{name} has dtype {np.dtype(store)} and no scale: pass {cure}.*astype"
            ):
                call(**{"query": x, "key": x, "value": x} | {name: wrong})
    numbers = {"query": x, "key": x, "value": x} | {name: x.astype(np.int16)}
    assert cattn.scaled_dot_product_attention(**numbers).dtype == np.float64
    with pytest.raises(TypeError, match=rf"^key has dtype {np.dtype(store)}, which has no scales.*dequantize"):
        cattn.KVCache((), 3, 4, 4, dtype="float64").append(stored, stored)


def test_other_array_types() -> None:
    torch = pytest.importorskip("torch")
    call = quantized(CASES["a step of decoding"], np.int8, "token")
    right = cattn.scaled_dot_product_attention(**call)
    tensors = {name: torch.from_numpy(call[name]) for name in (*NAMES, "key_scale", "value_scale")}
    assert_same_bits(cattn.scaled_dot_product_attention(**call | tensors), right)
    views = {name: call[name].view(Subclass) for name in NAMES}
    assert_same_bits(cattn.scaled_dot_product_attention(**call | views), right)
    swapped = {name: call[name].astype(">f4") for name in ("key_scale", "value_scale")}
    assert_same_bits(cattn.scaled_dot_product_attention(**call | swapped), right)
    eighths = quantized(CASES["a step of decoding"], F8, "token")
    right = cattn.scaled_dot_product_attention(**eighths)
    tensors = {name: torch.from_numpy(eighths[name].view(np.uint8)).view(torch.float8_e4m3fn) for name in NAMES}
    assert_same_bits(cattn.scaled_dot_product_attention(**eighths | tensors), right)


def test_explain_takes_scales() -> None:
    call = quantized(CASES["a step of decoding"], F8, "token")
    call.pop("is_causal")
    assert cattn.explain(**call).key_blocks_visited > 0


WRONG: dict[str, tuple[str, Callable[[Any], Any], type[Exception], str]] = {
    "no scale for value": ("value_scale", lambda _: None, TypeError, "value has dtype int8 and no scale: pass value_s"),
    "no scale for key": ("key_scale", lambda _: None, TypeError, "key has dtype int8 and no scale: pass key_scale"),
    "float32 with a scale": ("key", lambda a: a.astype(np.float32), TypeError, "key has dtype float32 and a scale"),
    "no last axis": ("key_scale", lambda s: s[..., 0], ValueError, r"key \(2, 2, 700, 64\): .*pass key_scale\[..., N"),
    "too few tokens": ("value_scale", lambda s: s[..., 1:, :], ValueError, r"has shape \(2, 2, 699, 1\).* value"),
    "too many axes": ("key_scale", lambda s: s[None], ValueError, r"key_scale has shape \(1, 2, 2, 700, 1\)"),
    "zero": ("key_scale", lambda s: s * 0, ValueError, r"key_scale must be positive.*got 0.0 at \(0, 0, 0, 0\)"),
    "negative": ("value_scale", lambda s: -s, ValueError, "value_scale must be positive and finite.*got -0"),
    "NaN": ("key_scale", lambda s: np.where(s == s[1, 1, 698], NAN, s), ValueError, r"got nan at \(1, 1, 698, 0\)"),
    "infinite": ("key_scale", lambda s: s * INF, ValueError, "got inf"),
    "too small": ("key_scale", lambda s: s * 0 + 1e-38, ValueError, r"from 2\*\*-100 to 2\*\*100, got"),
    "complex": ("key_scale", lambda s: s.astype(complex), TypeError, "key_scale has dtype complex128"),
    "text": ("key_scale", lambda _: "token", TypeError, "key_scale has dtype <U5; it must hold real numbers"),
    "masked": ("key_scale", lambda s: np.ma.array(s), TypeError, r"key_scale is a masked array \(numpy.ma\)"),
}  # fmt: skip


@pytest.mark.parametrize("query_dtype", [np.float32, np.float64])
@pytest.mark.parametrize("name", WRONG)
def test_errors(name: str, query_dtype: Any) -> None:
    argument, change, error, message = WRONG[name]
    call = quantized(CASES["a step of decoding"], np.int8, "token")
    call |= {"query": call["query"].astype(query_dtype), argument: change(call[argument])}
    with pytest.raises(error, match=message):
        cattn.scaled_dot_product_attention(**call)


def test_a_scale_that_overlaps_the_output() -> None:
    call = quantized(CASES["many queries"], np.int8, "token")
    memory = np.zeros(2 * 4 * 150 * 19, np.float32)
    scale = memory[: 2 * 2 * 500].reshape(2, 2, 500, 1)
    scale[...] = call["value_scale"]
    right = cattn.scaled_dot_product_attention(**call)
    out = memory.reshape(2, 4, 150, 19)
    assert_same_bits(cattn.scaled_dot_product_attention(**call | {"value_scale": scale}, out=out), right)


# ---- empty arrays ----------------------------------------------------------------------------------------------------
def test_a_scale_without_elements_is_not_read() -> None:
    """Empty arrays within larger ones, whose other elements are no scales, and 0 or 1 as in a mask of another kind."""
    nothing = np.full((3, 2), NAN, np.float32)[:, :0]
    query, key, value = np.ones((4, 0), np.float32), np.ones((3, 0), np.int8), np.ones((3, 5), np.float32)
    for n in (1, 2, 4):  # rows: each has a kernel
        result = everything(query=query[:n], key=key, value=value, key_scale=nothing)
        assert_same_bits(result, everything(query=query[:n], key=key.astype(np.float32), value=value), f"{n} queries")
        result = everything(query=query[:n], key=key, value=key, key_scale=nothing, value_scale=nothing)
        assert result.out.shape == (n, 0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cattn.attention_weights(query, np.ones((0, 0)), attn_mask=np.ones((4, 2), np.float32)[:, :0])
