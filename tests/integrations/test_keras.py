"""cattn.integrations.keras: Keras's operator and layers by cattn, on Keras's NumPy backend."""

import doctest
import importlib
import importlib.util
import os
import sys
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cattn
from support import assert_same_bits

for package in ("keras", "jax"):  # the NumPy backend of Keras imports jax
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed", allow_module_level=True)
os.environ.setdefault("KERAS_BACKEND", "numpy")

import keras  # noqa: E402

from cattn.integrations import keras as bridge  # noqa: E402
from cattn.integrations.keras import use_cattn  # noqa: E402

if keras.backend.backend() != "numpy":
    pytest.skip(f"Keras runs on {keras.backend.backend()}", allow_module_level=True)

operator = keras.ops.dot_product_attention


def normal(*shape: int, dtype: Any = np.float32, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that grows with each call of cattn."""
    made: list[int] = []
    function = cattn.scaled_dot_product_attention
    monkeypatch.setattr(
        cattn, "scaled_dot_product_attention", lambda *args, **options: made.append(1) or function(*args, **options)
    )
    return made


# A query may see no key by the random mask: Keras then gives the mean, so key 0 is always visible.
MASK = normal(2, 1, 9, 9, seed=5) > 0
MASK[..., 0] = True


@pytest.mark.promise("Keras")
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"is_causal": True},
        {"mask": MASK},
        {"mask": MASK, "is_causal": True, "scale": 0.3},
        {"bias": normal(3, 9, 9, seed=6)},
    ],
    ids=lambda options: " ".join(options) or "plain",
)
def test_the_operator_agrees_with_keras(dtype: Any, options: dict[str, Any], calls: list[int]) -> None:
    query, key, value = normal(3, 2, 9, 3, 8, dtype=dtype)
    expected = operator(query, key, value, **options)
    assert not calls
    with use_cattn():
        out = operator(query, key, value, **options)
    assert calls == [1]
    assert type(out) is np.ndarray
    assert out.flags.c_contiguous
    assert (out.shape, out.dtype) == (expected.shape, expected.dtype)
    tolerance = 8 * float(ml_dtypes.finfo(out.dtype).eps)  # Keras rounds the weights to this dtype
    np.testing.assert_allclose(out.astype("d"), expected.astype("d"), rtol=tolerance, atol=tolerance)


def test_the_operator_has_the_bits_of_cattn() -> None:
    query, key, value = normal(2, 40, 6, 16), normal(2, 50, 2, 16, seed=1), normal(2, 50, 2, 12, seed=2)
    with use_cattn():
        out = operator(query, key, value, is_causal=True)
    heads_first = [x.swapaxes(1, 2) for x in (query, key, value)]
    expected = cattn.scaled_dot_product_attention(*heads_first, is_causal="upper_left")
    assert_same_bits(out, expected.swapaxes(1, 2))


@pytest.mark.parametrize(
    "dtypes", [(np.float16, np.float32), (ml_dtypes.bfloat16, np.float16), (np.float64, np.float16)]
)
def test_keras_chooses_the_dtype_of_mixed_arrays(dtypes: Any, calls: list[int]) -> None:
    query, key = (normal(2, 9, 3, 8, dtype=dtype) for dtype in dtypes)
    expected = operator(query, key, key)
    with use_cattn():
        out = operator(query, key, key)
    assert calls == [1]
    assert out.dtype == expected.dtype
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-6)


def test_grouped_heads_work_as_repeated_ones_do_in_keras() -> None:
    query, key, value = normal(2, 5, 6, 8), *normal(2, 2, 7, 2, 8, seed=1)
    repeated = [np.repeat(x, 3, axis=2) for x in (key, value)]
    expected = operator(query, *repeated)
    with use_cattn():
        out = operator(query, key, value)
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-6)


def test_a_query_without_keys_gives_0() -> None:
    x = normal(1, 3, 1, 4)
    mask = np.array([True, False, True])[:, None]
    with use_cattn():
        out = operator(x, x, x, mask=mask)
    assert not out[:, 1].any()
    assert out[:, 0].any()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_layers_run_cattn(causal: bool, masked: bool, calls: list[int]) -> None:
    x = normal(2, 9, 24)
    options: dict[str, Any] = {"use_causal_mask": causal, "attention_mask": MASK[:, 0] if masked else None}
    for layer in (
        keras.layers.MultiHeadAttention(num_heads=3, key_dim=8, value_dim=5),
        keras.layers.GroupQueryAttention(head_dim=8, num_query_heads=4, num_key_value_heads=2),
    ):
        expected = layer(x, x, **options)
        assert not calls
        with use_cattn():
            out = layer(x, x, **options)
        assert calls == [1]
        calls.clear()
        np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-6)


def test_a_model_predicts_by_cattn(calls: list[int]) -> None:
    inputs = keras.Input((12, 16))
    attended = keras.layers.MultiHeadAttention(num_heads=2, key_dim=8)(inputs, inputs, use_causal_mask=True)
    model = keras.Model(inputs, keras.layers.LayerNormalization()(inputs + attended))
    x = normal(4, 12, 16)
    expected = model.predict(x, verbose=0)
    assert not calls
    with use_cattn():
        np.testing.assert_allclose(model.predict(x, verbose=0), expected, rtol=1e-5, atol=1e-5)
    assert calls


@pytest.mark.parametrize(
    ("value_dtype", "options"),
    [
        (np.int64, {}),
        (np.float32, {"mask": MASK.astype(np.int32)}),
        (np.float32, {"bias": [[0.0] * 9]}),
    ],
    ids=["integers", "integer mask", "bias of lists"],
)
def test_other_calls_go_to_keras(value_dtype: Any, options: dict[str, Any], calls: list[int]) -> None:
    query, key, value = normal(3, 2, 9, 3, 8)
    value = value.astype(value_dtype)
    expected = operator(query, key, value, **options)
    with use_cattn():
        assert_same_bits(operator(query, key, value, **options), expected)
    assert not calls


def test_the_errors_of_keras_remain() -> None:
    x = normal(1, 3, 2, 4)
    with use_cattn():
        with pytest.raises(ValueError, match="Flash attention"):
            operator(x, x, x, flash_attention=True)
        with pytest.raises(ValueError, match="attn_logits_soft_cap"):
            operator(x, x, x, attn_logits_soft_cap=2.0)
        with pytest.raises(ValueError, match="only supports 4D inputs"):
            operator(x[0], x[0], x[0])


def test_layers_with_dropout_or_scores_run_keras(calls: list[int]) -> None:
    x = normal(2, 9, 24)
    with use_cattn():
        keras.layers.MultiHeadAttention(num_heads=3, key_dim=8, dropout=0.5)(x, x)
        keras.layers.MultiHeadAttention(num_heads=3, key_dim=8)(x, x, return_attention_scores=True)
    assert not calls


def test_overlapping_contexts_restore_the_function_of_keras(calls: list[int]) -> None:
    x = normal(1, 3, 2, 4)
    first, second = use_cattn(), use_cattn()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    operator(x, x, x)
    assert calls == [1]
    second.__exit__(None, None, None)
    with pytest.raises(KeyError), use_cattn():
        raise KeyError
    operator(x, x, x)
    assert calls == [1]


def test_other_backends_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keras.backend, "backend", lambda: "torch")
    with (
        pytest.raises(RuntimeError, match="needs Keras's NumPy backend, got 'torch': set KERAS_BACKEND=numpy"),
        use_cattn(),
    ):
        pass


def test_the_import_names_the_extra_if_keras_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "keras", None)  # an import of it raises
    monkeypatch.delitem(sys.modules, "cattn.integrations.keras")
    with pytest.raises(ImportError, match=r"pip install 'cattn\[keras\]'"):
        importlib.import_module("cattn.integrations.keras")


def test_its_examples_run() -> None:
    assert doctest.testmod(bridge) == (0, 7)
