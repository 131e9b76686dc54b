"""Functions that make or show masks: causal_mask, sliding_window, get_alibi_slopes, show_mask."""

import itertools
from typing import Any

import numpy as np
import pytest

import cattn


def test_sliding_window_counts_the_token_itself() -> None:
    mask = cattn.causal_mask(9, window_size=cattn.sliding_window(3))
    assert mask.sum(axis=1).tolist() == [1, 2, 3, 3, 3, 3, 3, 3, 3]
    assert mask.diagonal().all()


@pytest.mark.parametrize("T_q", [1, 4, 9])
@pytest.mark.parametrize("T_k", [1, 4, 9])
def test_causal_mask_with_windows_is_the_definition(T_q: int, T_k: int) -> None:
    """Every pair of query and key, against the definition in plain Python."""
    for offset, left, right in itertools.product((-3, 0, 2), (-1, None, 0, 2), (-1, None, 0, 2)):
        mask = cattn.causal_mask(T_q, T_k, is_causal=False, query_offset=offset, window_size=(left, right))
        for i, j in itertools.product(range(T_q), range(T_k)):
            p = i + offset
            visible = (left in (None, -1) or j >= p - left) and (right in (None, -1) or j <= p + right)
            assert mask[i, j] == visible
        causal = cattn.causal_mask(T_q, T_k, query_offset=offset, window_size=(left, right))
        np.testing.assert_array_equal(causal, mask & cattn.causal_mask(T_q, T_k, query_offset=offset))


def test_alibi_slopes_are_those_of_the_paper() -> None:
    """The numbers of the paper for 8 heads, and its rule for others."""
    np.testing.assert_array_equal(cattn.get_alibi_slopes(8), 0.5 ** np.arange(1, 9))
    np.testing.assert_allclose(cattn.get_alibi_slopes(16), 2.0 ** (-np.arange(1, 17) / 2), rtol=1e-15)
    twelve = cattn.get_alibi_slopes(12)
    np.testing.assert_array_equal(twelve[:8], cattn.get_alibi_slopes(8))
    np.testing.assert_array_equal(twelve[8:], cattn.get_alibi_slopes(16)[:8:2])
    for n in range(1, 40):
        slopes = cattn.get_alibi_slopes(n)
        assert slopes.shape == (n,)
        assert len(set(slopes)) == n
        assert ((slopes > 0) & (slopes < 1)).all()
    assert len(set(cattn.get_alibi_slopes(2**16).astype(np.float32))) == 2**16


def test_alibi_slopes_are_a_bias_that_grows_with_the_distance(dtype: type) -> None:
    rng = np.random.default_rng(0)
    query, key, value = (rng.standard_normal((2, 8, 30, 16)).astype(dtype) for _ in range(3))
    slopes = cattn.get_alibi_slopes(8)
    distance = np.abs(np.arange(30)[:, None] - np.arange(30))
    bias = (-slopes[:, None, None] * distance).astype(dtype)
    ours = cattn.causal_attention(query, key, value, alibi_slopes=slopes)
    same = cattn.causal_attention(query, key, value, bias=bias)
    np.testing.assert_allclose(ours, same, rtol=0, atol=50 * np.finfo(dtype).eps)


def test_show_mask_draws_a_row_for_each_query() -> None:
    assert cattn.show_mask(2) == "key      01\nquery 0  xx\nquery 1  xx"
    drawn = cattn.show_mask(11, 12, is_causal="lower_right", attn_mask=np.arange(12) != 3).splitlines()
    assert drawn[0] == "key       012345678901"
    assert drawn[1] == "query  0  xx.........."
    assert drawn[-1] == "query 10  xxx.xxxxxxxx"


def test_show_mask_draws_each_batch_entry_and_head() -> None:
    text = cattn.show_mask(2, 3, query_seq_lengths=[2, 1], key_value_seq_lengths=[3, 2])
    first, second = text.split("\n\n")
    assert first.splitlines() == ["[0]:", "key      012", "query 0  xxx", "query 1  xxx"]
    assert second.splitlines() == ["[1]:", "key      012", "query 0  xx.", "query 1  ..."]
    heads = np.ones((2, 2, 1, 3), bool)
    assert cattn.show_mask(2, 3, attn_mask=heads, key_value_seq_lengths=[3, 2]).count("[") == 4
    first, second = cattn.show_mask(2, 3, is_causal="lower_right", key_value_seq_starts=[0, 2]).split("\n\n")
    assert first.splitlines() == ["[0]:", "key      012", "query 0  xx.", "query 1  xxx"]
    assert second.splitlines() == ["[1]:", "key      012", "query 0  ...", "query 1  ..x"]


def test_show_mask_of_many_tokens_lists_ranges() -> None:
    lines = cattn.show_mask(100, 200, is_causal="lower_right", window_size=(50, 0)).splitlines()
    assert lines[0] == "query  0  50-100"
    assert len(lines) == 65
    assert lines[-1] == "and 36 more queries"
    mask = np.zeros(70, bool)
    mask[[0, 1, 2, 9]] = True
    assert cattn.show_mask(1, 70, attn_mask=mask) == "query 0  0-2, 9"
    assert cattn.show_mask(1, 70, attn_mask=np.zeros(70, bool)) == "query 0  none"


@pytest.mark.promise("pictures")
def test_show_mask_agrees_with_causal_mask() -> None:
    keywords: dict[str, Any] = {"is_causal": "upper_left", "window_size": (2, 0)}
    rows = cattn.show_mask(5, 7, **keywords).splitlines()[1:]
    drawn = np.array([[mark == "x" for mark in row.split()[-1]] for row in rows])
    np.testing.assert_array_equal(drawn, cattn.causal_mask(5, 7, **keywords))


@pytest.mark.parametrize(("T_q", "T_k"), [(4, 6), (6, 4), (5, 5)])
def test_lower_right_aligns_the_last_query_with_the_last_key_of_each_length(T_q: int, T_k: int) -> None:
    """Query i of an entry with m queries and n keys sees the keys up to i + n - m: the lengths count, not the axes."""
    lengths_q, lengths_k = np.array([T_q, T_q, T_q - 2, 1, 0]), np.array([T_k, T_k - 3, 2, T_k, T_k])
    i, j = np.arange(T_q)[:, None], np.arange(T_k)
    for m, n in ((None, lengths_k), (lengths_q, None), (lengths_q, lengths_k), (None, T_k - 3)):
        lengths = {"query_seq_lengths": m, "key_value_seq_lengths": n}
        x, y = np.zeros((5, T_q, 8)), np.zeros((5, T_k, 8))
        scores = cattn.attention_weights(x, y, is_causal="lower_right", stage="mask", **lengths)
        shown = cattn.show_mask(T_q, T_k, is_causal="lower_right", **lengths).split("\n\n")
        for entry in range(5):
            m_here = T_q if m is None else int(np.broadcast_to(m, 5)[entry])
            n_here = T_k if n is None else int(np.broadcast_to(n, 5)[entry])
            visible = (i < m_here) & (j < n_here) & (j <= i + n_here - m_here)
            np.testing.assert_array_equal(scores[entry] == 0, visible)
            lines = shown[entry if len(shown) > 1 else 0].splitlines()[-T_q:]
            assert [line.split()[-1] for line in lines] == [
                "".join(".x"[v] for v in row) for row in visible.astype(int)
            ]


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: cattn.sliding_window(0), ValueError, "total must be at least 1, got 0"),
        (lambda: cattn.sliding_window(2.0), TypeError, "total must be an int, got float"),
        (lambda: cattn.get_alibi_slopes(0), ValueError, "num_heads must be at least 1, got 0"),
        (lambda: cattn.get_alibi_slopes(2**16 + 1), ValueError, "num_heads must be at most 65536, got 65537"),
        (lambda: cattn.get_alibi_slopes(2**31), ValueError, "num_heads must be at most 65536, got 2147483648"),
        (lambda: cattn.get_alibi_slopes("8"), TypeError, "num_heads must be an int, got str"),
        (lambda: cattn.show_mask(-1), ValueError, "T_q must be at least 0, got -1"),
        (lambda: cattn.show_mask(2, 2.5), TypeError, "T_k must be an int, got float"),
        (lambda: cattn.show_mask(2, window_size=(1,)), ValueError, "window_size must be"),
    ],
)
def test_wrong_arguments_are_refused(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize("offset", [2**61 - 1, 2**61])
def test_an_unbounded_window_side_hides_nothing_at_any_offset(offset: int) -> None:
    """With queries far after every key and far before."""
    for place in (offset, -offset):
        assert cattn.causal_mask(3, 4, is_causal=False, query_offset=place).all()
    assert cattn.causal_mask(3, 4, query_offset=offset).all()
    assert not cattn.causal_mask(3, 4, query_offset=-offset).any()
    assert not cattn.causal_mask(3, 4, query_offset=offset, window_size=(5, -1)).any()


@pytest.mark.parametrize("window", [(2**61, -1), (2**61 + 1, 2**61 - 2), (-1, 2**61), (2**62, 2**62), (2**62 - 1, 0)])
@pytest.mark.parametrize("offset", [2**61, -(2**61)])
def test_windows_are_right_at_any_offset(offset: int, window: tuple[int, int]) -> None:
    options = {"is_causal": False, "query_offset": offset, "window_size": window}
    expected = cattn.reference.causal_mask(5, 4, **options)  # type: ignore[arg-type]
    np.testing.assert_array_equal(cattn.causal_mask(5, 4, **options), expected)  # type: ignore[arg-type]


@pytest.mark.parametrize("batch", [(1, 1), (1, 2), (2, 1), (1,), ()])
def test_show_mask_combines_a_mask_with_lengths(batch: tuple[int, ...]) -> None:
    mask, heads = np.ones((*batch, 1, 6), bool), batch[1:]
    x = np.zeros((2, *heads, 6, 8))
    scores = cattn.attention_weights(x, x, mask, key_value_seq_lengths=[6, 2], stage="mask")
    shown = cattn.show_mask(6, attn_mask=mask, key_value_seq_lengths=[6, 2]).split("\n\n")
    for block, index in zip(shown, np.ndindex(2, *heads), strict=True):
        head, _, *lines = block.split("\n")
        assert head == f"{list(index)}:"
        expected = ["".join("x" if s == 0 else "." for s in row) for row in scores[index]]
        assert [line.split()[-1] for line in lines] == expected


def test_show_mask_names_arguments_that_do_not_broadcast() -> None:
    with pytest.raises(ValueError, match=r"query_offset has shape \(2,\), query_seq_lengths has shape \(3,\)"):
        cattn.show_mask(2, query_offset=[0, 1], query_seq_lengths=[1, 2, 2])


def test_masks_of_many_dimensions_as_text() -> None:
    """``numpy.broadcast_shapes`` ends at 32."""
    mask = np.tri(3, dtype=bool).reshape(*(1,) * 60, 3, 3)
    assert cattn.show_mask(3, attn_mask=mask, query_offset=[0]).endswith(cattn.show_mask(3, attn_mask=mask[(0,) * 60]))
    with pytest.raises(ValueError, match="do not broadcast to one batch"):
        cattn.show_mask(3, query_offset=np.zeros((1,) * 40 + (2,), int), query_seq_lengths=[1, 2, 3])


def test_only_the_rows_that_are_shown_are_computed() -> None:
    """The whole matrix would take 4 TB."""
    lines = cattn.show_mask(10**6, is_causal="lower_right", window_size=(2, 0)).splitlines()
    assert lines[63:] == ["query     63  61-63", "and 999936 more queries"]


@pytest.mark.parametrize("is_causal", [False, "upper_left", "lower_right"])
def test_many_queries_as_text(is_causal: Any) -> None:
    """The first rows equal the rows of the whole matrix."""
    mask = np.random.default_rng(0).random((2, 100, 90)) < 0.5
    lengths: Any = {"query_seq_lengths": [100, 30], "key_value_seq_lengths": [60, 90], "key_value_seq_starts": [0, 7]}
    offset: Any = {} if is_causal else {"query_offset": [0, 5]}
    options: Any = {"is_causal": is_causal, "window_size": (50, 9), **offset, **lengths}
    text = cattn.show_mask(100, 90, attn_mask=mask[:, None], **options)
    x = np.zeros((2, 1, 100, 1)), np.zeros((2, 1, 90, 1))
    visible = cattn.attention_weights(*x, mask[:, None], stage="mask", **options) == 0
    for block, rows in zip(text.split("\n\n"), visible[:, 0], strict=True):
        for line, row in zip(block.splitlines()[1:65], rows, strict=False):
            spans = [part.split("-") for part in line.split("  ")[-1].replace("none", "").split(", ") if part]
            seen = [j for span in spans for j in range(int(span[0]), int(span[-1]) + 1)]
            assert seen == np.flatnonzero(row).tolist()
