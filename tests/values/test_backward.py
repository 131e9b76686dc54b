"""Gradients of attention against the reference, finite differences and PyTorch; bits; hidden keys; errors."""

from __future__ import annotations

import copy
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import cattn
from support import INF, NAN, assert_same_bits, examples, looped, quiet
from support.calls import calls
from support.derivatives import (
    FIELDS,
    GATES,
    NAMES,
    SHAPES,
    TOLERANCE,
    Call,
    arguments,
    backward,
    check,
    forward,
    gated,
    options,
    qkv,
    random_gradients,
    shaped,
)


@pytest.mark.parametrize("name", [*NAMES, *GATES])
def test_every_option_agrees_with_the_reference(name: str, dtype: Any, rng: np.random.Generator) -> None:
    call = qkv(rng, dtype, (2, 3, 130, 20), (2, 3, 250, 20), (2, 3, 250, 9))
    check(call | (options(rng, 2, 3, 130, 250) | gated(rng, 2, 3, 130, 9))[name], TOLERANCE[dtype])


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("extra", ["plain", "causal", "sinks and bias"])
def test_every_shape_agrees_with_the_reference(name: str, extra: str, dtype: Any, rng: np.random.Generator) -> None:
    check(shaped(rng, dtype, name, extra), TOLERANCE[dtype])


def test_the_batch_dimension_of_three_may_be_heads(rng: np.random.Generator) -> None:
    call = qkv(rng, np.float64, (4, 10, 8), (2, 12, 8), (2, 12, 3)) | {"enable_gqa": True}
    check(call | {"sinks": rng.standard_normal(4), "bias": rng.standard_normal((4, 10, 1))}, 1e-13)


def test_strides_and_dtypes_change_no_bit(rng: np.random.Generator) -> None:
    call = qkv(rng, np.float64, (2, 3, 50, 20), (2, 3, 70, 20), (2, 3, 70, 18)) | {"is_causal": "lower_right"}
    result, grad_out = forward(call), rng.standard_normal((2, 3, 50, 18))
    expected = cattn.attention_backward(grad_out, out=result.out, lse=result.lse, **call)

    def odd(a: np.ndarray) -> np.ndarray:  # reversed, transposed, every third
        wide = np.zeros((*a.shape[:-2], a.shape[-1] * 3, a.shape[-2]))
        view = wide[..., ::-3, ::-1].swapaxes(-1, -2)
        view[...] = a
        return view

    def every_second(a: np.ndarray) -> np.ndarray:
        return np.repeat(a, 2, axis=-1)[..., ::2]

    strided = call | {name: odd(call[name]) for name in ("query", "key", "value")}
    lse = np.repeat(result.lse, 2, axis=-1)[..., ::2]
    for actual in (
        cattn.attention_backward(odd(grad_out), out=odd(result.out), lse=lse, **strided),
        cattn.attention_backward(every_second(grad_out), out=result.out, lse=lse, **call),
        cattn.attention_backward(grad_out, out=every_second(result.out), lse=lse, **call),
    ):
        for name in FIELDS[:3]:
            assert_same_bits(getattr(actual, name), getattr(expected, name), name)
    mixed = cattn.attention_backward(
        grad_out.tolist(), out=result.out, lse=result.lse, **call | {"value": call["value"].astype(np.float32)}
    )
    assert mixed.value.dtype == np.float64


# ---- finite differences --------------------------------------------------------------------------------------------
def check_differences(call: Call, seed: int = 0) -> None:
    """Check the directional derivative of a loss for each argument, by central differences in float64.

    The loss is the sum of grad_out * out, and of grad_lse * lse over the rows with a finite log-sum-exp.
    """
    rng = np.random.default_rng(seed)
    grad_out, grad_lse = random_gradients(call, seed)
    grads = backward(call, grad_out, grad_lse)
    for name, array in arguments(call).items():
        keyword = "attn_mask" if name == "bias" and call.get("bias") is None else name
        direction = rng.standard_normal(array.shape)

        def along(step: float, keyword: str = keyword, array: Any = array, direction: Any = direction) -> float:
            result = forward(call | {keyword: array + step * direction})
            rows = np.isfinite(result.lse)
            return float((result.out * grad_out).sum() + (result.lse[rows] * grad_lse[rows]).sum())

        h = 2e-4  # two central differences give an error of order h**4
        near, far = (along(h) - along(-h)) / (2 * h), (along(2 * h) - along(-2 * h)) / (4 * h)
        expected = (4 * near - far) / 3
        actual = (getattr(grads, name) * direction).sum()
        size = 1 + np.abs(getattr(grads, name) * direction).sum() ** 0.5
        assert abs(actual - expected) <= 1e-7 * size, f"{name} of {list(call)}: {actual} {expected}"


@pytest.mark.promise("gradients")
@pytest.mark.parametrize("name", [*NAMES, *GATES])
def test_every_option_agrees_with_finite_differences(name: str, rng: np.random.Generator) -> None:
    call = qkv(rng, np.float64, (2, 3, 9, 5), (2, 3, 12, 5), (2, 3, 12, 4))
    check_differences(call | (options(rng, 2, 3, 9, 12) | gated(rng, 2, 3, 9, 4))[name])


@examples(25)
@given(st.sets(st.sampled_from(NAMES), min_size=2, max_size=5), st.integers(0, 2**32), st.sampled_from([1, 2, 6]))
def test_random_combinations_of_options_agree(names: set[str], seed: int, kv_heads: int) -> None:
    rng = np.random.default_rng(seed)
    T_q, T_k = (int(n) for n in rng.integers(1, 260, 2))
    small = qkv(rng, np.float64, (2, 6, 5, 4), (2, kv_heads, 7, 4), (2, kv_heads, 7, 3))
    large = qkv(rng, np.float64, (2, 6, T_q, 9), (2, kv_heads, T_k, 9), (2, kv_heads, T_k, 5))
    for call, (rows, keys) in ((small, (5, 7)), (large, (T_q, T_k))):
        every = options(rng, 2, 6, rows, keys)
        for name in sorted(names):
            call |= every[name]
        if "query_offset" in call:
            call["is_causal"] = True
        check(call, 1e-12)
    check_differences(small)


# ---- PyTorch -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("p", [0.1, 0.5])
def test_autograd_of_torch_agrees_with_its_own_dropout(p: float, causal: bool) -> None:
    """PyTorch's function draws from its own generator. A TorchGenerator with the same seed draws the same mask."""
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    query, key, value = leaves = [torch.randn(2, 3, 60, 8, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    grad_out = torch.randn(2, 3, 60, 8, dtype=torch.float64)
    torch.manual_seed(123)
    out = torch.nn.functional.scaled_dot_product_attention(query, key, value, dropout_p=p, is_causal=causal)
    right = torch.autograd.grad(out, leaves, grad_out)
    arrays = [leaf.detach().numpy() for leaf in leaves]
    options: dict[str, Any] = {"dropout_p": p, "is_causal": causal}
    result = cattn.scaled_dot_product_attention(*arrays, rng=cattn.TorchGenerator(123), return_lse=True, **options)
    grads = cattn.attention_backward(
        grad_out.numpy(), *arrays, result.out, result.lse, rng=cattn.TorchGenerator(123), **options
    )
    for ours, theirs in zip(grads[:3], right, strict=True):
        np.testing.assert_allclose(ours, theirs.numpy(), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("T_q", [1, 120])
def test_a_torch_generator_draws_the_same_mask_again(rng: np.random.Generator, threads: int, T_q: int) -> None:
    call = qkv(rng, np.float64, (2, 4, T_q, 8), (2, 2, 210, 8), (2, 2, 210, 8)) | {"dropout_p": 0.3}
    generator = cattn.TorchGenerator(3)
    before = copy.copy(generator)
    result = cattn.scaled_dot_product_attention(**call, rng=generator, return_lse=True, return_dropout_mask=True)
    grad_out = rng.standard_normal(result.out.shape)
    grads = cattn.attention_backward(grad_out, out=result.out, lse=result.lse, rng=before, **call)
    assert before.get_state().tobytes() == generator.get_state().tobytes(), "both passes advance it equally"
    # the gradient of the values, written out
    weights = cattn.attention_weights(call["query"], call["key"]) * result.dropout_mask / 0.7
    value = (weights.swapaxes(-1, -2) @ grad_out).reshape(2, 2, 2, 210, 8).sum(axis=2)
    np.testing.assert_allclose(grads.value, value, rtol=1e-12, atol=1e-12)


# ---- hidden keys ---------------------------------------------------------------------------------------------------


HIDING = {
    "causal": lambda rng: {"is_causal": "lower_right"},
    "window": lambda rng: {"is_causal": "upper_left", "window_size": (20, 0)},
    "lengths": lambda rng: {"query_seq_lengths": 150, "key_value_seq_lengths": 210},
    "starts": lambda rng: {"key_value_seq_starts": 98, "key_value_seq_lengths": 249, "is_causal": "lower_right"},
    "mask": lambda rng: {"attn_mask": rng.random((201, 250)) < 0.02},
    "bias": lambda rng: {"bias": np.where(rng.random((201, 250)) < 0.02, 0.5, -INF)},
    "bias and cap": lambda rng: {"bias": np.where(rng.random((201, 250)) < 0.02, 0.5, -INF), "softcap": 2.0},
    "slopes": lambda rng: {"is_causal": "lower_right", "alibi_slopes": [0.1, 0.2]},
    "dropout": lambda rng: {"is_causal": "lower_right", "dropout_p": 0.4, "rng": 3, "sinks": [0.1, 0.2]},
}


@pytest.mark.promise("hidden keys")
@pytest.mark.parametrize("poison", [NAN, INF, 1e38], ids=["nan", "inf", "1e38"])
@looped("hiding", HIDING)
def test_hidden_poison_is_harmless(hiding: str, poison: float, dtype: Any, isa: str, rng: np.random.Generator) -> None:
    """Poisoned keys change no gradient of queries that do not see them, and poisoned queries none of hidden keys."""
    poison = poison * 1e270 if dtype is np.float64 and poison == 1e38 else poison
    extra = HIDING[hiding](np.random.default_rng(5))
    call = qkv(rng, dtype, (1, 2, 201, 19), (1, 2, 250, 19), (1, 2, 250, 11)) | extra
    visible = ~np.isneginf(cattn.attention_weights(
        **{k: v for k, v in call.items() if k not in ("value", "dropout_p", "rng", "softcap")}, stage="mask"
    )[0, 0])  # fmt: skip
    grad_out = rng.standard_normal((1, 2, 201, 11)).astype(dtype)
    result = forward(call)
    clean = cattn.attention_backward(grad_out, out=result.out, lse=result.lse, **call)

    bad = [j for j in (249, 230, 97) if not visible[:, j].all()]
    sees = visible[:, bad].any(axis=1)
    key, value = call["key"].copy(), call["value"].copy()
    key[..., bad, :], value[..., bad, :] = poison, poison
    poisoned = call | {"key": key, "value": value}
    # out and lse come from the clean call: nothing checks them if they are merged
    grads = cattn.attention_backward(grad_out, out=result.out, lse=result.lse, merged=True, **poisoned)
    assert_same_bits(grads.query[..., ~sees, :], clean.query[..., ~sees, :], "query")
    if "bias" in call:
        assert_same_bits(grads.bias[~sees], clean.bias[~sees], "bias")
        assert (grads.bias[~visible] == 0).all()
    untouched = ~visible[sees].any(axis=0)
    for name in ("key", "value"):
        assert_same_bits(getattr(grads, name)[..., untouched, :], getattr(clean, name)[..., untouched, :], name)

    bad = [i for i in (0, 95, 180) if not visible[i].all()]
    seen = visible[bad].any(axis=0)
    arrays = [a.copy() for a in (call["query"], grad_out, result.out)]
    for array in arrays:
        array[..., bad, :] = poison
    lse = result.lse.copy()
    lse[..., bad] = poison
    grads = cattn.attention_backward(arrays[1], out=arrays[2], lse=lse, merged=True, **call | {"query": arrays[0]})
    for name in ("key", "value"):
        assert_same_bits(getattr(grads, name)[..., ~seen, :], getattr(clean, name)[..., ~seen, :], name)
    good = np.setdiff1d(np.arange(201), bad)
    assert_same_bits(grads.query[..., good, :], clean.query[..., good, :], "other queries")


@pytest.mark.promise("visible NaN")
def test_a_visible_nan_shows_only_where_it_is_seen(rng: np.random.Generator) -> None:
    call = qkv(rng, np.float32, (100, 8), (100, 8), (100, 8)) | {"is_causal": True}
    call["value"][50, 3] = NAN
    grads = backward(call)
    assert np.isnan(grads.query[50:]).all()
    assert np.isfinite(grads.query[:50]).all()
    assert np.isnan(grads.key[:51]).all(), "the queries from 50 on see them all"
    call["value"][50, 3] = 0
    result = forward(call)
    grad_out = np.ones((100, 8), np.float32)
    grad_out[50] = NAN
    grads = cattn.attention_backward(grad_out, out=result.out, lse=result.lse, **call)
    assert np.isnan(grads.value[:51]).all()
    assert np.isfinite(grads.value[51:]).all()


def test_hidden_values_do_not_reach_the_gradient_of_a_bias_for_all_rows(isa: str, dtype: type) -> None:
    """Found by tools/fuzz core: vector lanes past the last query have weight 0, and 0 times NaN is NaN."""
    rng = np.random.default_rng(3)
    for T_q in (1, 3, 5, 17):
        sizes = {"query": T_q, "key": 9, "value": 9}
        call: Call = {name: rng.standard_normal((n, 4)).astype(dtype) for name, n in sizes.items()}
        call |= {"bias": rng.standard_normal((1, 9)).astype(dtype), "attn_mask": np.arange(9) != 4}
        clean = backward(call)
        dirty = call | {"value": np.where(call["attn_mask"][:, None], call["value"], NAN).astype(dtype)}
        assert_same_bits(backward(dirty).bias, clean.bias, f"{T_q} queries")


# ---- errors --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("grad_out", (2, 5, 4), r"grad_out has shape \(2, 5, 4\), the output has \(2, 5, 3\)"),
        ("grad_out", (5, 3), r"grad_out has shape \(5, 3\), the output has \(2, 5, 3\)"),
        ("out", (2, 7, 3), r"out has shape \(2, 7, 3\), the output has \(2, 5, 3\)"),
        ("lse", (2, 5, 1), r"lse has shape \(2, 5, 1\), the log-sum-exp has \(2, 5\)"),
    ],
)
def test_wrong_shapes_are_refused(name: str, shape: tuple[int, ...], message: str) -> None:
    given = {"grad_out": np.ones((2, 5, 3)), "out": np.ones((2, 5, 3)), "lse": np.ones((2, 5))} | {name: np.ones(shape)}
    with pytest.raises(ValueError, match=message):
        cattn.attention_backward(
            given["grad_out"], np.ones((2, 5, 4)), np.ones((2, 7, 4)), np.ones((2, 7, 3)), given["out"], given["lse"]
        )


def test_wrong_dtypes_are_refused(rng: np.random.Generator) -> None:
    call = qkv(rng, np.float32, (5, 4), (5, 4), (5, 4))
    result = forward(call)
    with pytest.raises(
        TypeError, match=r"grad_out has dtype float64, the forward pass gives float32: pass grad_out\.astype"
    ):
        cattn.attention_backward(np.ones((5, 4)), out=result.out, lse=result.lse, **call)
    with pytest.raises(TypeError, match="out has dtype float16, the forward pass gives float32"):
        cattn.attention_backward(result.out, out=result.out.astype(np.float16), lse=result.lse, **call)


@pytest.mark.parametrize("generator", [None, np.random.default_rng(1)], ids=["None", "Generator"])
def test_dropout_needs_the_seed_of_the_forward_pass(generator: Any, rng: np.random.Generator) -> None:
    call = qkv(rng, np.float64, (5, 4), (5, 4), (5, 4)) | {"dropout_p": 0.5}
    result = cattn.scaled_dot_product_attention(**call, return_lse=True)
    with pytest.raises(ValueError, match="dropout_seed"):
        cattn.attention_backward(result.out, out=result.out, lse=result.lse, rng=generator, **call)
    again = cattn.attention_backward(result.out, out=result.out, lse=result.lse, rng=result.dropout_seed, **call)
    seed = np.uint64(result.dropout_seed or 0)
    assert_same_bits(
        again.query,
        cattn.attention_backward(result.out, out=result.out, lse=result.lse, rng=seed, **call).query,
    )


# ---- results of another forward pass ---------------------------------------------------------------------------------
FORGOTTEN: dict[str, dict[str, Any]] = {
    name: call
    for name, call in options(np.random.default_rng(3), 2, 3, 130, 250).items()
    if name not in ("plain", "all dropped", "offset")
} | {
    "dropout": {"dropout_p": 0.3, "rng": 7, "is_causal": "upper_left"},
    "sinks": {"sinks": np.array([1.0, 4.0, 3.0])},
    "sinks of each": {"sinks": np.full((2, 3), 4.0)},
    "gate": gated(np.random.default_rng(3), 2, 3, 130, 9)["gate"],
}


@pytest.mark.promise("forgotten options")
@pytest.mark.parametrize("name", FORGOTTEN)
def test_a_forgotten_option_is_an_error(name: str, dtype: Any, rng: np.random.Generator) -> None:
    """In both directions: the forward pass has the option, or the backward pass."""
    plain = qkv(rng, dtype, (2, 3, 130, 20), (2, 3, 250, 20), (2, 3, 250, 9))
    extra = FORGOTTEN[name] if name != "dropout" else {"dropout_p": 0.3, "rng": 7}
    common = {"is_causal": "upper_left"} if name == "dropout" else {}
    both = plain | common, plain | common | extra
    for first, call in (both, both[::-1]):
        result = forward(first)
        grad_out = rng.standard_normal(result.out.shape).astype(dtype)
        # where an option changes the weights of the first rows a little, their output shows it first
        wrong = "out is not the output" if name == "dropout" else "(lse is not that|out is not the output)"
        with pytest.raises(
            ValueError, match=f"^{wrong} of these arguments.*Pass .*every option of the forward pass.*merged=True"
        ):
            cattn.attention_backward(grad_out, out=result.out, lse=result.lse, **call)
        merged = cattn.attention_backward(grad_out, out=result.out, lse=result.lse, merged=True, **call)
        assert merged.query.shape == plain["query"].shape


@pytest.mark.promise("forgotten options")
@given(calls(), st.integers(0, 2**32), st.sampled_from([0.01, 1.0, 30.0]), st.sampled_from(["own", "lse", "out"]))
def test_right_results_are_never_refused(case: tuple[Call, type], seed: int, size: float, rounded: str) -> None:
    """Also if other software has rounded lse or out to bfloat16, and the bits are the same as without the check."""
    call, _ = case
    for name in ("query", "key", "value"):
        call[name] = (call[name].astype(np.float64) * size).astype(call[name].dtype)
    result, rng = forward(call), np.random.default_rng(seed)
    out, lse = result.out, result.lse
    if rounded == "lse":
        lse = quiet(quiet(lse, ml_dtypes.bfloat16), lse.dtype)
    if rounded == "out":
        out = quiet(quiet(out, ml_dtypes.bfloat16), out.dtype)
    results: dict[str, Any] = {"out": out, "lse": lse}
    if seed % 2:
        results["grad_lse"] = rng.standard_normal(lse.shape)
    grad_out = rng.standard_normal(out.shape).astype(out.dtype)
    grads = cattn.attention_backward(grad_out, **results, **call)
    for actual, expected in zip(grads, cattn.attention_backward(grad_out, merged=True, **results, **call), strict=True):
        if actual is not None:
            assert_same_bits(actual, expected)


@pytest.mark.promise("forgotten options")
def test_packed_sequences_are_checked_in_their_own_rows(rng: np.random.Generator) -> None:
    query, key, value = rng.standard_normal((3, 300, 2, 8), dtype=np.float32)
    edges = [0, 0, 100, 300]
    packed = {"query": query, "key": key, "value": value, "cu_seqlens_q": edges, "cu_seqlens_k": edges}
    result = cattn.varlen_attention(**packed, is_causal=True, return_lse=True)
    given = {"grad_out": np.ones_like(query), "out": result.out, "lse": result.lse}
    cattn.varlen_attention_backward(**given, **packed, is_causal=True)
    with pytest.raises(ValueError, match=r"^lse is not that of these arguments: at \(0, 0\) the weights sum to"):
        cattn.varlen_attention_backward(**given, **packed)
    given["lse"] = result.lse.copy()
    given["lse"][1, 299] += 1
    with pytest.raises(ValueError, match=r"^lse .* at \(1, 299\) the weights sum to 0.368, not to 1"):
        cattn.varlen_attention_backward(**given, **packed, is_causal=True)
    cattn.varlen_attention_backward(**given, **packed, is_causal=True, merged=True)


def test_a_row_that_does_not_fit_is_the_same_one_for_any_number_of_threads(rng: np.random.Generator) -> None:
    """And a generator of the stream stays where it was."""
    call = qkv(rng, np.float32, (2, 4, 400, 16), (2, 4, 400, 16), (2, 4, 400, 16)) | {"dropout_p": 0.1}
    result = forward(call | {"rng": cattn.TorchGenerator(1)})
    lse, texts = result.lse.copy(), set()
    lse[0, 2, 390] += 1
    lse[1, 1, 5:] += 1
    for threads in (1, 2, 5):
        generator = cattn.TorchGenerator(1)
        with cattn.num_threads(threads), pytest.raises(ValueError, match=r"^lse is not") as error:
            cattn.attention_backward(result.out, out=result.out, lse=lse, **call, rng=generator)
        texts.add(str(error.value))
        assert_same_bits(generator.get_state(), cattn.TorchGenerator(1).get_state())
    assert len(texts) == 1
    assert "at (0, 2, 390)" in texts.pop()
