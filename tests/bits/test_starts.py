"""Padding on the left: with key_value_seq_starts a row has the bits of the call without the padding.

The keys and values before the start hold NaN in every test.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import cattn
from cattn.reference._attention import repeat_blocks
from support import HALVES, INF, NAN, assert_same_bits, each, every_way, everything, forced, rounded, table, widened
from support.calls import calls

Call = dict[str, Any]
BLOCK, CHUNK = cattn._cattn._block_keys(), cattn._cattn._chunk_keys()


# ---- the call without padding --------------------------------------------------------------------------------------
def batch_of(call: Call) -> tuple[int, ...]:
    """Return the batch dimensions: all axes before the heads, which only calls of rank 4 and more have."""
    arrays = [call[name] for name in ("query", "key", "value") if name in call]
    rank = max(a.ndim for a in arrays)
    end = -3 if rank > 3 else -2
    return np.broadcast_shapes(*((1,) * (rank + end - len(a.shape[:end])) + a.shape[:end] for a in arrays))


def starts_of(call: Call) -> np.ndarray:
    return np.broadcast_to(call["key_value_seq_starts"], batch_of(call))


def cut(x: np.ndarray, start: int, axis: int, length: int) -> np.ndarray:
    """Return the part from `start` on, unless the axis is absent or broadcast."""
    if x.ndim < -axis or x.shape[axis] != length:
        return x
    return x[(..., slice(start, None), *(slice(None),) * (-axis - 1))]


def without_blocks(call: Call) -> Call:
    """Return the call with a mask of single pairs in the place of the block mask."""
    call = dict(call)
    blocks = repeat_blocks(*call.pop("block_mask"), *pairs(call))
    given = call.get("attn_mask")
    if given is None or given.dtype == bool:
        return call | {"attn_mask": blocks if given is None else blocks & given}
    return call | {"attn_mask": np.where(blocks, given, given.dtype.type(-INF))}


def pairs(call: Call) -> tuple[int, int]:
    return call["query"].shape[-2], call["key"].shape[-2]


def without_padding(call: Call, start: int) -> Call:
    """Return the call on the keys from `start` on, whose queries stand at the same places before them."""
    T_q, T_k = pairs(call)
    call = dict(call)
    del call["key_value_seq_starts"]
    if "block_mask" in call and start % call["block_mask"].size != 0:
        call = without_blocks(call)
    lengths = np.asarray(call.get("key_value_seq_lengths", T_k))
    offset = call.pop("query_offset", None)
    if call.get("is_causal", False) == "lower_right":
        offset = lengths - call.get("query_seq_lengths", T_q)
    call["query_offset"] = np.asarray(0 if offset is None else offset) - start
    call["is_causal"] = "upper_left" if call.get("is_causal", False) else False
    for name, axis in {"key": -2, "value": -2, "attn_mask": -1, "bias": -1}.items():
        if name in call:
            call[name] = each(lambda a, axis=axis: cut(np.asarray(a), start, axis, T_k), call[name])
    if "block_mask" in call:
        blocks, size = call["block_mask"]
        call["block_mask"] = cattn.BlockMask(cut(blocks, start // size, -1, -(-T_k // size)), size)
    if "key_value_seq_lengths" in call:
        call["key_value_seq_lengths"] = np.maximum(lengths - start, 0)
    return call


def pad(x: np.ndarray, n: int, fill: Any, axis: int = -1) -> np.ndarray:
    """Put n elements before the first one of an axis."""
    widths = [(0, 0)] * x.ndim
    widths[axis] = (n, 0)
    return np.pad(x, widths, constant_values=fill)


def each_entry(call: Call, compute: Callable[[Call, int], Any]) -> Any:
    """Return what compute(call without padding, start) gives for each batch entry, arrays (*batch, ...)."""
    starts, found = starts_of(call), None
    for start in np.unique(starts).tolist():
        part = compute(without_padding(call, start), start)
        if found is None:
            found = part
            continue
        pick = starts == start
        chosen = []
        for new, old in zip(part, found, strict=True):
            if isinstance(new, np.ndarray):
                old = np.where(pick.reshape(pick.shape + (1,) * (new.ndim - pick.ndim)), new, old)
            chosen.append(old)
        found = type(part)(*chosen)
    return found


def alone(call: Call, attend: Callable[..., cattn.AttentionOutput] = everything) -> cattn.AttentionOutput:
    """Return every output of the call, each batch entry from the call without its padding."""

    def compute(call: Call, start: int) -> cattn.AttentionOutput:
        result = attend(**call)
        weights, kept = pad(result.weights, start, 0), pad(result.dropout_mask, start, True)
        return result._replace(weights=weights, dropout_mask=kept)

    return each_entry(call, compute)


def with_poison(call: Call, poison: float = NAN) -> Call:
    """Return the call with NaN in all keys, values and biases before the starts."""
    call, starts, T_k = dict(call), starts_of(call), call["key"].shape[-2]
    for name in ("key", "value"):
        array, scale = call[name] if isinstance(call[name], cattn.Quantized) else (call[name], None)
        if array.dtype == np.int8:
            continue
        hidden = np.arange(T_k) < starts[..., None]
        hidden = hidden[..., None, :, None] if array.ndim > 3 else hidden[..., None]
        array = np.where(hidden, array.dtype.type(poison), array)
        call[name] = array if scale is None else cattn.Quantized(array, scale)
    if "bias" in call and call["bias"].shape[-1] == T_k:
        call["bias"] = np.where(np.arange(T_k) < starts.min(), poison, call["bias"])
    return call


def attend(T_q: int, T_k: int, starts: Any, *, heads: int = 4, dtype: Any = np.float32, **options: Any) -> Call:
    """Return a call of grouped heads with poison before the starts."""
    rng = np.random.default_rng([T_q, T_k])
    shapes = {"query": (2, heads, T_q, 11), "key": (2, 2, T_k, 11), "value": (2, 2, T_k, 19)}
    call = {name: rng.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}
    return with_poison(call | {"key_value_seq_starts": starts} | options)


def blocks(*shape: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).random(shape) < 0.5


CASES: dict[str, Callable[..., Call]] = {
    "many queries": lambda **more: attend(150, 500, [3, 401], **more),
    "causal": lambda **more: attend(150, 150, [149, 20], is_causal=True, **more),
    "a step of decoding": lambda **more: attend(1, 700, [BLOCK + 5, 650], is_causal="lower_right", **more),
    "a few steps": lambda **more: attend(6, 2 * CHUNK + 90, [CHUNK + 5, 100], is_causal="lower_right", **more),
    "few tokens": lambda **more: attend(2, 30, [0, 29], is_causal="lower_right", heads=2, **more),
    "no key is left": lambda **more: attend(100, 200, [200, 0], is_causal="lower_right", sinks=[1, 2, 3, 4.0], **more),
    "the start is after the length": lambda **more: attend(
        40, 300, [250, 10], key_value_seq_lengths=[200, 190], query_seq_lengths=[40, 7], **more
    ),
    "window, softcap, slopes, sinks": lambda **more: attend(
        99, 400, [280, 190], is_causal="lower_right", window_size=(150, 0), softcap=3.0,
        alibi_slopes=[0.5, 0.1, 0.02, 0.0], sinks=[0.5, -1, -INF, 2.0], **more,
    ),
    "masks and dropout": lambda **more: attend(
        40, 300, [250, 10], attn_mask=blocks(40, 300), bias=np.random.default_rng(2).standard_normal((2, 4, 1, 300)),
        dropout_p=0.3, rng=9, **more,
    ),
    "blocks": lambda **more: attend(
        130, 650, [100, 333], block_mask=cattn.BlockMask(blocks(2, 1, 6, 26), 25), is_causal="lower_right", **more
    ),
    "one start for all": lambda **more: attend(100, 300, 97, query_offset=np.array([200, 40]), is_causal=True, **more),
}  # fmt: skip


# ---- output, weights, log-sum-exp ----------------------------------------------------------------------------------
@pytest.mark.promise("padding on the left", "hidden keys")
@pytest.mark.parametrize("name", CASES)
def test_the_bits_are_those_of_the_call_without_padding(name: str, isa: str, dtype: Any) -> None:
    call = CASES[name](dtype=dtype)
    right = alone(call)
    for poisoned in (call, with_poison(call, INF)):
        for way, result in every_way(lambda of=poisoned: everything(**of), tiny=name == "few tokens"):
            assert_same_bits(result, right, way)


@pytest.mark.promise("halves")
@pytest.mark.parametrize("half", HALVES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_halves(name: str, half: np.dtype, isa: str) -> None:
    call = CASES[name](dtype=half)
    right = rounded(alone(widened(call)), half)
    for way, result in every_way(lambda: everything(**call), tiny=name == "few tokens"):
        assert_same_bits(result, right, way)


@pytest.mark.promise("quantized")
@pytest.mark.parametrize("storage", [np.int8, ml_dtypes.float8_e4m3fn], ids=["int8", "float8"])
@pytest.mark.parametrize("axis", [-1, -2], ids=["a scale a token", "a scale a column"])
def test_quantized_keys_and_values(storage: Any, axis: int, isa: str) -> None:
    rng = np.random.default_rng(5)
    call: Call = {"query": rng.standard_normal((2, 4, 30, 32), dtype=np.float32)}
    for name in ("key", "value"):
        values = (rng.standard_normal((2, 2, 450, 32)) * 40).astype(storage)
        shape = [2, 2, 450, 32]
        shape[axis] = 1
        call[name] = cattn.Quantized(values, (rng.random(shape) / 40 + 0.01).astype(np.float32))
    call = with_poison(call | {"key_value_seq_starts": [333, 71], "is_causal": "lower_right"})
    right = alone(call)
    for way, result in every_way(lambda: everything(**call), tiny=False):
        assert_same_bits(result, right, way)
    step = call | {"query": call["query"][..., -1:, :]}
    for way, result in every_way(lambda: everything(**step), tiny=False):
        assert_same_bits(result.out, right.out[..., -1:, :].copy(), way)


@pytest.mark.parametrize("layout", ["C", "tokens before heads", "backwards", "apart"])
def test_any_strides_of_inputs_and_results(layout: str, path: str, dtype: Any) -> None:
    """Memory between the elements of a result is not written."""
    call = CASES["few tokens"](dtype=dtype)
    right = alone(call)

    def lay_out(a: np.ndarray) -> np.ndarray:
        if layout == "tokens before heads":
            return np.ascontiguousarray(a.swapaxes(1, 2)).swapaxes(1, 2)
        if layout == "backwards":
            return np.ascontiguousarray(a[..., ::-1, ::-1])[..., ::-1, ::-1]
        return np.repeat(np.repeat(a, 2, axis=-1), 3, axis=-2)[..., ::3, ::2] if layout == "apart" else a

    strided = {name: lay_out(x) if name in ("query", "key", "value") else x for name, x in call.items()}
    memory = np.full((2, 4, 9, 50), 7, dtype)
    out = memory[:, ::2, 1:7:3, 48:10:-2]
    result = cattn.scaled_dot_product_attention(**strided, out=out)
    assert result is out
    assert_same_bits(out.copy(), right.out)
    out[...] = 7
    assert (memory == 7).all()
    memory = np.full((2, 4, 9, 100), 7, dtype)
    weights = memory[:, ::2, 1:7:3, 80:20:-2]
    cattn.attention_weights(**{name: x for name, x in strided.items() if name != "value"}, out=weights)
    assert_same_bits(weights.copy(), right.weights)
    weights[...] = 7
    assert (memory == 7).all()


class Weights(NamedTuple):
    weights: np.ndarray


@pytest.mark.promise("stages")
@pytest.mark.parametrize("stage", ["qk", "softcap", "bias", "mask", "softmax", "dropout"])
def test_stages_of_the_weights(stage: Any, isa: str, dtype: Any) -> None:
    call = CASES["window, softcap, slopes, sinks"](dtype=dtype) | {"dropout_p": 0.4, "rng": 3, "stage": stage}
    del call["value"]
    (right,) = each_entry(
        call, lambda call, start: Weights(pad(cattn.attention_weights(**call), start, -INF if stage == "mask" else 0))
    )
    for way, weights in every_way(lambda: cattn.attention_weights(**call), tiny=False):
        if stage in ("qk", "softcap", "bias"):  # nothing is hidden yet
            hidden = np.arange(400) < starts_of(call)[:, None, None, None]
            weights = np.where(hidden, 0, weights)
        assert_same_bits(weights, right, way)


def test_causal_attention_counts_from_key_0(dtype: Any, path: str) -> None:
    """The default offset is the difference of the lengths, with or without starts."""
    call = CASES["few tokens"](dtype=dtype)
    right = cattn.scaled_dot_product_attention(**call)
    del call["is_causal"]
    assert_same_bits(cattn.causal_attention(**call), right)


@pytest.mark.promise("padding on the left")
@pytest.mark.parametrize("n_padding", [0, 1, 15, 17, 100, BLOCK - 1, BLOCK + 1, CHUNK - 1, CHUNK, CHUNK + 3])
def test_padding_is_skipped_and_changes_nothing(n_padding: int, isa: str, dtype: Any, normal: Any) -> None:
    T = 220
    x = [normal(1, 2, T, 8, dtype=dtype) for _ in range(3)]
    padded = [np.concatenate([np.full((1, 2, n_padding, 8), NAN, dtype), a], axis=2) for a in x]
    out = cattn.causal_attention(*padded, key_value_seq_starts=n_padding)
    assert not out[:, :, :n_padding].any()
    assert_same_bits(out[:, :, n_padding:].copy(), cattn.causal_attention(*x))
    plan = cattn.explain(*padded, is_causal="lower_right", key_value_seq_starts=n_padding)
    assert plan.visible_pairs == 2 * T * (T + 1) // 2
    step = cattn.explain(padded[0][:, :, -1:], *padded[1:], key_value_seq_starts=n_padding)
    assert step.key_blocks_visited == 2 * -(-T // BLOCK)
    blocks_of_all = -(-(T + n_padding) // BLOCK)
    assert step.key_blocks_visited + step.key_blocks_skipped == 2 * blocks_of_all


def test_steps_with_a_cache_have_the_bits_of_the_whole_sequence(dtype: Any, normal: Any) -> None:
    """The prompt stands at the end of a batch; each step of decoding sees one more key."""
    q, k, v = (normal(2, 4, 230, 16, dtype=dtype) for _ in range(3))
    starts, prompt, cache = np.array([33, 7]), 210, cattn.KVCache(2, 4, 230, 16, dtype=dtype)
    cache.append(with_poison({"query": q, "key": k, "value": v, "key_value_seq_starts": starts})["key"][:, :, :prompt],
                 v[:, :, :prompt])  # fmt: skip
    for t in range(prompt, 230):
        cache.append(k[:, :, t : t + 1], v[:, :, t : t + 1])
        step = cattn.causal_attention(q[:, :, t : t + 1], cache.k, cache.v, key_value_seq_starts=starts)
        for b, start in enumerate(starts):
            part = np.s_[b : b + 1, :, start : t + 1]
            right = cattn.causal_attention(q[part], k[part], v[part])[:, :, -1:]
            assert_same_bits(step[b : b + 1], right.copy(), f"token {t}")


# ---- second passes -------------------------------------------------------------------------------------------------
def gradients(call: Call, grad_out: np.ndarray, grad_lse: np.ndarray) -> cattn.AttentionGradients:
    result = cattn.scaled_dot_product_attention(**call, return_lse=np.float64)
    return cattn.attention_backward(grad_out, out=result.out, lse=result.lse, grad_lse=grad_lse, **call)


def check_gradients(call: Call) -> None:
    """Compare the gradients, where no argument is shared by batch entries, with the calls without padding."""
    rows, T_k = (*batch_of(call), *call["query"].shape[-3 if call["query"].ndim > 3 else -2 : -1]), pairs(call)[1]
    biased = call.get("bias", call.get("attn_mask"))
    rng = np.random.default_rng(8)
    grad_out = rng.standard_normal((*rows, call["value"].shape[-1])).astype(call["query"].dtype)
    grad_lse = rng.standard_normal(rows)

    def compute(call: Call, start: int) -> cattn.AttentionGradients:
        found = gradients(call, grad_out, grad_lse)
        key, value, bias = pad(found.key, start, 0, -2), pad(found.value, start, 0, -2), found.bias
        if bias is not None and biased.shape[-1] == T_k:
            bias = pad(bias, start, 0)
        return found._replace(key=key, value=value, bias=bias)

    with cattn.num_threads(1):
        right = each_entry(call, compute)
    for threads in (1, 3):
        with cattn.num_threads(threads):
            found = gradients(call, grad_out, grad_lse)
        for field in cattn.AttentionGradients._fields:
            if getattr(right, field) is None:
                assert getattr(found, field) is None
            else:
                assert_same_bits(getattr(found, field), getattr(right, field), f"{field}, {threads} threads")


@pytest.mark.promise("gradients' bits")
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("name", CASES)
def test_gradients_have_the_bits_of_the_call_without_padding(name: str, dtype: Any, isa: str) -> None:
    call = CASES[name](dtype=dtype)
    if "sinks" in call:
        call["sinks"] = np.broadcast_to(call["sinks"], (2, 4))
    check_gradients(call)


@pytest.mark.promise("gradients' bits")
@pytest.mark.parametrize("shape", [(1, 4, 130, 420), (1, 1, 130, 420), (2, 1, 130, 420)], ids=str)
def test_the_gradient_of_a_shared_bias_is_added_in_order(shape: tuple[int, ...], isa: str, dtype: Any) -> None:
    """Key blocks of the batch entries start in different columns of the bias: its parts must not mix."""
    rng = np.random.default_rng(3)
    bias = rng.standard_normal(shape)
    call = attend(130, 420, [201, 77], dtype=dtype, bias=bias, is_causal="lower_right", softcap=4.0)
    grad_out, grad_lse = rng.standard_normal((2, 4, 130, 19)).astype(dtype), np.zeros((2, 4, 130))
    each = gradients(call | {"bias": np.broadcast_to(bias, (2, 4, 130, 420)).copy()}, grad_out, grad_lse).bias
    right = np.zeros(shape, dtype)
    for b, h in np.ndindex(2, 4):
        right[b % shape[0], h % shape[1]] += each[b, h]
    for threads in (1, 2, 3):
        with cattn.num_threads(threads):
            for _ in range(3):
                assert_same_bits(gradients(call, grad_out, grad_lse).bias, right, f"{threads} threads")


@pytest.mark.promise("gradients' bits")
@pytest.mark.parametrize("shape", [(2, 4, 1, 420), (2, 4, 130, 1), (2, 1, 1, 420)], ids=str)
def test_the_gradient_of_a_bias_of_keys_or_queries(shape: tuple[int, ...], dtype: Any, normal: Any) -> None:
    call = attend(130, 420, [201, 77], dtype=dtype, bias=normal(*shape), is_causal="lower_right")
    check_gradients(call)


def check_statistics(call: Call) -> None:
    ignored = ("value", "dropout_p", "rng")
    call = {name: x for name, x in call.items() if name not in ignored} | {"observation_window": 30}

    wanted = min(5, pairs(call)[1])

    def compute(call: Call, start: int) -> cattn.AttentionStatistics:
        top_k = min(wanted, pairs(call)[1])  # no more than there are keys
        found = cattn.attention_statistics(**call, top_k=top_k)
        keys, weights = np.full((*found.lse.shape, wanted), -1), np.zeros((*found.lse.shape, wanted), found.lse.dtype)
        if top_k > 0:
            keys[..., :top_k] = np.where(found.top_keys < 0, -1, found.top_keys + start)
            weights[..., :top_k] = found.top_weights
        received, received_max = pad(found.received, start, 0), pad(found.received_max, start, 0)
        return found._replace(top_keys=keys, top_weights=weights, received=received, received_max=received_max)

    right = each_entry(call, compute)
    for threads in (1, 3):
        with cattn.num_threads(threads):
            found = cattn.attention_statistics(**call, top_k=wanted)
        for field, a, b in zip(found._fields, found, right, strict=True):
            if wanted > 0 or a is not None:
                assert_same_bits(a, b, f"{field}, {threads} threads")


@pytest.mark.promise("padding on the left", "statistics' bits")
@pytest.mark.parametrize("name", CASES)
def test_statistics_have_the_bits_of_the_call_without_padding(name: str, isa: str, dtype: Any) -> None:
    check_statistics(CASES[name](dtype=dtype))


# ---- everything together -------------------------------------------------------------------------------------------
def of_each_entry(call: Call) -> Call:
    """Return the call in which no two batch entries share what has a gradient."""
    call, batch = dict(call), batch_of(call)
    axes = 3 if max(call[name].ndim for name in ("query", "key", "value")) > 3 else 2
    for name in ("key", "value", "attn_mask", "bias", "sinks"):
        if name in call:
            x = np.asarray(call[name])
            n = 1 if name == "sinks" else axes
            x = x.reshape((1,) * (n - x.ndim) + x.shape)
            shape = x.shape[-n:]
            if name in ("attn_mask", "bias"):
                shape = (*shape[:-1], pairs(call)[1])
                if "block_mask" in call:  # becomes part of a mask of single pairs
                    heads = max((call[a].shape[-3] for a in ("query", "key", "value") if call[a].ndim > 2), default=1)
                    shape = (heads, *pairs(call))[-n:]
            call[name] = np.broadcast_to(x, (*batch, *shape)).copy()
    return call


@given(st.data())
@settings(max_examples=max(40, settings().max_examples // 2))
def test_random_calls_have_the_bits_of_the_call_without_padding(isa: str, data: st.DataObject) -> None:
    """With every option, rank, stride and dtype."""
    call, _ = data.draw(calls(["key_value_seq_starts"]))
    assume(0 not in call["query"].shape[:-2])  # without a batch entry there is no call alone
    right = alone(call)
    for way, result in every_way(lambda: everything(**call), tiny=False):
        assert_same_bits(result, right, way)
    check_gradients(of_each_entry(call))
    check_statistics(call)


@given(st.data())
@settings(max_examples=max(20, settings().max_examples // 4))
def test_any_length_and_any_start(isa: str, data: st.DataObject) -> None:
    """The newest queries of a batch for generation, with windows and slopes."""
    T_k = data.draw(st.integers(1, 700))
    T_q = data.draw(st.sampled_from([1, 3, 8, 50, 130]))
    starts = [data.draw(st.integers(0, T_k)) for _ in range(2)]
    options: Call = {"is_causal": "lower_right"}
    if data.draw(st.booleans()):
        options |= {"window_size": (data.draw(st.integers(0, 300)), 0), "alibi_slopes": [0.5, 0.1, 0.02, 0.0]}
    call = attend(T_q, T_k, starts, dtype=data.draw(st.sampled_from([np.float32, np.float64])), **options)
    right = alone(call)
    for way, result in every_way(lambda: everything(**call), tiny=False):
        assert_same_bits(result, right, way)
    check_gradients(call)
    check_statistics(call)


def test_the_bits_of_a_torch_generator_belong_to_the_whole_array(dtype: Any, normal: Any) -> None:
    """It draws in sequence, also for padding, so that starts change no decision."""
    call = attend(100, 300, [201, 77], dtype=dtype, is_causal="lower_right", dropout_p=0.4)
    finite = {name: np.nan_to_num(call[name]) for name in ("key", "value")}
    without = {name: x for name, x in (call | finite).items() if name != "key_value_seq_starts"}

    def attention(call: Call) -> cattn.AttentionOutput:
        extras = {"return_weights": True, "return_lse": True, "return_dropout_mask": True}
        return cattn.scaled_dot_product_attention(**call, **extras, rng=cattn.TorchGenerator(3))

    mask = attention(without).dropout_mask
    for way, result in every_way(lambda: attention(call), tiny=False):
        assert (result.dropout_mask == mask).all(), way
        values = np.repeat(finite["value"], 2, axis=1)
        np.testing.assert_allclose(result.out, (result.weights * mask / 0.6) @ values, rtol=0, atol=1e-5)
    grad_out = normal(2, 4, 100, 19, dtype=dtype)
    lse = result.lse.astype(np.float64)
    found = cattn.attention_backward(grad_out, out=result.out, lse=lse, **call, rng=cattn.TorchGenerator(3))
    right = np.swapaxes(result.weights * mask / 0.6, -1, -2) @ grad_out
    np.testing.assert_allclose(found.value, right[:, ::2] + right[:, 1::2], rtol=0, atol=1e-4)


def test_a_start_of_0_changes_nothing(dtype: Any, path: str) -> None:
    call = attend(5, 90, [0, 0], heads=2, dtype=dtype, dropout_p=0.3, rng=4, query_offset=80, is_causal=True)
    without = {name: x for name, x in call.items() if name != "key_value_seq_starts"}
    assert_same_bits(everything(**call), everything(**without))


def test_tables_agree(dtype: Any) -> None:
    """Where another test compares with other calls, this one compares the kernels among themselves."""
    call = CASES["window, softcap, slopes, sinks"](dtype=dtype)
    with table("scalar"), forced("rows"), cattn.num_threads(1):
        right = everything(**call)
    for entry in cattn.show_config("dicts")["tables"]:
        if entry["usable"] and entry["bit_contract"]:
            with table(entry["name"]), forced("tile"), cattn.num_threads(3):
                assert_same_bits(everything(**call), right, entry["name"])
