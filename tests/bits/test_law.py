"""cattn.law, the order of operations in one file, has the bits of the C core for every option, and explains itself."""

import ast
import bisect
import functools
import inspect
import re
import sys
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import cattn
from cattn import law
from support import INF, NAN, ROOT, assert_same_bits, examples, in_contract, looped, quiet
from support.bit_cases import CHUNK, Normal, build
from support.calls import NUMBERS, OPERANDS, STORED, Call, Choose, Limits, attention, chooser, from_rng, one_in, seed

FILE = ROOT / "python" / "cattn" / "law.py"
# Options of attention without a parameter in the law.
LEFT_OUT = {
    "layout": "an order of axes",
    "enable_gqa": "what arrays of three axes mean: to the law the first is the heads",
    "compute_dtype": "other products, whose rounding is in the prose of docs/bit_contract.md",
    "key_scale": "the law takes the products with the numbers of the key",
    "value_scale": "the law takes the products with the numbers of the value",
}
LIMITS = Limits(
    rows=(0, 1, 2, 3, 5, 8, 17, 33),
    keys=(0, 1, 2, 7, 8, 9, 16, 17, 33, 95, 96, 97, 191, 192, 193, 385),
    widths=(0, 1, 2, 3, 8, 15, 16, 17, 33),
)
ODD = [0.0, -0.0, 1e-310, -1e-40, -1e-45, 1e-30, 1e30, -3e38, 1e300, 90.0, NAN, INF, -INF]


@pytest.fixture
def lawful(isa: str) -> str:
    """A kernel table of the bit contract."""
    if not in_contract(isa):
        pytest.skip(f"{isa} is outside the bit contract")
    return isa


# ---- attention -------------------------------------------------------------------------------------------------------
def test_the_law_has_every_option() -> None:
    assert inspect.signature(law.attention).parameters.keys() == {*OPERANDS, *NUMBERS} - LEFT_OUT.keys()


def problem(choose: Choose, long: bool = False) -> Call:
    """Choose a call; some arrays have odd numbers in a few places."""
    call, _ = attention(choose, without=LEFT_OUT, limits=LIMITS, long=long)
    for name in call.keys() & {"query", "key", "value", "bias", "gate"}:
        if one_in(choose, 5):
            rng, dtype = seed(choose), call[name].dtype
            odd = quiet(rng.choice(ODD, call[name].shape), dtype)
            call[name] = np.where(rng.random(call[name].shape) < choose((0.002, 0.1)), odd, call[name])
    return call


def by_law(call: Call) -> cattn.AttentionOutput:
    """Return the result of the law, for which a batch without heads has heads of one."""
    given = dict(call)
    if "block_mask" in call:
        given |= {"block_mask": call["block_mask"].blocks, "block_size": call["block_mask"].size}
    has_no_heads = call["query"].ndim == 3
    for name in given.keys() & {"query", "key", "value", "attn_mask", "bias", "block_mask", "key_indices", "gate"}:
        if has_no_heads and np.ndim(given[name]) > 2:
            given[name] = given[name][:, None]
    results = law.attention(**given)
    return cattn.AttentionOutput(*(a[:, 0] if has_no_heads else a for a in results))


def check(call: Call, expected: cattn.AttentionOutput, what: str = "") -> None:
    result = cattn.scaled_dot_product_attention(**call, return_weights=True, return_lse=np.float64)
    assert_same_bits(result, expected, what)


@functools.cache  # for all tables
def numbered(number: int) -> tuple[Call, cattn.AttentionOutput]:
    call = problem(from_rng(np.random.default_rng(number)), long=number >= 50)
    return call, by_law(call)


@pytest.mark.promise("law")
@pytest.mark.parametrize("first", [0, *(pytest.param(n, marks=pytest.mark.long) for n in range(50, 500, 50))])
def test_random_problems_have_the_bits_of_the_law(first: int, lawful: str) -> None:
    drawn = {"block_size"}  # a part of the block mask
    for number in range(first, first + 50):
        call, expected = numbered(number)
        check(call, expected, f"problem {number}")
        drawn |= call.keys()
    assert drawn == inspect.signature(law.attention).parameters.keys(), "some problem has each option"


@given(st.data())
@examples(20, 500)
def test_drawn_problems_have_the_bits_of_the_law(lawful: str, data: st.DataObject) -> None:
    call = problem(chooser(data.draw))
    check(call, by_law(call))


CASES = ["values that overflow", "scores that overflow, masked", "scores -inf", "subnormal values", "keys -0"]
CASES += ["results that underflow", "NaN in a masked bias", "NaN in a visible bias", "inf in a value"]
CASES += ["some rows finfo.min", "all hidden by -inf", "slopes far away", "dropout of all"]
CASES += ["softcap of scores that overflow", "sparse block mask"]


def ten_queries(name: str, dtype: type) -> Call:
    """Return a call of bit_cases.py with fewer queries, because NumPy is slow."""
    call = build(name, dtype)
    rows = call["query"].shape[-2]
    for array in call.keys() & {"query", "attn_mask", "bias"}:
        call[array] = call[array][..., :10, :] if call[array].shape[-2:-1] == (rows,) else call[array]
    if "block_mask" in call:
        blocks, size = call["block_mask"]
        call["block_mask"] = cattn.BlockMask(blocks[..., : -(-10 // size), :], size)
    return call


@looped("name", CASES)
def test_special_numbers_have_the_bits_of_the_law(name: str, lawful: str, dtype: type) -> None:
    call = ten_queries(name, dtype)
    check(call, by_law(call), name)


def test_outputs_that_dropout_takes_beyond_the_largest_number_have_the_bits_of_the_law(
    lawful: str, dtype: type, normal: Normal
) -> None:
    query, key = normal(20, 4, dtype=dtype), normal(40, 4, dtype=dtype)
    call: Call = {"query": query, "key": key, "value": np.full((40, 3), 0.9 * np.finfo(dtype).max, dtype)}
    expected = by_law(call | {"dropout_p": 0.5, "rng": 3})
    assert 0 < np.isinf(expected.out).mean() < 1
    check(call | {"dropout_p": 0.5, "rng": 3}, expected)
    check(call, by_law(call))


def test_rare_mixes_of_options_have_the_bits_of_the_law(lawful: str, dtype: type, normal: Normal) -> None:
    """Finite biases whose sum is -inf, and dropout beside a sink above all scores."""
    call: Call = {
        "query": normal(30, 4, dtype=dtype),
        "key": normal(40, 4, dtype=dtype),
        "value": normal(40, 3, dtype=dtype),
    }
    least = np.where(normal(30, 1) < 0, np.finfo(dtype).min, dtype(0))
    for options in ({"attn_mask": least, "bias": least}, {"sinks": [7.3], "dropout_p": 0.1, "rng": 3}):
        check(call | options, by_law(call | options), ", ".join(options))


def test_weights_around_the_smallest_normal_number_have_the_bits_of_the_law(lawful: str, dtype: type) -> None:
    one, least = np.ones((1, 1), dtype), law.NUMBERS[dtype][1]
    for score in (np.nextafter(least, dtype(-INF)), least, np.nextafter(least, dtype(0))):
        call: Call = {
            "query": one,
            "key": np.array([[0], [score]], dtype),
            "value": np.eye(2, dtype=dtype),
            "scale": 1.0,
        }
        check(call, by_law(call), str(score))


def test_an_infinite_value_of_the_least_weight_has_the_bits_of_the_law(lawful: str, dtype: type) -> None:
    key, value = np.array([[80 if dtype is np.float32 else 705], [0]], dtype), np.array([[1], [INF]], dtype)
    call: Call = {"query": np.ones((1, 1), dtype), "key": key, "value": value, "scale": 1.0}
    expected = by_law(call)
    assert expected.out == INF
    check(call, expected)


def test_chunks_of_keys_have_the_bits_of_the_law(lawful: str, dtype: type, normal: Normal) -> None:
    """Of three chunks and their beginnings and ends."""
    for n, options in ((3 * CHUNK - 200, {}), (CHUNK + 1, {"is_causal": "lower_right", "window_size": (1300, 0)})):
        query, key, value = (normal(*shape, dtype=dtype) for shape in ((3, 6), (n, 6), (n, 9)))
        call: Call = {"query": 2 * query, "key": key, "value": value, **options}
        check(call, by_law(call), f"{n} keys")


@pytest.mark.parametrize("width", [0, 5, 17])
def test_scores_have_the_bits_of_the_law(width: int, lawful: str, dtype: type, normal: Normal) -> None:
    """Also the sign of a zero, of products that underflow; no weight shows it."""
    query, key = normal(3, width, dtype=dtype), normal(200, width, dtype=dtype)
    small = dtype(np.finfo(dtype).tiny ** 0.9)
    for cap, slope, size in ((3.0, 0.3, 1), (0.0, 0.0, small), (3.0, -1, small), (0.0, -1, small)):
        options: Call = {"scale": -0.7, "softcap": cap, "query_offset": 90, "stage": "bias"}
        options |= {"alibi_slopes": [slope]} if slope >= 0 else {}
        for q in (size * query, size * abs(query)):
            right = law.score(q, size * abs(key), *map(dtype, (-0.7, cap, slope)), np.arange(3)[:, None] + 90)
            assert_same_bits(cattn.attention_weights(q, size * abs(key), **options), right, f"{cap} {slope} {size}")


def test_dropout_has_the_bits_of_the_law_where_its_first_draw_is_a_tie(lawful: str) -> None:
    query, key = np.zeros((2, 300, 1), np.float32), np.zeros((2, 1000, 1), np.float32)
    options: Call = {"dropout_p": 0.4, "rng": 2**63 + 5, "query_offset": 2**32 - 7, "return_dropout_mask": True}
    mask = cattn.scaled_dot_product_attention(query, key, key, **options).dropout_mask
    position = np.arange(300)[:, None] + options["query_offset"]
    for entry in (0, 1):
        assert_same_bits(mask[entry], law.keeps(1 - 0.4, options["rng"], entry, 0, position, 1000))


def test_the_least_probability_that_keeps_a_weight_is_the_one_of_the_law(lawful: str) -> None:
    one = np.ones((1, 1), np.float32)

    def is_kept(threshold: int) -> bool:
        options: Call = {"dropout_p": 1 - threshold / 2**32, "rng": 5, "return_dropout_mask": True}
        return bool(cattn.scaled_dot_product_attention(one, one, one, **options).dropout_mask)

    least = bisect.bisect_left(range(1, 2**32), True, key=is_kept) + 1
    assert [bool(law.keeps(n / 2**32, 5, 0, 0, np.zeros((1, 1), int), 1)) for n in (least - 1, least)] == [False, True]


# ---- the other functions ---------------------------------------------------------------------------------------------
@looped("n", [0, 1, 7, 8, 9, 100, 511, 512, 513, 1100])
def test_softmax_has_the_bits_of_the_law(n: int, lawful: str, rng: np.random.Generator) -> None:
    for stored in STORED:
        x = rng.standard_normal((6, n)) * np.array([1, 20, 300, 1, 1, 1])[:, None]
        x[4:] = np.where(rng.random((2, n)) < 0.01, rng.choice(ODD, (2, n)), x[4:])
        x, mask = quiet(x, stored), rng.random((6, n)) < [[0.5], [1], [0.9], [0], [0.1], [0.9]]
        assert_same_bits(cattn.masked_softmax(x, mask), law.softmax(x, mask), str(stored))
        assert_same_bits(cattn.softmax(x), law.softmax(x), str(stored))


@pytest.mark.parametrize("stored", STORED)
def test_linear_attention_has_the_bits_of_the_law(stored: Any, lawful: str, rng: np.random.Generator) -> None:
    wide = np.float64 if stored is np.float64 else np.float32
    for kind in range(8):
        H, D = rng.choice([0, 1, 3, 16, 17, 40]), rng.choice([1, 3, 20])
        query, key, value = (rng.standard_normal((1, 5, n)).astype(stored) for n in (H, H, D))
        options = {"decay": [-3.0, 90.0][kind // 4] * rng.standard_normal([(1, 5, H), (1, 5)][kind % 2]).astype(wide)}
        options |= {"beta": rng.random((1, 5)).astype(wide)} if kind // 2 % 2 else {}
        first = rng.standard_normal((1, H, D)).astype(wide)
        result = cattn.linear_attention(query, key, value, state=first, return_state=True, scale=0.3, **options)
        state = first[0]
        for t in range(5):
            of_token = {name: a[0, t] for name, a in options.items()}
            out, state = law.linear_attention_step(query[0, t], key[0, t], value[0, t], state, scale=0.3, **of_token)
            assert_same_bits(result.out[0, t], out, f"kind {kind}, token {t}")
        assert_same_bits(result.state[0], state, f"kind {kind}")


def test_an_fma_is_rounded_once_to_nearest_even(dtype: type, rng: np.random.Generator) -> None:
    """Of numbers of any exponent, and of sums near a tie, near the subnormal numbers and near the largest."""
    width, info = np.dtype(dtype).itemsize, np.finfo(dtype)
    a, b, c = rng.integers(0, 256, (3, 400 * width)).astype(np.uint8).view(dtype).reshape(3, -1)
    with np.errstate(all="ignore"):
        c[:200] = -a[:200] * b[:200] * rng.choice([1, 1 + info.eps, 0.5, info.eps], 200).astype(dtype)
        a[200:250], b[200:250], c[200:250] = 1 + info.eps, info.tiny * (1 + info.eps), -info.tiny
        got = law.fma(a, b, c)
        up, down = np.nextafter(got, dtype(INF)), np.nextafter(got, dtype(-INF))
    for x, y, z, found, *sides in zip(*map(np.ndarray.tolist, (a, b, c, got, up, down)), strict=True):
        if not np.isfinite([x, y, z, found, *sides]).all():
            continue
        exact = Fraction(x) * Fraction(y) + Fraction(z)
        error, others = abs(exact - Fraction(found)), [abs(exact - Fraction(side)) for side in sides]
        is_even = int(dtype(found).view(f"u{width}")) % 2 == 0
        assert error < min(others) or (error == min(others) and is_even), (x, y, z)


# ---- the file and its page -------------------------------------------------------------------------------------------
def test_the_law_needs_numpy_alone_and_is_short() -> None:
    text = FILE.read_text("utf-8")
    nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, (ast.Import, ast.ImportFrom))]
    names = {alias.name for node in nodes for alias in node.names if isinstance(node, ast.Import)}
    names |= {str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)}
    assert "numpy" in names
    assert names - {"numpy"} <= sys.stdlib_module_names
    assert not any(isinstance(node, ast.ImportFrom) and node.level for node in nodes)
    assert len(text.splitlines()) <= 300


def test_the_page_shows_every_section_of_the_law() -> None:
    page = (ROOT / "docs" / "bit_contract.md").read_text("utf-8")
    sections = re.findall(r"^# ---- (\w[\w ]*)", FILE.read_text("utf-8"), re.MULTILINE)
    shown = re.findall(r'law\.py\n:start-after: "# ---- ([\w ]+)"\n(:end-before: "# ----"\n)?:language', page)
    assert len(sections) > 5
    assert shown == [(name, ':end-before: "# ----"\n') for name in sections[:-1]] + [(sections[-1], "")]
