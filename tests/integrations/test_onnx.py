"""ONNX's operators: every node test of the installed onnx package, and the errors of the functions."""

import importlib
import itertools
import sys
from collections import Counter
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest

onnx = pytest.importorskip("onnx")
ml_dtypes = pytest.importorskip("ml_dtypes")

from onnx.reference import ReferenceEvaluator  # noqa: E402

from cattn.integrations.onnx import (  # noqa: E402
    Attention,
    CausalConvWithState,
    LinearAttention,
    attention,
    causal_conv_with_state,
    linear_attention,
)

OPERATORS: dict[str, Any] = {x.__name__: x for x in (Attention, LinearAttention, CausalConvWithState)}


def node_cases() -> list[Any]:
    """Return the node tests of the operators themselves. The others are its expansions into functions.

    The import of a module adds its cases to a list; onnx's own function imports all modules, which takes ten seconds.
    """
    from onnx.backend.test.case import node

    for name in ("attention", "linear_attention", "causal_conv_with_state"):
        if find_spec(place := f"{node.__name__}.{name}"):  # an earlier onnx has no linear attention
            importlib.import_module(place)
    return [case for case in node._NodeTestCases if case.model.graph.node[0].op_type in OPERATORS]


@pytest.mark.promise("ONNX's operator")
def test_every_node_case_of_onnx_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the tolerances of ONNX's own runner."""
    cases, called = node_cases(), []
    counts = Counter(case.model.graph.node[0].op_type for case in cases)
    assert counts["Attention"] >= 93
    if onnx.defs.onnx_opset_version() >= 27:
        assert (counts["LinearAttention"], counts["CausalConvWithState"]) >= (14, 12)
    for operator in OPERATORS.values():
        run: Any = operator._run
        monkeypatch.setattr(
            operator, "_run", lambda self, *args, run=run, **kwargs: called.append(1) or run(self, *args, **kwargs)
        )
    for case in cases:
        session = ReferenceEvaluator(case.model, new_ops=[*OPERATORS.values()])
        for inputs, outputs in case.data_sets:
            names = [value.name for value in case.model.graph.input]
            results = session.run(None, dict(zip(names, inputs, strict=True)))
            for result, expected in zip(results, outputs, strict=True):
                assert result.shape == expected.shape, case.name
                assert result.dtype == expected.dtype, case.name
                rtol = max(case.rtol, 2**-6) if expected.dtype.name == "bfloat16" else case.rtol
                a, b = result.astype(np.float64), expected.astype(np.float64)
                np.testing.assert_allclose(a, b, rtol=rtol, atol=case.atol, err_msg=case.name)
    assert len(called) >= len(cases)


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
    y, present_key, present_value, _ = attention(q, k, v, q_num_heads=2, kv_num_heads=2)
    assert (present_key.shape, present_value.shape) == ((batch, 2, T_k, 4), (batch, 2, T_k, 3))
    assert y.shape == (batch, T_q, 6)
    assert not y.any()


def test_the_import_names_the_extra_if_onnx_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnx", None)  # an import of it raises
    monkeypatch.delitem(sys.modules, "cattn.integrations.onnx")
    with pytest.raises(ImportError, match=r"pip install 'cattn\[onnx\]'"):
        importlib.import_module("cattn.integrations.onnx")


# ---- every combination, against the function that defines the operator -----------------------------------------------
INPUTS = ("Q", "K", "V", "attn_mask", "past_key", "past_value", "nonpad_kv_seqlen")
OUTPUTS = ("Y", "present_key", "present_value", "qk_matmul_output")
# B, H, H_kv, T_q, T_new, head_dim, d_v; T_past
SIZES = [((2, 4, 2, 3, 5, 4, 6), 2), ((1, 1, 1, 1, 1, 1, 1), 1), ((2, 2, 1, 1, 4, 1, 3), 0), ((3, 2, 2, 4, 1, 2, 1), 4)]
EMPTY = [((0, 2, 1, 2, 3, 4, 4), 1), ((2, 2, 2, 0, 3, 4, 5), 2)]  # of rank 3, the definition itself fails


def model_of(nodes: Any, feeds: dict[str, np.ndarray], outputs: list[str], opset: int) -> Any:
    """A model of these nodes, for inputs of these types and shapes."""
    kinds = {name: onnx.helper.np_dtype_to_tensor_dtype(array.dtype) for name, array in feeds.items()}
    given = [onnx.helper.make_tensor_value_info(name, kinds[name], array.shape) for name, array in feeds.items()]
    made = [onnx.helper.make_tensor_value_info(name, kinds["V" if "value" in name else "Q"], None) for name in outputs]
    graph = onnx.helper.make_graph(nodes, "attention", given, made)
    return onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", opset)], ir_version=11)


def body_of(node: Any, feeds: dict[str, np.ndarray], opset: int) -> Any:
    """The nodes of the function by which onnx defines the operator for such inputs, under the node's names."""
    types = [
        onnx.helper.make_tensor_type_proto(onnx.helper.np_dtype_to_tensor_dtype(feeds[name].dtype), feeds[name].shape)
        if name
        else onnx.TypeProto()
        for name in node.input
    ]
    function = onnx.FunctionProto()
    schema = onnx.defs.get_schema("Attention", opset)
    function.ParseFromString(
        schema.get_context_dependent_function_with_opset_version(
            opset, node.SerializeToString(), [kind.SerializeToString() for kind in types]
        )
    )
    return function.node


def expected_of(node: Any, feeds: dict[str, np.ndarray], wanted: list[str], opset: int) -> dict[str, np.ndarray]:
    """The outputs by the operator's definition.

    The package has no function for three dimensions with a mask and windows. Its evaluator then decides, which does
    not take a mask of one dimension, and whose scores are those after the cap.
    """
    if body := body_of(node, feeds, opset):
        model = model_of(body, feeds, wanted, opset)
    else:
        assert opset == 25
        feeds = {name: np.atleast_2d(array) if name == "attn_mask" else array for name, array in feeds.items()}
        attributes = {attribute.name: attribute for attribute in node.attribute}
        if "softcap" in attributes and attributes["qk_matmul_output_mode"].i == 0:
            wanted = [name for name in wanted if name != "qk_matmul_output"]
        model = model_of([node], feeds, wanted, opset)
    with np.errstate(invalid="ignore"):  # of rows that see no key
        return dict(zip(wanted, ReferenceEvaluator(model).run(None, feeds), strict=True))


def mask_of(kind: str, B: int, H: int, T_q: int, T_k: int) -> np.ndarray:
    """A mask of random elements. Where it has several queries, the first one sees no key."""
    shapes = {
        "full": (B, H, T_q, T_k), "short": (B, 1, T_q, (T_k + 1) // 2), "one key": (T_q, 1), "row": (T_k,),
        "heads": (H, T_q, T_k), "one query": (B, 1, 1, T_k),
    }  # fmt: skip
    rng = np.random.default_rng(1)
    shape = shapes[kind.partition(" ")[2]]
    seen = rng.random(shape) < 0.7
    if len(shape) > 1 and shape[-2] > 1:
        seen[..., 0, :] = False
    return seen if "bool" in kind else np.where(seen, rng.standard_normal(shape), -np.inf).astype(np.float32)


MASKS = ["", "bool full", "float full", "bool short", "float one key", "bool one key", "float row", "bool heads"]
MASKS += ["float short", "bool one query"]
PARTS = [OUTPUTS[:1], OUTPUTS[:2], ("Y", "", "present_value"), ("Y", "", "", "qk_matmul_output"), OUTPUTS]
ATTRIBUTES = [{}, {"scale": 0.3}, {"softcap": 0.7}, {"scale": 2.0, "softcap": 1.5}, {"softmax_precision": 11}]
WINDOWS = [{}, {"left_window_size": 1}, {"right_window_size": 0}, {"left_window_size": 0, "right_window_size": 1}]


def problems(opset: int, rank: int, cache: str) -> Iterator[tuple[Any, dict[str, np.ndarray]]]:
    """Nodes and their inputs: every size with every mask, and the values of everything else in turn."""
    for n, ((sizes, past), mask) in enumerate(itertools.product(SIZES if rank == 3 else SIZES + EMPTY, MASKS)):
        B, H, H_kv, T_q, T_new, D, d_v = sizes
        feeds = dict(zip("QKV", inputs((B, H, T_q, D), (B, H_kv, T_new, D), (B, H_kv, T_new, d_v)), strict=True))
        attributes: dict[str, Any] = {"qk_matmul_output_mode": n % 4, "is_causal": n // 2 % 2, **ATTRIBUTES[n % 7 % 5]}
        if opset == 25:
            attributes |= WINDOWS[n % 11 % 4]
        if rank == 3:
            attributes |= {"q_num_heads": H, "kv_num_heads": H_kv}
            feeds = {a: x.swapaxes(1, 2).reshape(B, x.shape[2], x.shape[1] * x.shape[3]) for a, x in feeds.items()}
        if cache == "past":
            feeds["past_key"], feeds["past_value"] = inputs((B, H_kv, past, D), (B, H_kv, past, d_v))
        T_k = T_new + past * (cache == "past")
        if mask:
            feeds["attn_mask"] = mask_of(mask, B, H, T_q, T_k)
        if opset == 23 and "short" in mask and (T_k + 1) // 2 not in (1, T_k):
            continue  # only later opsets hide the keys after the end of the mask
        if cache == "nonpad":
            most = min(T_k, feeds["attn_mask"].shape[-1]) if mask else T_k
            feeds["nonpad_kv_seqlen"] = np.maximum(most - np.arange(B), 0)
        names = [name if name in feeds else "" for name in INPUTS[: 7 if opset > 23 else 6]]
        node = onnx.helper.make_node("Attention", names, list(PARTS[n % 5]), **attributes)
        yield node, {name: feeds[name] for name in names if name}


@pytest.mark.promise("ONNX's operator")
@pytest.mark.parametrize(
    ("opset", "cache"),
    [(opset, cache) for opset in (23, 24, 25) for cache in ("", "past", "nonpad") if (opset, cache) != (23, "nonpad")],
)
@pytest.mark.parametrize("rank", [3, 4])
def test_every_output_is_what_the_operators_definition_gives(opset: int, cache: str, rank: int) -> None:
    """Optional inputs and outputs, modes, attributes, masks, and axes of every length, also 1 and 0."""
    for node, feeds in problems(opset, rank, cache):
        wanted = [name for name in node.output if name]
        run = ReferenceEvaluator(model_of([node], feeds, wanted, opset), new_ops=[Attention]).run
        results = dict(zip(wanted, run(None, feeds), strict=True))
        for name, expected in expected_of(node, feeds, wanted, opset).items():
            told = f"{name} of {node}, { ({key: array.shape for key, array in feeds.items()}) }"
            assert (results[name].shape, results[name].dtype) == (expected.shape, expected.dtype), told
            np.testing.assert_allclose(results[name], expected, rtol=3e-6, atol=3e-6, err_msg=told)


def test_present_keys_and_values_have_the_dtypes_of_q_and_v() -> None:
    q, k, v = inputs((1, 2, 3, 4), (1, 1, 5, 4), (1, 1, 5, 6))
    past = {"past_key": np.ones((1, 1, 2, 4), np.float32), "past_value": np.ones((1, 1, 2, 6), np.float64)}
    for softmax_precision in (None, onnx.TensorProto.DOUBLE):
        without = attention(q, k, v.astype(np.float64), softmax_precision=softmax_precision)
        assert (without.present_key.dtype, without.present_value.dtype) == (np.float32, np.float64)
        assert without.qk_matmul_output is None
        result = attention(q, k, v.astype(np.float64), **past, softmax_precision=softmax_precision)
        assert (result.Y.dtype, result.present_key.dtype, result.present_value.dtype) == (
            np.float32, np.float32, np.float64,
        )  # fmt: skip
        np.testing.assert_array_equal(result.present_value[:, :, 2:], without.present_value)


def test_linear_attention_names_what_does_not_fit() -> None:
    x, numbers = inputs((1, 3, 8), (1, 3, 4))
    heads: dict[str, Any] = {"q_num_heads": 4, "kv_num_heads": 4}
    half = linear_attention(x, x, x, np.zeros((1, 4, 2, 2), np.float16), **heads, update_rule="linear")
    assert [a.dtype for a in half] == [np.float32, np.float16]
    for message, given, options in (
        ("update_rule 'gated_delta' needs decay", (x, x, x), heads),
        ("update_rule 'linear' forbids beta", (x, x, x, None, None, numbers), heads | {"update_rule": "linear"}),
        ("update_rule must be one of 'linear', 'gated', ", (x, x, x), heads | {"update_rule": "x"}),
        ("query must have 3 dimensions, got 2", (x[0], x, x, None, numbers, numbers), heads),
        ("q_num_heads, 2, must be a multiple of kv_num_heads, 4", (x, x, x, None, numbers, numbers),
         heads | {"q_num_heads": 2}),
        ("past_state must have shape (1, 4, 2, 2), got (1, 4, 2)", (x, x, x, x[:, :4, :2].repeat(2, 1)[:, :4], numbers,
         numbers), heads),
        ("decay must have shape (1, 3, 4) or (1, 3, 8), got (1, 3, 3)", (x, x, x, None, numbers[..., :3], numbers),
         heads),
        ("decay must have shape (1, 3, 4) or (1, 3, 8), got (3, 4)", (x, x, x, None, numbers[0], numbers), heads),
        ("decay must have shape (1, 3, 4) or (1, 3, 8), got (1, 1, 8)", (x, x, x, None, x[:, :1], numbers), heads),
        ("beta must have shape (1, 3, 4) or (1, 3, 1), got (3, 4)", (x, x, x, None, numbers, numbers[0]), heads),
        ("beta must have shape (1, 3, 4) or (1, 3, 1), got (1, 1, 4)", (x, x, x, None, numbers, numbers[:, :1]), heads),
        ("value must have the batch and the tokens of query, (1, 3), got (2, 3)",
         (x, x, x.repeat(2, 0), None, numbers, numbers), heads),
    ):  # fmt: skip
        with pytest.raises(ValueError) as caught:  # noqa: PT011
            linear_attention(*given, **options)
        assert str(caught.value).startswith(message)


def test_linear_attention_of_no_tokens_keeps_the_state() -> None:
    x, state = inputs((2, 0, 8), (2, 4, 2, 2))
    out, last = linear_attention(x, x, x, state, q_num_heads=4, kv_num_heads=4, update_rule="linear")
    assert out.shape == (2, 0, 8)
    np.testing.assert_array_equal(last, state)


def test_the_convolution_names_what_does_not_fit() -> None:
    x, weight = inputs((1, 3, 8), (3, 1, 4))
    for message, given, options in (
        ("weight must have shape (C, 1, K), got (3, 4)", (x, weight[:, 0]), {}),
        ("input must have shape (B, C, T), got (3, 8)", (x[0], weight), {}),
        ("activation must be 'none', 'silu' or 'swish', got 'gelu'", (x, weight), {"activation": "gelu"}),
        ("past_state must have shape (2, 3, 3), got (1, 3, 3)", (x.repeat(2, 0), weight, None, x[..., :3]), {}),
    ):
        with pytest.raises(ValueError) as caught:  # noqa: PT011
            causal_conv_with_state(*given, **options)
        assert str(caught.value) == message
