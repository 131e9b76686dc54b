"""cattn.law, the order of operations in one file, has the bits of the C core for every option, and explains itself."""

import functools
import inspect
import re
import sys
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
KEYS = (0, 1, 2, 7, 8, 9, 16, 17, 33, 95, 96, 97, 191, 192, 193, 385)
LIMITS = Limits((0, 1, 2, 3, 5, 8, 17, 33), KEYS, (0, 1, 2, 3, 8, 15, 16, 17, 33))
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
    for number in range(first, first + 50):
        call, expected = numbered(number)
        check(call, expected, f"problem {number}")


@given(st.data())
@examples(20, 500)
def test_drawn_problems_have_the_bits_of_the_law(lawful: str, data: st.DataObject) -> None:
    call = problem(chooser(data.draw))
    check(call, by_law(call))


CASES = ["values that overflow", "scores that overflow, masked", "scores -inf", "subnormal values", "keys -0"]
CASES += ["results that underflow", "NaN in a visible bias", "inf in a value", "some rows finfo.min", "slopes far away"]
CASES += ["all hidden by -inf", "dropout of all", "softcap of scores that overflow"]


@looped("name", CASES)
def test_special_numbers_have_the_bits_of_the_law(name: str, lawful: str, dtype: type) -> None:
    call = build(name, dtype)  # ten of its queries, because NumPy is slow
    call |= {array: call[array][..., :10, :] for array in call.keys() & {"query", "attn_mask", "bias"}}
    check(call, by_law(call), name)


def test_rare_numbers_have_the_bits_of_the_law(lawful: str, dtype: type, normal: Normal) -> None:
    """Finite biases whose sum is -inf, outputs that overflow, the smallest weights and gates, chunks, holes."""
    plain = {name: normal(n, 4, dtype=dtype) for name, n in (("query", 30), ("key", 40), ("value", 40))}
    rows, dropout = np.where(normal(30, 1) < 0, np.finfo(dtype).min, dtype(0)), {"dropout_p": 0.55, "rng": 3}
    huge = {"value": np.full((40, 3), 0.9 * np.finfo(dtype).max, dtype)}
    calls: list[Call] = [plain | {"attn_mask": rows, "bias": rows}, plain | dropout | {"sinks": [7.3]}]
    calls += [plain | huge, plain | huge | dropout, plain | {"gate": np.linspace(-800, 100, 30, dtype=dtype)[:, None]}]
    calls.append(plain | {"key_indices": [[3, -1, 39]]})
    least, value = law.NUMBERS[dtype][1], np.array([[1], [INF]], dtype)
    for score in (np.nextafter(least, dtype(-INF)), least, np.nextafter(least, dtype(0))):
        key = np.array([[0], [score]], dtype)
        calls.append({"query": np.ones((1, 1), dtype), "key": key, "value": value, "scale": 1.0})
    for n, options in ((3 * CHUNK - 200, {}), (CHUNK + 1, {"is_causal": "lower_right", "window_size": (1300, 0)})):
        key, value = normal(n, 6, dtype=dtype), normal(n, 9, dtype=dtype)
        calls.append({"query": 2 * normal(3, 6, dtype=dtype), "key": key, "value": value, **options})
    for call in calls:
        check(call, by_law(call), ", ".join(call))


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


def test_the_least_probability_that_keeps_a_weight_is_the_one_of_the_law(lawful: str) -> None:
    """It needs the second draw."""
    one, position = np.ones((1, 1), np.float32), np.zeros((1, 1), int)
    for n, kept in ((0x681D8F7E, False), (0x681D8F7F, True)):
        options: Call = {"dropout_p": 1 - n / 2**32, "rng": 5, "return_dropout_mask": True}
        assert cattn.scaled_dot_product_attention(one, one, one, **options).dropout_mask == kept
        assert law.keeps(n / 2**32, 5, 0, 0, position, 1) == kept


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
        state = rng.standard_normal((H, D)).astype(wide)
        result = cattn.linear_attention(query, key, value, state=state[None], return_state=True, scale=0.3, **options)
        for t in range(5):
            of_token = {name: a[0, t] for name, a in options.items()}
            out, state = law.linear_attention_step(query[0, t], key[0, t], value[0, t], state, scale=0.3, **of_token)
            assert_same_bits(result.out[0, t], out, f"kind {kind}, token {t}")
        assert_same_bits(result.state[0], state, f"kind {kind}")


# ---- the file and its page -------------------------------------------------------------------------------------------
def test_the_law_needs_numpy_alone_and_is_short() -> None:
    names = set(re.findall(r"^\s*(?:from|import) ([\w.]+)", FILE.read_text("utf-8"), re.MULTILINE))
    assert names - sys.stdlib_module_names == {"numpy"}
    assert len(FILE.read_text("utf-8").splitlines()) <= 300


def test_the_page_shows_every_section_of_the_law() -> None:
    page = (ROOT / "docs" / "bit_contract.md").read_text("utf-8")
    sections = re.findall(r"^# ---- (\w[\w ]*)", FILE.read_text("utf-8"), re.MULTILINE)
    shown = re.findall(r'law\.py\n:start-after: "# ---- ([\w ]+)"\n(:end-before: "# ----"\n)?```', page)
    assert shown == [(name, ':end-before: "# ----"\n') for name in sections[:-1]] + [(sections[-1], "")]
