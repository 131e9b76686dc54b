"""ONNX's Attention: every node test of the installed onnx package, and the errors of the function."""

import importlib
import sys
import warnings
from typing import Any

import numpy as np
import pytest

onnx = pytest.importorskip("onnx")
ml_dtypes = pytest.importorskip("ml_dtypes")

from onnx.backend.test.case.node import collect_testcases  # noqa: E402
from onnx.reference import ReferenceEvaluator  # noqa: E402

from cattn.integrations.onnx import Attention, attention  # noqa: E402


def node_cases() -> list[Any]:
    """Return the node tests of the operator itself. The others are its expansions into functions."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # onnx also makes the cases of other operators, some of which warn
        return [case for case in collect_testcases("Attention") if "_expanded" not in case.name]


CASES = node_cases()


def test_onnx_has_at_least_93_cases() -> None:
    assert len(CASES) >= 93


@pytest.mark.promise("ONNX's operator")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_node_case_of_onnx_passes(case: Any) -> None:
    """With the tolerances of ONNX's own runner."""
    session = ReferenceEvaluator(case.model, new_ops=[Attention])
    (node,) = case.model.graph.node
    assert node.op_type == "Attention"
    for inputs, outputs in case.data_sets:
        names = [value.name for value in case.model.graph.input]
        results = session.run(None, dict(zip(names, inputs, strict=True)))
        for result, expected in zip(results, outputs, strict=True):
            assert result.shape == expected.shape
            assert result.dtype == expected.dtype
            rtol = max(case.rtol, 2**-6) if expected.dtype.name == "bfloat16" else case.rtol
            np.testing.assert_allclose(
                result.astype(np.float64), expected.astype(np.float64), rtol=rtol, atol=case.atol
            )


def test_the_node_cases_run_our_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    called = []
    run = Attention._run
    monkeypatch.setattr(Attention, "_run", lambda self, *args, **kwargs: called.append(1) or run(self, *args, **kwargs))
    test_every_node_case_of_onnx_passes(CASES[0])
    assert called


def inputs(*shapes: tuple[int, ...], dtype: Any = np.float32) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
def test_the_result_has_the_dtype_of_the_inputs(dtype: Any) -> None:
    """The tolerance for halves covers the rounding of the result."""
    q, k, v = inputs((2, 4, 5, 8), (2, 2, 9, 8), (2, 2, 9, 6), dtype=dtype)
    result = attention(q, k, v, is_causal=1, return_qk=True, qk_matmul_output_mode=3)
    assert result.Y.dtype == dtype
    assert result.qk_matmul_output is not None
    assert result.qk_matmul_output.dtype == dtype
    wide = attention(*(a.astype(np.float64) for a in (q, k, v)), is_causal=1)
    eps = float(ml_dtypes.finfo(dtype).eps)
    np.testing.assert_allclose(result.Y.astype(np.float64), wide.Y, rtol=0, atol=4 * eps * np.abs(wide.Y).max())


def test_softmax_precision_may_be_double() -> None:
    q, k, v = inputs((1, 1, 3, 8), (1, 1, 9, 8), (1, 1, 9, 8))
    double = attention(q, k, v, softmax_precision=onnx.TensorProto.DOUBLE)
    wide = attention(*(a.astype(np.float64) for a in (q, k, v)))
    assert double.Y.dtype == np.float32
    np.testing.assert_array_equal(double.Y, wide.Y.astype(np.float32))


def test_qk_matmul_output_mode_0_is_before_the_softcap() -> None:
    q, k, v = inputs((1, 2, 3, 8), (1, 2, 9, 8), (1, 2, 9, 8))
    raw = attention(q, k, v, softcap=0.5, return_qk=True).qk_matmul_output
    np.testing.assert_allclose(raw, q @ k.swapaxes(-1, -2) / np.sqrt(8), rtol=1e-5, atol=1e-6)


def test_keys_past_nonpad_kv_seqlen_are_not_read() -> None:
    """A padded cache gives the bits of its filled part."""
    q, k, v = inputs((2, 4, 3, 8), (2, 2, 16, 8), (2, 2, 16, 8))
    k[0, :, 10:] = v[0, :, 10:] = np.nan
    result = attention(q, k, v, nonpad_kv_seqlen=[10, 16], is_causal=1)
    part = attention(q[:1], k[:1, :, 7:10], v[:1, :, 7:10], past_key=k[:1, :, :7], past_value=v[:1, :, :7], is_causal=1)
    np.testing.assert_array_equal(result.Y[:1], part.Y)
    assert part.present_key is not None
    np.testing.assert_array_equal(part.present_key, k[:1, :, :10])
    assert np.isfinite(result.Y).all()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            {"past_key": np.zeros((1, 2, 1, 4), np.float32)},
            ValueError,
            "past_key and past_value must be given together",
        ),
        (
            {"past_key": np.zeros((1, 2, 1, 4)), "past_value": np.zeros((1, 2, 1, 4)), "nonpad_kv_seqlen": [1]},
            ValueError,
            "nonpad_kv_seqlen must not be given together",
        ),
        ({"q_num_heads": 3}, ValueError, "q_num_heads must divide the last axis of Q, 8, got 3"),
        ({"kv_num_heads": None}, ValueError, "kv_num_heads must divide the last axis of K, 8, got None"),
        ({"Q": np.zeros((3, 8))}, ValueError, "Q must have 3 or 4 dimensions, got 2"),
        ({"V": np.zeros((1, 3, 8), int)}, TypeError, "V must be float16, bfloat16, float32 or float64, got int64"),
        *[
            ({name: np.ma.ones((1, 3, 8), np.float32)}, TypeError, f"{name} is a masked array")
            for name in ("Q", "K", "V", "attn_mask")
        ],
        (dict.fromkeys(("past_key", "past_value"), np.ma.ones((1, 2, 1, 4))), TypeError, "past_key is a masked array"),
        ({"return_qk": True, "qk_matmul_output_mode": 4}, ValueError, "qk_matmul_output_mode must be 0, 1, 2 or 3"),
        ({"qk_matmul_output_mode": 9}, ValueError, "qk_matmul_output_mode must be 0, 1, 2 or 3, got 9"),
        *[({"q_num_heads": n}, ValueError, f"q_num_heads must divide .* 8, got {n}") for n in (0, -2, 2.0, "2")],
        ({"attn_mask": np.ones((3, 2), int)}, TypeError, "attn_mask"),
        ({"nonpad_kv_seqlen": [2.0]}, TypeError, "nonpad_kv_seqlen must hold integers, got dtype float64"),
        *[
            (
                dict.fromkeys(("past_key", "past_value"), np.ones(shape, np.float32)),
                ValueError,
                r"past_key must have shape \(1, 2, T_past, 4\), got",
            )
            for shape in [(1, 2, 4), (1, 3, 5, 4), (2, 2, 5, 4), (1, 2, 5, 3)]
        ],
    ],
)
def test_wrong_arguments_are_refused(change: dict[str, Any], error: type[Exception], message: str) -> None:
    x = np.zeros((1, 3, 8), np.float32)
    call: dict[str, Any] = {"Q": x, "K": x, "V": x, "q_num_heads": 2, "kv_num_heads": 2} | change
    with pytest.raises(error, match=message):
        attention(**call)


@pytest.mark.parametrize(("batch", "T_q", "T_k"), [(1, 0, 3), (0, 3, 3), (2, 3, 0), (2, 0, 0)])
def test_inputs_without_elements_give_zeros(batch: int, T_q: int, T_k: int) -> None:
    """Three-dimensional inputs, with the number of heads as an argument."""
    q, k, v = (np.ones((batch, T, width), np.float32) for T, width in ((T_q, 8), (T_k, 8), (T_k, 6)))
    y = attention(q, k, v, q_num_heads=2, kv_num_heads=2).Y
    assert y.shape == (batch, T_q, 6)
    assert not y.any()


def test_the_import_names_the_extra_if_onnx_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnx", None)  # an import of it raises
    monkeypatch.delitem(sys.modules, "cattn.integrations.onnx")
    with pytest.raises(ImportError, match=r"pip install 'cattn\[onnx\]'"):
        importlib.import_module("cattn.integrations.onnx")
