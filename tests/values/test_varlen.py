"""varlen_attention: packed sequences have the bits of the padded batch, and never read a neighbour."""

import mmap
import os
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import cattn
from support import assert_same_bits, examples, forced, looped
from support import calls as random_calls
from support.calls import drawn, statistics_options
from support.laws import check_packed

NAMES = ("query", "key", "value", "cu_seqlens_q", "cu_seqlens_k")
LENGTHS: dict[str, tuple[list[int], list[int]]] = {
    "alike": ([5, 3, 9], [5, 3, 9]),
    "few queries": ([1, 2, 1, 4], [30, 7, 250, 12]),
    "empty ones": ([0, 6, 0, 2, 0], [3, 0, 0, 40, 1]),
    "long and short": ([200, 1, 130, 7], [210, 400, 130, 7]),
    "one": ([17], [33]),
    "none": ([], []),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "full": {},
    "lower right": {"is_causal": "lower_right"},
    "upper left": {"is_causal": "upper_left", "scale": 0.3},
    "window": {"is_causal": "lower_right", "window_size": (9, 0)},
    "slopes of each sequence": {"alibi_slopes": "each", "sinks": "each", "alignment": "lower_right"},
    "window to the last key": {"alignment": "lower_right", "window_size": (9, 3)},
    "window from the first key": {"alignment": "upper_left", "window_size": (9, 3)},
    "everything": {
        "is_causal": "lower_right",
        "window_size": (50, 0),
        "softcap": 2.0,
        "alibi_slopes": [0.1, 0.2, 0.3, 0.4],
        "sinks": [0.5, -1.0, 2.0, 0.0],
        "dropout_p": 0.3,
        "rng": 5,
    },
}


def options_of(options: str, lengths: str) -> dict[str, Any]:
    """Return options; "each" becomes one number for each sequence and head."""
    numbers = np.random.default_rng(3).random((len(LENGTHS[lengths][0]), 4))
    return {name: numbers if value == "each" else value for name, value in OPTIONS[options].items()}


def edges(lengths: list[int]) -> np.ndarray:
    return np.cumsum([0, *lengths])


def packed(name: str, dtype: type, d_v: int = 6) -> tuple[np.ndarray, ...]:
    lengths_q, lengths_k = LENGTHS[name]
    rng = np.random.default_rng(list(name.encode()))
    shapes = (sum(lengths_q), 4, 8), (sum(lengths_k), 2, 8), (sum(lengths_k), 2, d_v)
    arrays = [rng.standard_normal(shape).astype(dtype) for shape in shapes]
    return *arrays, edges(lengths_q), edges(lengths_k)


@pytest.mark.promise("packed sequences")
@looped("options", OPTIONS)
@pytest.mark.parametrize("name", [name for name in LENGTHS if name != "none"])
def test_packed_sequences_have_the_bits_of_the_padded_batch(
    name: str, options: str, dtype: type, rng: np.random.Generator
) -> None:
    """Outputs, gradients and statistics, on every table and path."""
    call = dict(zip(NAMES, packed(name, dtype), strict=True)) | options_of(options, name)
    check_packed(call, {"top_k": 1}, rng)


def guarded(array: np.ndarray) -> np.ndarray:
    """Copy the array to the end of a memory map, so that most reads past it crash."""
    pages = mmap.mmap(-1, -(-array.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE)
    copy = np.frombuffer(pages, np.uint8)[len(pages) - array.nbytes :].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


@pytest.mark.promise("packed sequences")
def test_no_sequence_reads_its_neighbours(isa: str, dtype: type) -> None:
    """One sequence is NaN; the others keep their bits on every path."""
    query, key, value, cu_q, cu_k = packed("long and short", dtype)
    options = OPTIONS["everything"]
    clean = cattn.varlen_attention(query, key, value, cu_q, cu_k, **options)
    dirty = [guarded(a) for a in (query, key, value)]
    for array, cu in zip(dirty, (cu_q, cu_k, cu_k), strict=True):
        array[cu[1] : cu[2]] = np.nan
    for path in ("auto", "tile", "rows", "split"):
        with forced(path):
            result = cattn.varlen_attention(*dirty, cu_q, cu_k, **options)
        others = np.r_[0 : cu_q[1], cu_q[2] : cu_q[-1]]
        assert_same_bits(result[others], clean[others], path)
        assert np.isnan(result[cu_q[1] : cu_q[2]]).any()


def test_inputs_and_out_may_have_any_strides(dtype: type) -> None:
    query, key, value, cu_q, cu_k = packed("long and short", dtype)
    expected = cattn.varlen_attention(query, key, value, cu_q, cu_k)
    wide = np.full((len(query), 8, 12), 7, dtype)
    out = wide[:, ::2, ::-2]
    laid = [np.asfortranarray(a)[:, :, :] for a in (query, key, value)]
    assert cattn.varlen_attention(*laid, cu_q, cu_k, out=out) is out
    assert_same_bits(np.ascontiguousarray(out), expected)
    assert (wide[:, 1::2] == 7).all()
    same = query[..., :6].copy()
    assert_same_bits(cattn.varlen_attention(query, key, value, cu_q, cu_k, out=same), expected)


@pytest.mark.parametrize("integers", [np.int8, np.uint16, np.int32, np.uint64, ">i8", "list", "any strides", "shifted"])
def test_edges_may_be_any_integers(integers: Any) -> None:
    *arrays, cu_q, cu_k = packed("alike", np.float32)
    expected = cattn.varlen_attention(*arrays, cu_q, cu_k)
    assert_same_bits(cattn.varlen_attention(*arrays, *(laid_out(cu, integers) for cu in (cu_q, cu_k))), expected)


def laid_out(cu: np.ndarray, integers: Any) -> Any:
    if integers == "list":
        return cu.tolist()
    if integers == "any strides":
        return np.repeat(cu[::-1], 3)[::-3]
    if integers == "shifted":  # not aligned
        bytes_of = np.zeros(cu.nbytes + 1, np.uint8)
        bytes_of[1:] = cu.astype(np.int64).view(np.uint8)
        return bytes_of[1:].view(np.int64)
    return cu.astype(integers)


def called_in_python(function: Any, *args: Any, **options: Any) -> list[str]:
    """Return the names of cattn's Python functions that run during a call."""
    names: list[str] = []
    before = sys.getprofile()

    def note(frame: Any, event: str, arg: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(os.path.dirname(cattn.__file__)):
            names.append(frame.f_code.co_name)

    sys.setprofile(note)
    try:
        function(*args, **options)
    finally:
        sys.setprofile(before)
    return names


def test_a_call_of_plain_arrays_runs_no_python_code() -> None:
    """Packed and dense calls alike. A gradient that was broadcast is summed by NumPy."""
    query, key, value, cu_q, cu_k = packed("alike", np.float32)
    out, _, lse, *_ = cattn.varlen_attention(query, key, value, cu_q, cu_k, return_lse=True)
    edges = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k.astype(np.int32), "is_causal": "lower_right"}
    assert called_in_python(cattn.varlen_attention, query, key, value, **edges, max_seqlen_q=20, out=out) == []
    assert called_in_python(cattn.varlen_attention_statistics, query, key, **edges) == []
    edges["is_causal"] = False
    out, _, lse, *_ = cattn.varlen_attention(query, key, value, cu_q, cu_k, return_lse=True)
    assert called_in_python(cattn.varlen_attention_backward, out, query, key, value, out, lse, **edges) == []
    x, weights = query[:, 0], np.empty((len(query),) * 2, np.float32)
    dense = cattn.causal_attention(x, x, x, return_lse=True)
    arrays = (dense.out, x, x, x, dense.out, dense.lse)
    assert called_in_python(cattn.attention_backward, *arrays, is_causal=True) == []
    summed = called_in_python(cattn.attention_backward, *arrays, bias=np.zeros(17, np.float32), merged=True)
    assert "sum_gradients" in summed
    assert called_in_python(cattn.attention_weights, x, x, stage="dropout", dropout_p=0.5, rng=1, out=weights) == []


def test_max_seqlen_is_accepted() -> None:
    arrays = packed("alike", np.float32)
    expected = cattn.varlen_attention(*arrays)
    assert_same_bits(cattn.varlen_attention(*arrays, max_seqlen_q=9, max_seqlen_k=100), expected)


def test_different_lengths_warn_unless_the_alignment_is_named() -> None:
    alike, few = packed("alike", np.float32), packed("few queries", np.float32)
    cattn.varlen_attention(*alike, is_causal=True)
    for options in ({"is_causal": True}, {"window_size": (3, 0)}):
        with pytest.warns(cattn.CausalAlignmentWarning, match="lower_right"):
            warned = cattn.varlen_attention(*few, **options)
    for options in ({"is_causal": "lower_right"}, {"is_causal": "upper_left", "window_size": (3, 0)}):
        cattn.varlen_attention(*few, **options)
    assert warned.shape == (8, 4, 6)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            {"cu_seqlens_q": [1, 5]},
            ValueError,
            r"cu_seqlens_q must start with 0, .* and end with 5, got \[1, 5\]",
        ),
        ({"cu_seqlens_q": [0, 4]}, ValueError, "cu_seqlens_q must start with 0, never fall and end with 5"),
        ({"cu_seqlens_k": [0, 3, 2, 5]}, ValueError, "cu_seqlens_k must start with 0, never fall"),
        ({"cu_seqlens_k": [0, 6]}, ValueError, "cu_seqlens_k must be between 0 and 5, got 6"),
        ({"cu_seqlens_k": [0, -1, 5]}, ValueError, "cu_seqlens_k must be between 0 and 5, got -1"),
        ({"cu_seqlens_k": [0, 2, 5]}, ValueError, "cu_seqlens_q has 1 sequences, cu_seqlens_k has 2"),
        ({"cu_seqlens_q": 5}, ValueError, r"cu_seqlens_q must have shape \(B \+ 1,\), got \(\)"),
        ({"cu_seqlens_q": []}, ValueError, r"cu_seqlens_q must have shape \(B \+ 1,\), got \(0,\)"),
        ({"cu_seqlens_q": [0.0, 5.0]}, TypeError, "cu_seqlens_q must be an int or an integer array, got dtype float64"),
        ({"max_seqlen_q": 4}, ValueError, "max_seqlen_q must be at least 5, the longest of cu_seqlens_q, got 4"),
        ({"query": np.ones((5, 4))}, ValueError, r"query must have shape \(total, heads, head_dim\), got \(5, 4\)"),
        ({"value": np.ones((5, 3, 4))}, ValueError, "value has heads"),
        ({"key": np.ones((5, 3, 8)), "value": np.ones((5, 3, 4))}, ValueError, "query has 4 heads"),
        ({"key": np.ones((5, 2, 7))}, ValueError, "key has head_dim 7, query has 8"),
        ({"value": np.ones((4, 2, 4))}, ValueError, "value has T_k 4, key has 5"),
        ({"rng": cattn.TorchGenerator(1), "dropout_p": 0.5}, TypeError, "rng must be .*, got TorchGenerator"),
        ({"out": np.ones((5, 4, 3))}, ValueError, r"out has shape \(5, 4, 3\), the result has \(5, 4, 4\)"),
        ({"out": np.ones((5, 4, 4), np.float32)}, TypeError, "out has dtype float32, the result has float64"),
        ({"out": [1.0]}, TypeError, "out must be a numpy.ndarray, got list"),
        ({"max_seqlen_k": -1}, ValueError, "max_seqlen_k must be at least 0, got -1"),
        ({"max_seqlen_k": 5.0}, TypeError, "max_seqlen_k must be an int, got float"),
        ({"cu_seqlens_k": np.array([0, 2**63], np.uint64)}, ValueError, f"cu_seqlens_k must be .*, got {2**63}"),
        ({"cu_seqlens_k": [[0, 5]]}, ValueError, r"cu_seqlens_k must have shape \(B \+ 1,\), got \(1, 2\)"),
        (
            {"key": np.ones((5, 2, 8), np.int8)},
            TypeError,
            r"key has dtype int8 and no scale: pass cattn.Quantized\(key",
        ),
        ({"is_causal": "left"}, ValueError, "is_causal must be False, True, 'upper_left' or 'lower_right', got 'left'"),
        ({"alibi_slopes": [1.0]}, None, ""),
        ({"alibi_slopes": [1.0, 2.0]}, ValueError, "alibi_slopes has shape"),
        ({"window_size": 3}, TypeError, "window_size must be"),
        ({"alibi_slopes": np.ones((1, 4)), "alignment": "lower_right", "is_causal": True}, None, ""),
        ({"alibi_slopes": np.ones((2, 4))}, ValueError, r"alibi_slopes has shape \(2, 4\)"),
        ({"alignment": "right"}, ValueError, "alignment must be None, 'upper_left' or 'lower_right', got 'right'"),
        (
            {"alignment": "upper_left", "is_causal": "lower_right"},
            ValueError,
            "alignment='upper_left' contradicts is_causal='lower_right': give one of them",
        ),
    ],
)
def test_wrong_arguments_are_refused(change: dict[str, Any], error: type[Exception] | None, message: str) -> None:
    call: dict[str, Any] = {
        "query": np.ones((5, 4, 8)),
        "key": np.ones((5, 2, 8)),
        "value": np.ones((5, 2, 4)),
        "cu_seqlens_q": [0, 5],
        "cu_seqlens_k": [0, 5],
    } | change
    if error is None:
        cattn.varlen_attention(**call)
        return
    with pytest.raises(error, match=message):
        cattn.varlen_attention(**call)


def test_one_query_head_is_broadcast_to_all_value_heads() -> None:
    """As in scaled_dot_product_attention, a single head of query, key or value is broadcast."""
    rng = np.random.default_rng(0)
    query, key, value = (rng.standard_normal((5, heads, 4)) for heads in (1, 1, 3))
    out = cattn.varlen_attention(query, key, value, [0, 5], [0, 5], is_causal=True)
    expected = cattn.causal_attention(*(x.swapaxes(0, 1) for x in (query, key, value)))
    np.testing.assert_array_equal(out.swapaxes(0, 1), expected)


def test_alignment_and_causality_may_be_given_apart(dtype: type) -> None:
    arrays = packed("few queries", dtype)
    for corner in ("upper_left", "lower_right"):
        expected = cattn.varlen_attention(*arrays, is_causal=corner, window_size=(9, 0))
        for causal in (True, corner):
            out = cattn.varlen_attention(*arrays, is_causal=causal, alignment=corner, window_size=(9, 0))
            assert_same_bits(out, expected)


@pytest.mark.promise("packed sequences", "gradients' bits", "statistics' bits")
@examples(60, long=500)
@given(st.data())
def test_random_sequences_have_the_bits_of_the_padded_batch(data: st.DataObject) -> None:
    """Outputs, gradients and statistics; every operand has strides and broadcast axes of its own."""
    call = data.draw(drawn(random_calls.packed, cattn.varlen_attention_backward))
    options = data.draw(drawn(statistics_options, call["key"].shape[0]))
    check_packed(call, options, np.random.default_rng(data.draw(st.integers(0, 2**32))))


# ---- gradients -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("change", "error", "message"), [
    ({"grad_out": np.ones((5, 4, 3))}, ValueError, r"grad_out has shape \(5, 4, 3\), the output has \(5, 4, 4\)"),
    ({"lse": np.ones((5, 4))}, ValueError, r"lse has shape \(5, 4\), the log-sum-exp has \(4, 5\)"),
    ({"grad_lse": np.ones(5)}, ValueError, r"grad_lse has shape \(5,\), the log-sum-exp has \(4, 5\)"),
    ({"dropout_p": 0.5}, ValueError, "rng must be what draws the forward pass's mask again"),
    ({"cu_seqlens_q": [0, 4]}, ValueError, "cu_seqlens_q must start with 0"),
])  # fmt: skip
def test_wrong_arguments_of_the_gradients_are_refused(change: Any, error: type[Exception], message: str) -> None:
    call: dict[str, Any] = {
        "grad_out": np.ones((5, 4, 4)), "query": np.ones((5, 4, 8)), "key": np.ones((5, 2, 8)),
        "value": np.ones((5, 2, 4)), "out": np.ones((5, 4, 4)), "lse": np.ones((4, 5)), "cu_seqlens_q": [0, 5],
        "cu_seqlens_k": [0, 5],
    }  # fmt: skip
    with pytest.raises(error, match=message):
        cattn.varlen_attention_backward(**call | change)
