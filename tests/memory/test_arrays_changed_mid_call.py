"""Python code that runs within a call may change the shapes of the call's arrays; the call stays inside their memory.

A number's __float__, an array's __array__ or a hook for warnings may set the shape of an array that the call has
checked already. The result then belongs to the arrays as they were, or the call raises ValueError.
"""

from __future__ import annotations

import copy
import itertools
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import cattn
from support import assert_same_bits
from support.public_calls import contents

F = np.float32
T = 512


class ShapeChanger:
    """A number or an array that sets the shape of another array when it is converted."""

    def __init__(self, value: Any, array: np.ndarray, *shape: int) -> None:
        self.value, self.array, self.shape = value, array, shape

    def set_shape(self, *_: object, **__: object) -> Any:
        """Set the shape."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            self.array.shape = self.shape
        return self.value

    __float__ = __index__ = __array__ = set_shape


@pytest.fixture
def square(rng: np.random.Generator) -> np.ndarray:
    """With the shape (T * T // 2, 2) and the old strides, its rows would lie far past its end."""
    return rng.standard_normal((T, T), dtype=F)


@pytest.fixture
def attended(rng: np.random.Generator) -> Iterator[np.ndarray]:
    """Query, key and value."""
    return iter(rng.standard_normal((3, T, 8), dtype=F))


@pytest.mark.promise("shapes that change")
def test_dropout_of_an_array_that_changes_its_shape(square: np.ndarray) -> None:
    right, mask = cattn.dropout(square, 0.5, rng=5, return_mask=True)
    for call in (
        lambda: cattn.dropout(square, 0.5, rng=ShapeChanger(5, square, T * T // 2, 2), return_mask=True),
        lambda: cattn.dropout(square, ShapeChanger(0.5, square, T * T), rng=5, return_mask=True),
    ):
        square.shape = T, T
        result = call()
        assert_same_bits(result[0], right)
        assert_same_bits(result[1], mask)
    square.shape = T, T
    out = np.empty_like(square)
    assert cattn.dropout(square, 0.5, rng=ShapeChanger(5, out, T * T // 2, 2), out=out) is out
    assert_same_bits(out.reshape(T, T), right)


@pytest.mark.promise("shapes that change")
def test_softmax_of_an_array_that_changes_its_shape(square: np.ndarray) -> None:
    right = cattn.softmax(square, scale=0.5)
    assert_same_bits(cattn.softmax(square, scale=ShapeChanger(0.5, square, T, 2, T // 2)), right)
    square.shape = T, T
    assert_same_bits(cattn.masked_softmax(square, scale=ShapeChanger(0.5, square, T * T)), right)
    square.shape = T, T
    with pytest.raises(ValueError, match="out has shape"):
        cattn.softmax(square, scale=ShapeChanger(0.5, square, T * T), out=square)


@pytest.mark.promise("shapes that change")
def test_softmax_backward_of_an_array_that_changes_its_shape(square: np.ndarray) -> None:
    weights = cattn.softmax(square)
    right = cattn.softmax_backward(square, weights, scale=0.5)
    for array in (square, weights):
        result = cattn.softmax_backward(square, weights, scale=ShapeChanger(0.5, array, T * T // 2, 2))
        array.shape = T, T
        assert_same_bits(result, right)


@pytest.mark.promise("shapes that change")
def test_rope_and_rms_norm_of_an_array_that_changes_its_shape(square: np.ndarray) -> None:
    right = cattn.rope(square, theta=500.0)
    assert_same_bits(cattn.rope(square, theta=ShapeChanger(500.0, square, T * T // 2, 2)), right)
    square.shape = T, T
    positions = ShapeChanger(np.arange(T), square, T * T // 2, 2)
    assert_same_bits(cattn.rope(square, positions, theta=500.0), right)
    square.shape = T, T
    with pytest.raises(ValueError, match="out has shape"):
        cattn.rope(square, theta=ShapeChanger(500.0, square, T * T), out=square)
    square.shape = T, T
    with pytest.raises(ValueError, match=r"^weight must have .*, shape \(2,\), got shape \(512,\)"):
        cattn.rms_norm(square, ShapeChanger(np.ones(T, F), square, T * T // 2, 2))
    square.shape = T, T
    other = square.copy()
    with pytest.raises(ValueError, match="grad_out has shape"):
        cattn.rms_norm_backward(square, other, ShapeChanger(np.ones(T, F), square, T * T // 2, 2))


@pytest.mark.promise("shapes that change")
def test_linear_of_arrays_that_change_their_shape(square: np.ndarray) -> None:
    other = square.copy()
    with pytest.raises(ValueError, match=r"weight must have as many columns as x, 2, got"):
        cattn.functional.linear(square, ShapeChanger(other, square, T * T // 2, 2))
    square.shape = T, T
    with pytest.raises(ValueError, match=r"weight must have as many columns as x"):
        cattn.functional.linear(other, square, ShapeChanger(np.ones(T, F), square, T * T // 2, 2))


@pytest.mark.promise("shapes that change")
def test_layer_norm_and_activations_of_an_array_that_changes_its_shape(square: np.ndarray) -> None:
    functional, other = cattn.functional, square.copy()
    with pytest.raises(ValueError, match=r"^weight must have .*, shape \(2,\), got shape \(512,\)"):
        functional.layer_norm(square, np.ones(T, F), ShapeChanger(np.ones(T, F), square, T * T // 2, 2))
    square.shape = T, T
    with pytest.raises(ValueError, match="grad_out has shape"):
        functional.gelu_backward(square, ShapeChanger(other, square, T * T // 2, 2))
    square.shape = T, T
    right = functional.silu(other)
    assert_same_bits(functional.silu(square, out=square), right)


@pytest.mark.promise("shapes that change")
@pytest.mark.parametrize("name", ["attn_mask", "bias"])
def test_attention_of_arrays_that_change_their_shapes(
    attended: Iterator[np.ndarray], square: np.ndarray, name: str
) -> None:
    query, key, value = attended
    options = {name: square, "dropout_p": 0.5}
    right = cattn.scaled_dot_product_attention(query, key, value, **options, rng=5)
    for array, shape in ((query, (4, T * 2)), (key, (T * 4, 2)), (square, (T * T // 2, 2))):
        before = array.shape
        options["dropout_p"] = ShapeChanger(0.5, array, *shape)
        out = np.empty_like(right)
        rng = ShapeChanger(5, out, T * 4, 2)
        assert cattn.scaled_dot_product_attention(query, key, value, **options, rng=rng, out=out) is out
        array.shape = before
        assert_same_bits(out.reshape(right.shape), right)


def test_an_array_that_loses_its_axes_is_refused() -> None:
    query, key, value = np.ones((3, 1, 1), F)
    with pytest.raises(ValueError, match="query must have at least 2 dimensions"):
        cattn.scaled_dot_product_attention(query, ShapeChanger(key, query), value)


@pytest.mark.promise("shapes that change")
def test_a_mask_that_a_warning_hook_changes(
    attended: Iterator[np.ndarray], square: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    query, key, value = attended
    square[:] = square > 0
    right = cattn.scaled_dot_product_attention(query, key, value, bias=square)
    monkeypatch.setattr(warnings, "showwarning", ShapeChanger(None, square, 2, T * T // 2).set_shape)
    with warnings.catch_warnings():
        warnings.simplefilter("always", UserWarning)
        result = cattn.scaled_dot_product_attention(query, key, value, attn_mask=square)
    assert square.shape == (2, T * T // 2)
    assert_same_bits(result, right)


@pytest.mark.promise("shapes that change")
def test_attention_backward_of_a_bias_that_changes_its_shape(
    attended: Iterator[np.ndarray], square: np.ndarray
) -> None:
    query, key, value = attended
    result = cattn.scaled_dot_product_attention(query, key, value, bias=square, return_lse=True)
    given = query, key, value, result.out, result.lse
    right = cattn.attention_backward(value, *given, bias=square)
    found = cattn.attention_backward(ShapeChanger(value, square, 2, T * T // 2), *given, bias=square)
    assert square.shape == (2, T * T // 2)
    assert contents(found) == contents(right)


@pytest.mark.promise("shapes that change")
def test_a_tangent_has_the_shape_that_its_input_had(attended: Iterator[np.ndarray]) -> None:
    query, key, value = attended
    right = cattn.attention_jvp(query, key, value, query_tangent=value, key_tangent=key, value_tangent=query)
    saved = query.copy()
    found = cattn.attention_jvp(
        query, key, value, query_tangent=ShapeChanger(value, query, T * 4, 2), key_tangent=key, value_tangent=saved
    )
    assert query.shape == (T * 4, 2)
    assert contents(found) == contents(right)


def test_unregistered_dtypes_are_refused() -> None:
    """Unregistered dtypes have type number -1, and so has bfloat16 in a process that has not used it yet."""
    source = """
        import numpy as np
        import pytest
        import cattn

        x = np.zeros((8, 8)).view(np._core._multiarray_umath._get_sfloat_dtype()(1.0))
        for call in (
            lambda: cattn.softmax(x),
            lambda: cattn.softmax(x, out=x),
            lambda: cattn.softmax(np.zeros((8, 8)), out=x),
            lambda: cattn.masked_softmax(x),
            lambda: cattn.dropout(x),
            lambda: cattn.scaled_dot_product_attention(x, x, x),
            lambda: cattn.explain(x, x, x),
        ):
            with pytest.raises(TypeError, match="dtype"):
                call()
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(source)], check=True)


# ---- dtypes --------------------------------------------------------------------------------------------------------
class DtypeChanger:
    """A number or an array that sets the dtype of another array, in place, when it is converted."""

    def __init__(self, value: Any, array: np.ndarray, dtype: Any) -> None:
        self.value, self.array, self.dtype, self.done = value, array, dtype, False

    def set_dtype(self, *_: object, **__: object) -> Any:
        """Set the dtype, once: it may become the same again, and then the array is as it was."""
        if not self.done:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)
                self.array.dtype = self.dtype  # type: ignore[misc]
            self.done = True
        return self.value

    __float__ = __index__ = __array__ = set_dtype


def changing_calls() -> dict[str, tuple[Any, dict[str, Any]]]:
    """Return all functions that take arrays, with all arguments that are arrays or numbers and may be converted."""
    r = np.random.default_rng(3)

    def draw(*shape: int) -> np.ndarray:
        return r.standard_normal(shape, dtype=F)

    n, heads, edges = 40, 2, np.array([0, 16, 40])
    q, k, v = draw(1, heads, n, 8), draw(1, heads, n, 8), draw(1, heads, n, 8)
    options: dict[str, Any] = {
        "attn_mask": r.random((n, n)) < 0.8, "bias": draw(n, n), "scale": 0.5, "softcap": 3.0,
        "alibi_slopes": np.full(heads, 0.25, F), "sinks": draw(heads), "key_value_seq_lengths": np.array([n - 1]),
        "query_offset": np.array([2]), "block_mask": cattn.BlockMask(np.ones((5, 5), bool), 8),
    }  # fmt: skip
    dropping = {"dropout_p": 0.5, "rng": 3}
    packed = [draw(n, heads, 8) for _ in range(3)]
    of_packed = {
        "query": packed[0], "key": packed[1], "value": packed[2], "cu_seqlens_q": edges, "cu_seqlens_k": edges,
        "scale": 0.5, "sinks": draw(heads),
    }  # fmt: skip
    stored = {"query": q, "key": cattn.quantize(k), "value": v.astype(np.float16), "scale": 0.5}
    whole = {"query": q, "key": k, "value": v} | options
    result = cattn.scaled_dot_product_attention(**whole, return_lse=True)
    of_sequences = cattn.varlen_attention(**of_packed, return_lse=True)
    given = {"grad_out": draw(1, heads, n, 8), "grad_lse": draw(1, heads, n), "out": result.out, "lse": result.lse}
    given_packed = {"grad_out": draw(n, heads, 8), "out": of_sequences.out, "lse": of_sequences.lse}
    without = {"key": k, "query": q} | options

    def only(call: dict[str, Any], *names: str) -> dict[str, Any]:
        return {name: value for name, value in call.items() if name not in names}

    x, hidden = draw(n, 32), r.random((n, 32)) < 0.8
    halves = {name: array.astype("e") for name, array in (("query", q), ("key", k), ("value", v))}
    into, into_heads, common = {"out": draw(n, 32)}, {"out": draw(1, heads, n, 8)}, {"x": x, "scale": 0.5}
    return {
        "scaled_dot_product_attention": (cattn.scaled_dot_product_attention, whole | dropping),
        "scaled_dot_product_attention, halves": (
            cattn.scaled_dot_product_attention, halves | {"scale": 0.5, "out": draw(1, heads, n, 8).astype("e")},
        ),
        "scaled_dot_product_attention, quantized": (cattn.scaled_dot_product_attention, stored),
        "scaled_dot_product_attention, out": (
            cattn.scaled_dot_product_attention,
            whole | {
                "out": cattn.AttentionOutput(draw(1, heads, n, 8), draw(1, heads, n, n), draw(1, heads, n)),
                "return_weights": True, "return_lse": True,
            },
        ),
        "causal_attention": (cattn.causal_attention, {"query": q, "key": k, "value": v, "scale": 0.5} | into_heads),
        "attention_weights": (cattn.attention_weights, without | {"out": draw(1, heads, n, n)}),
        "attention_weights, dropped": (cattn.attention_weights, without | dropping | {"stage": "dropout"}),
        "explain": (cattn.explain, only(whole, "scale", "softcap", "alibi_slopes", "sinks")),
        "attention_statistics": (cattn.attention_statistics, without | {"top_k": 2}),
        "choose_keys": (cattn.choose_keys, {"query": q, "key": k, "count": 2, "weights": draw(heads, n), "scale": 0.5}),
        "attention_backward": (cattn.attention_backward, whole | given),
        "varlen_attention": (cattn.varlen_attention, of_packed | {"out": draw(n, heads, 8)}),
        "varlen_attention_statistics": (cattn.varlen_attention_statistics, only(of_packed, "value")),
        "varlen_attention_backward": (cattn.varlen_attention_backward, of_packed | given_packed),
        "softmax": (cattn.softmax, common | {"where": hidden} | into),
        "masked_softmax": (cattn.masked_softmax, {"scores": x, "mask": hidden, "scale": 0.5} | into),
        "softmax_backward": (cattn.softmax_backward, {"grad_out": draw(n, 32), "weights": x, "scale": 0.5} | into),
        "dropout": (cattn.dropout, {"x": x, "p": 0.5, "rng": 3, "out": draw(n, 32)}),
        "rope": (cattn.rope, {"x": x, "positions": np.arange(n), "theta": 500.0, "rotary_dim": 8, "out": draw(n, 32)}),
        "rms_norm": (cattn.rms_norm, {"x": x, "weight": draw(32), "eps": 1e-3, "out": draw(n, 32)}),
        "rms_norm_backward": (cattn.rms_norm_backward, {"grad_out": x, "x": draw(n, 32), "weight": draw(32)}),
        "merge_attention": (cattn.merge_attention, {"outs": [draw(5, 8), draw(5, 8)], "lses": draw(2, 5)}),
        "quantize": (cattn.quantize, {"x": x, "axis": 1}),
        "head_scores": (cattn.head_scores, {"weights": np.abs(q @ k.swapaxes(-1, -2)), "token_ids": np.arange(n)}),
    }  # fmt: skip


def _arrays_of(call: dict[str, Any]) -> Iterator[np.ndarray]:
    for value in call.values():
        yield from (a for a in (value if isinstance(value, (tuple, list)) else [value]) if isinstance(a, np.ndarray))


def _outcome(function: Any, call: dict[str, Any]) -> list[Any] | None:
    """Return the bits of a result, or None for an error that may be."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return contents(function(**call))
        except (TypeError, ValueError):
            return None


@pytest.mark.promise("shapes that change")
@pytest.mark.parametrize("name", changing_calls())
def test_arrays_that_change_their_dtypes(name: str) -> None:
    """Every array of a call, changed by every other argument to every size and kind: an error, or the bits of before or
    of after."""
    function, plain = changing_calls()[name]
    right = _outcome(function, plain)
    assert right is not None
    for converted in plain:
        n_arrays = len(list(_arrays_of(plain)))
        for i, dtype in itertools.product(range(n_arrays), (np.int8, np.float16, np.float32, np.float64, ">f4", "S4")):
            call = copy.deepcopy(plain)
            array, value = list(_arrays_of(call))[i], call[converted]
            if isinstance(value, (str, tuple, list)) or value is array or converted == "out":
                continue
            if not _can_be(array, dtype):
                continue
            after = copy.deepcopy(call)
            DtypeChanger(None, list(_arrays_of(after))[i], dtype).set_dtype()
            call[converted] = DtypeChanger(value, array, dtype)
            actual = _outcome(function, call)
            text = f"{converted} makes array {i}, {array.shape}, {np.dtype(dtype)}"
            same = actual is None or actual in (right, _outcome(function, after))
            assert same or _bytes_of(actual) == _bytes_of(right), text  # out itself may be the array with a new dtype


def _bytes_of(outcome: list[Any] | None) -> list[bytes]:
    return [part for part in outcome or [] if isinstance(part, bytes)]


def _can_be(array: np.ndarray, dtype: Any) -> bool:
    other = array.copy()
    try:
        DtypeChanger(None, other, dtype).set_dtype()
    except (TypeError, ValueError):
        return False
    return other.dtype != array.dtype
