"""The floating-point mode of the caller neither matters nor changes: rounding directions, subnormals set to zero."""

from collections.abc import Callable

import hypothesis
import numpy as np
import pytest

import cattn
from any_work import Work, any_function
from bit_cases import build, plain, yardstick_of
from cattn import _cattn
from every_call import CALLS, contents, fresh
from support import FP_MODES, assert_same_bits, everything, floating_point_mode, forced, in_contract

Normal = Callable[..., np.ndarray]


def test_the_modes_matter_to_numpy() -> None:
    """Each of them changes a result of its own, so they are in force."""
    third, tiny = np.full(2, 3.0), np.full(2, 1e-310)
    changed = set()
    for mode in FP_MODES:
        with floating_point_mode(mode):
            changed |= {mode} if (1 / third * third != 1).any() or (-1 / third)[0] != -1 / 3 else set()
            changed |= {mode} if not (tiny * third).any() else set()
    assert changed == set(FP_MODES)


@pytest.mark.promise("floating-point mode")
@pytest.mark.parametrize("mode", FP_MODES)
def test_attention(isa: str, dtype: type, mode: str) -> None:
    """The mode of the caller neither matters nor changes. Scale and dropout factor are not exact: 1/sqrt(11), 1/0.9."""
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
                        **call, need_weights=True, return_lse=True, return_dropout_mask=True
                    )
                )
        for result in results:
            assert_same_bits(result, right, name)


@pytest.mark.parametrize("mode", FP_MODES)
def test_converted_masks(mode: str, normal: Normal) -> None:
    """A float64 mask is rounded to float32 on the way in, and so are numbers of each head."""
    call = plain(normal, attn_mask=np.random.default_rng(1).standard_normal((101, 200)) / 3)
    call |= {"alibi_slopes": [1 / 3], "sinks": [-1 / 3]}
    right = everything(**call)
    with floating_point_mode(mode):
        result = cattn.scaled_dot_product_attention(**call, need_weights=True, return_lse=True)
    assert_same_bits(result[:3], right[:3])


@pytest.mark.parametrize("mode", FP_MODES)
def test_softmax(isa: str, dtype: type, mode: str, normal: Normal) -> None:
    x = normal(20, 50, dtype=dtype)
    x[3] *= 1e-39 if dtype == np.float32 else 1e-309
    for call in (
        lambda: cattn.softmax(x, scale=1 / 3),
        lambda: cattn.masked_softmax(x, is_causal="lower_right"),
        lambda: cattn.masked_softmax(x, is_causal="lower_right", method="renormalize"),
    ):
        right = call()
        with floating_point_mode(mode):
            result = call()
        assert_same_bits(result, right)


@pytest.mark.parametrize("mode", FP_MODES)
def test_the_range_of_a_uniform_draw(dtype: type, mode: str) -> None:
    """It is checked as it will be drawn: 3.4028235e38 is float32's largest number, or rounds to inf."""
    right = cattn.TorchGenerator(1).uniform(0.0, 3.4028235e38, 3, dtype=dtype)
    with floating_point_mode(mode):
        result = cattn.TorchGenerator(1).uniform(0.0, 3.4028235e38, 3, dtype=dtype)
    assert_same_bits(result, right)


@pytest.mark.parametrize("mode", FP_MODES)
def test_dropout(isa: str, dtype: type, mode: str, normal: Normal) -> None:
    x = normal(300, dtype=dtype)
    x[:50] *= 1e-39 if dtype == np.float32 else 1e-309
    for p in (0.1, 0.3, 0.9):  # 1 / (1 - p) is rounded
        right = cattn.dropout(x, p, rng=3, return_mask=True)
        with floating_point_mode(mode):
            result = cattn.dropout(x, p, rng=3, return_mask=True)
        for a, b in zip(result, right, strict=True):
            assert_same_bits(a, b, f"p {p}")


# Their projections are NumPy's matrix products, and those the BLAS's.
PROJECTING = {"Linear", "SelfAttention", "CausalAttention", "MultiHeadAttention", "MultiHeadAttentionWrapper"}


@pytest.mark.promise("floating-point mode")
@pytest.mark.parametrize("name", sorted(CALLS.keys() - PROJECTING))
def test_everything_public(name: str) -> None:
    right = contents(fresh(name))
    for mode in FP_MODES:
        with floating_point_mode(mode):
            result = fresh(name)
        assert contents(result) == right, mode


@pytest.mark.parametrize("mode", FP_MODES)
def test_weights_from_numpys_generator(mode: str) -> None:
    right = cattn.Linear(7, 50, rng=np.random.default_rng(1)).weight
    with floating_point_mode(mode):
        result = cattn.Linear(7, 50, rng=np.random.default_rng(1)).weight
    assert_same_bits(result, right)


@pytest.mark.parametrize("mode", FP_MODES)
def test_an_error_leaves_the_mode_as_it_was(mode: str) -> None:
    with floating_point_mode(mode):
        with pytest.raises(ValueError, match="outs and lses must be as many"):
            cattn.merge_attention([], [])
        with pytest.raises(TypeError):
            _cattn._in_default_mode(len, [], {})  # type: ignore[arg-type]


@pytest.mark.promise("floating-point mode")
@hypothesis.given(work=any_function())
def test_any_call(work: Work) -> None:
    right = work.run()
    for mode in FP_MODES:
        with floating_point_mode(mode):
            results = work.run()
        for actual, expected in zip(results, right, strict=True):
            assert_same_bits(actual, expected, mode)


@pytest.mark.parametrize("mode", FP_MODES)
def test_gradients(isa: str, dtype: type, mode: str, normal: Normal) -> None:
    """Also sums over what was broadcast: NumPy makes some of them."""
    query, grad_out = normal(2, 1, 200, 11, dtype=dtype), normal(2, 1, 200, 11, dtype=dtype)
    key, value = normal(2, 2, 1, 30, 11, dtype=dtype)
    bias = normal(2, 1, 200, 30, dtype=np.float64) / 3  # rounded to float32 on the way in
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
