"""Every error of every public function: its type and message, and that the call wrote and drew nothing; warnings.

The rules are the rows of wrong_calls.py. This file has besides: errors of user code, which pass through unchanged;
wrong environment variables; arrays and arbitrary objects in the place of one number; calls that the fuzzer found.
"""

import copy
import importlib
import operator
import os
import re
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cattn
from cattn._input.names import INTEGRATIONS
from support import find
from support.processes import run_command
from support.wrong_calls import CASES, WORKING, Row, arguments_of, ones


def label(case: Any) -> str:
    if isinstance(case, Row):
        return case.wrong or "-".join(f"{name}:{type(value).__name__}" for name, value in case.changes.items())
    return str(case)


def snapshot(arguments: dict[str, Any]) -> dict[str, Any]:
    """Copy every array that a call might change."""
    copies = {}
    for name, value in arguments.items():
        fields = value if isinstance(value, cattn.AttentionOutput) else (value,)
        copies[name] = [np.array(x, copy=True) if isinstance(x, np.ndarray) else None for x in fields]
    return copies


def state_of(generator: Any) -> Any:
    return copy.deepcopy(generator.bit_generator.state) if isinstance(generator, np.random.Generator) else None


def check_that_it_is_refused(function: str, row: Row) -> None:
    arguments = arguments_of(function, row)
    before, drawn = snapshot(arguments), state_of(arguments.get("rng"))
    threads = cattn.get_num_threads()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(row.error, match=f"^{row.says}") as caught:
            find(function)(**arguments)
    # Not a subclass: that would be an exception of other code, such as NumPy's own MemoryError.
    assert caught.type is row.error
    after = snapshot(arguments)
    for name in before:
        for old, new in zip(before[name], after[name], strict=True):
            np.testing.assert_array_equal(old, new, err_msg=f"{name} was changed")
    assert state_of(arguments.get("rng")) == drawn, "the generator was drawn from"
    assert cattn.get_num_threads() == threads


@pytest.mark.promise("errors")
@pytest.mark.parametrize("function", dict(CASES))
def test_a_wrong_argument_is_refused_by_name_and_nothing_is_written(function: str, subtests: pytest.Subtests) -> None:
    for name, row in CASES:
        if name == function:
            with subtests.test(label(row)):
                check_that_it_is_refused(function, row)


@pytest.mark.parametrize("function", WORKING)
def test_the_calls_that_the_table_changes_work(function: str) -> None:
    threads = cattn.get_num_threads()
    arguments = WORKING[function]()
    result = find(function)(**arguments)
    if function == "num_threads":  # a block, which warns if it is not entered
        with result:
            assert cattn.get_num_threads() == 1
    cattn.set_num_threads(None)
    assert cattn.get_num_threads() == threads
    if "out" in arguments and "lse" not in arguments:  # of the forward pass
        assert result is arguments["out"]
    if "rng" in arguments:
        assert state_of(arguments["rng"]) != state_of(np.random.default_rng(1)), "the call did not draw"


def test_every_public_function_is_in_the_table() -> None:
    public = {name: find(name) for name in {*cattn.__all__, *cattn.functional.__all__}}
    functions = {name for name, value in public.items() if callable(value) and not isinstance(value, type)}
    without_errors = {"get_num_threads"}
    in_their_own_files = {"manual_seed", "plot_attention", "get_alibi_slopes", "merge_attention", "show_mask"}
    in_their_own_files |= {"sliding_window", "head_scores", "attention_rollout"}
    in_their_own_files |= {"view_attention", "quantize", "dequantize"}
    assert {function for function, _ in CASES} - {"num_threads"} == functions - without_errors - in_their_own_files


def test_tensors_that_numpy_cannot_read_are_refused() -> None:
    torch = pytest.importorskip("torch")

    x = torch.ones(3, 4)
    for key, says in (
        (x.to_sparse(), r"key cannot be read as an array: .*to_dense\(\)"),
        (x.bfloat16().to_sparse(), "key cannot be read as an array: "),
        (x.to("meta"), "key cannot be read as an array: .*meta"),
        (torch.complex(x, x).conj().imag, r"key cannot be read as an array: .*resolve_neg\(\)"),
    ):
        with pytest.raises(TypeError, match=says):
            cattn.scaled_dot_product_attention(x, key, x)


class Failing:
    """An object whose methods raise an error that knows no argument."""

    def _fail(self, *_: Any, **__: Any) -> Any:
        raise ZeroDivisionError("its own words")

    __array__ = __bool__ = __float__ = __index__ = _fail


@pytest.mark.parametrize("name", ["return_weights", "return_lse", "return_dropout_mask", "scale", "query"])
def test_errors_of_an_objects_methods_are_the_cause_of_one_that_names_the_argument(name: str) -> None:
    x = ones(2, 2)
    call = {"query": x, "key": x, "value": x}
    with pytest.raises(TypeError, match=f"^{name} ") as error:
        cattn.scaled_dot_product_attention(**call | {name: Failing()})
    assert str(error.value.__cause__) == "its own words"


def test_an_interrupt_in_an_objects_method_passes_through() -> None:
    class Interrupted:
        def __float__(self) -> float:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cattn.softmax(ones(2, 2), scale=Interrupted())


def test_out_is_unchanged_if_the_generator_raises() -> None:
    class Broken(np.random.Generator):
        def integers(self, *_: Any, **__: Any) -> Any:
            raise ZeroDivisionError("broken")

    x, out = ones(3, 4), np.full((3, 4), 7, np.float32)
    for call in (
        lambda g: cattn.causal_attention(x, x, x, None, 0.5, rng=g, out=out),
        lambda g: cattn.dropout(x, rng=g, out=out),
    ):
        with pytest.raises(ZeroDivisionError, match="broken"):
            call(Broken(np.random.PCG64(1)))
        assert (out == 7).all()


# ---- the environment -----------------------------------------------------------------------------------------------
UNUSABLE = [table["name"] for table in cattn.show_config("dicts")["tables"] if not table["usable"]]


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        *[("CATTN_ISA", value) for value in ("avx1024", "AVX2", "scalar ", "avx2,scalar", *UNUSABLE)],
        *[("CATTN_NUM_THREADS", value) for value in ("0", "-1", "two", "1.5", "1x", "0x2", "99999999999", "2,1", "+2")],
    ],
)
def test_a_wrong_environment_variable_is_an_import_error(variable: str, value: str) -> None:
    done = run_command(
        [sys.executable, "-c", "import cattn"],
        capture_output=True, text=True, env={**os.environ, variable: value},
    )  # fmt: skip
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: ")
    assert variable in last
    assert f"'{value}'" in last
    if variable == "CATTN_ISA":
        assert "scalar" in last.split("usable:")[1], "the message lists what this machine can run"


@pytest.mark.parametrize("variable", ["CATTN_ISA", "CATTN_NUM_THREADS"])
def test_an_empty_environment_variable_is_ignored(variable: str) -> None:
    run_command([sys.executable, "-c", "import cattn"], env={**os.environ, variable: ""}, check=True)


# ---- mistakes of newcomers -------------------------------------------------------------------------------------------
X = np.ones((4, 3), np.float32)
PACKED = np.ones((5, 1, 2), np.float32)
SEVERAL: dict[str, Callable[[], Any]] = {
    "array": lambda: np.ones(4),
    "tensor": lambda: pytest.importorskip("torch").ones(4),
    "integers": lambda: np.arange(4),
}

Call = Callable[[Any], object]
NUMBERS: dict[str, Call] = {
    "scale": lambda x: cattn.softmax(X, scale=x),
    "dropout_p": lambda x: cattn.causal_attention(X, X, X, dropout_p=x),
    "softcap": lambda x: cattn.attention_weights(X, X, softcap=x),
    "p": lambda x: cattn.dropout(X, x),
    "dropout probability": cattn.Dropout,
    "T_q": cattn.causal_mask,
    "T_k": lambda x: cattn.causal_mask(3, x),
    "total": cattn.sliding_window,
    "num_heads": cattn.get_alibi_slopes,
    "n": cattn.set_num_threads,
    "seed": cattn.TorchGenerator,
    "max_len": lambda x: cattn.KVCache(2, 2, x, 4),
    "in_features": lambda x: cattn.TorchGenerator(1).linear(x, 3),
    "axis": lambda x: cattn.softmax(X, axis=x),
    "max_seqlen_q": lambda x: cattn.varlen_attention(PACKED, PACKED, PACKED, [0, 5], [0, 5], max_seqlen_q=x),
    "window_size": lambda x: cattn.varlen_attention(PACKED, PACKED, PACKED, [0, 2, 5], [0, 3, 5], window_size=(x, 0)),
    "vmax": lambda x: cattn.plot_attention(np.eye(3), vmax=x),
}


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("kind", SEVERAL)
@pytest.mark.filterwarnings("ignore::cattn.CausalAlignmentWarning")
def test_an_array_in_the_place_of_one_number_is_refused_by_name(name: str, kind: str) -> None:
    if name == "vmax":
        pytest.importorskip("matplotlib")
    several = SEVERAL[kind]()
    with pytest.raises(TypeError, match=f"^{name} must be "):
        NUMBERS[name](several)


PROBABILITIES: list[tuple[str, Call]] = [
    ("dropout_p", lambda p: cattn.causal_attention(X, X, X, dropout_p=p)),
    ("dropout_p", lambda p: cattn.attention_backward(X, X, X, X, X, X[:, 0], dropout_p=p)),
    ("dropout_p", lambda p: cattn.attention_weights(X, X, dropout_p=p)),
    ("dropout_p", lambda p: cattn.attention_weights(X, X, dropout_p=p, stage="dropout")),
    ("p", lambda p: cattn.dropout(X, p)),
    ("p", lambda p: cattn.dropout_backward(X, p, rng=1)),
    ("p", lambda p: cattn.dropout_backward(X, p, mask=np.ones(3, bool))),
    ("p", lambda p: cattn.dropout_backward(X, p)),
    ("p", lambda p: cattn.TorchGenerator(1).dropout_mask(p, 3)),
    ("dropout probability", cattn.Dropout),
    ("dropout probability", lambda p: cattn.CausalAttention(3, 2, 4, p)),
]


@pytest.mark.parametrize(
    ("p", "error", "says"),
    [
        *[(p, TypeError, "a real number, got ") for p in (None, "0.5", b"0.5", True, np.True_, 1j, [0.5])],
        *[(p, TypeError, "a real number, got ") for p in (np.ones((2, 2)), np.zeros(3, "f4,i2"))],
        *[(p, ValueError, "in [0, 1], got ") for p in (-0.1, 1.5, -1, 2, np.float32(1.5), np.nextafter(1, 2))],
        *[(p, ValueError, "finite, got ") for p in (np.nan, -np.inf, 10**400)],
    ],
)
def test_all_probabilities_follow_one_rule(p: object, error: type[Exception], says: str) -> None:
    for name, call in PROBABILITIES:
        with pytest.raises(error, match=f"^{name} must be {re.escape(says)}"):
            call(p)


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("return_weights", lambda x: cattn.causal_attention(X, X, X, return_weights=x)),
        ("return_lse", lambda x: cattn.scaled_dot_product_attention(X, X, X, return_lse=x)),
        ("training", lambda x: cattn.dropout(X, training=x)),
        ("return_mask", lambda x: cattn.dropout(X, return_mask=x)),
    ],
)
def test_an_array_in_the_place_of_one_truth_value_is_refused_by_name(name: str, call: Call) -> None:
    for several in (np.ones(2), np.ones(0)):
        with pytest.raises(TypeError, match=f"^{name} must be True or False, got ndarray"):
            call(several)


OBJECTS: dict[str, tuple[str, Call]] = {
    "parts": ("outs must be a sequence of arrays, got object", lambda x: cattn.merge_attention(x, [X])),
    "log-sum-exps": ("lses must be a sequence of arrays, got object", lambda x: cattn.merge_attention([X], x)),
    "tokens": ("tokens must be a sequence of str, got object", lambda x: cattn.plot_attention(np.eye(3), x)),
    "titles": ("titles must be a str or a sequence", lambda x: cattn.plot_attention(np.eye(3), titles=x)),
    "dtype": (
        "dtype must be float16, bfloat16, float32, float64, int8 or float8_e4m3fn, got <object",
        lambda x: cattn.KVCache(2, 2, 2, 2, dtype=x),
    ),
    "dtype of random numbers": ("dtype must be float32 or float64", lambda x: cattn.TorchGenerator(1).rand(2, dtype=x)),
    "window": (
        "window_size must be",
        lambda x: cattn.varlen_attention(PACKED, PACKED, PACKED, [0, 2, 5], [0, 3, 5], window_size=x),
    ),
}


@pytest.mark.parametrize("what", OBJECTS)
def test_an_arbitrary_object_is_refused_by_name(what: str) -> None:
    says, call = OBJECTS[what]
    with pytest.raises(TypeError, match=f"^{says}"):
        call(object())


def test_varlen_refuses_a_wrong_is_causal_for_sequences_of_any_length() -> None:
    for edges in ([0, 2, 5], [0, 3, 5]):
        for wrong in (1, np.ones(2), "left"):
            with pytest.raises(ValueError, match=r"^is_causal must be False, True, 'upper_left' or 'lower_right'"):
                cattn.varlen_attention(PACKED, PACKED, PACKED, [0, 2, 5], edges, is_causal=wrong)


@pytest.mark.parametrize(
    "name", ["attn_mask", "query_offset", "query_seq_lengths", "key_value_seq_lengths", "key_value_seq_starts"]
)
def test_show_mask_refuses_ragged_lists_by_name(name: str) -> None:
    ragged: Any = [[1], [1, 2]]
    with pytest.raises(ValueError, match=f"^{name} cannot be read as an array"):
        cattn.show_mask(3, **{name: ragged})


@pytest.mark.parametrize("name", ["max_len", "head_dim", "num_kv_heads", "v_head_dim"])
def test_a_cache_size_that_no_array_can_have_is_refused_by_name(name: str) -> None:
    sizes = {"batch_shape": (), "num_kv_heads": 1, "max_len": 1, "head_dim": 1}
    with pytest.raises(ValueError, match=f"^{name} must be at most "):
        cattn.KVCache(**sizes | {name: 2**70})  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore::PendingDeprecationWarning")
def test_a_matrix_is_a_seed_like_any_array() -> None:
    """numpy.random.default_rng itself recurses forever into the rows of a numpy.matrix."""
    matrix = np.matrix([[1, 2]])
    for draw in (lambda rng: cattn.dropout(X, rng=rng), lambda rng: cattn.Linear(2, 2, rng=rng).weight):
        np.testing.assert_array_equal(draw(matrix), draw(np.asarray(matrix)))


def test_probabilities_may_be_read_only() -> None:
    p = np.full((2, 5), 0.5, np.float32)
    expected = cattn.TorchGenerator(1).bernoulli(p)
    p.flags.writeable = False
    np.testing.assert_array_equal(cattn.TorchGenerator(1).bernoulli(p), expected)


# ---- found by tools/fuzz binding -----------------------------------------------------------------------------------
@pytest.mark.promise("errors")
@pytest.mark.parametrize(
    ("error", "says", "call"),
    [
        (TypeError, "outs must be a sequence", lambda: cattn.merge_attention(np.array(1.0), [X])),
        (TypeError, "lses must be a sequence", lambda: cattn.merge_attention([X], np.array(1.0))),
        (TypeError, "rng must be None, an int", lambda: cattn.Linear(2, 2, rng=np.array(0.5))),  # type: ignore[arg-type]
        (TypeError, "axis must be an int", lambda: cattn.softmax_backward(X, X, ...)),  # type: ignore[arg-type]
        (ValueError, "axis 2 is out of bounds for weights", lambda: cattn.softmax_backward(X, X, 2)),
        (ValueError, "weights must have at least 1 dimension", lambda: cattn.softmax_backward(1.0, 1.0, 0)),
        (ValueError, "grad_out has shape", lambda: cattn.softmax_backward(X[0], X, 0)),
        (ValueError, "grad_out cannot be read", lambda: cattn.dropout_backward([[1], [1, 2]], rng=1)),  # type: ignore[list-item]
        (TypeError, "out must be", lambda: cattn.softmax_backward(X, X, 0, out=[[1.0], [1.0, 2.0]])),  # type: ignore[arg-type]
        (ValueError, "out has shape", lambda: cattn.softmax_backward(X, X, 0, out=X[0])),
        (ValueError, r"outs\[0\] must have at least 1", lambda: cattn.merge_attention([1.0], [1.0])),
        (ValueError, r"lses\[0\] has shape", lambda: cattn.merge_attention(memoryview(X), memoryview(X))),
        (TypeError, "p must be float32 or float64", lambda: cattn.TorchGenerator(1).bernoulli(X.astype(np.float16))),
        (ValueError, "state cannot be read", lambda: cattn.TorchGenerator(1).set_state([[1], [1, 2]])),  # type: ignore[list-item]
    ],
)
def test_arguments_that_fuzzing_found(error: type[Exception], says: str, call: Callable[[], object]) -> None:
    with pytest.raises(error, match=f"^{says}"):
        call()


@pytest.mark.parametrize("given", [{"mask": True}, {"rng": 1}])
def test_dropout_backward_names_grad_out(given: dict[str, Any]) -> None:
    for wrong in ([[1.0], [1.0, 2.0]], np.ones(3, complex), "ab"):
        with pytest.raises((TypeError, ValueError), match=r"^grad_out "):
            cattn.dropout_backward(wrong, 0.5, **given)  # type: ignore[arg-type]


def test_float16_and_bfloat16_do_not_mix() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    h, edges = np.ones((3, 1, 2), np.float16), [0, 3]
    b, lse = h.astype(ml_dtypes.bfloat16), np.ones((3, 1), np.float32)
    for call in (
        lambda: cattn.varlen_attention(h, b, h, edges, edges),
        lambda: cattn.merge_attention([h, b], [lse, lse]),
        lambda: cattn.softmax_backward(h, b),
        lambda: cattn.scaled_dot_product_attention(h, b, h),
        lambda: cattn.attention_weights(h, b, stage="dropout"),
    ):
        with pytest.raises(TypeError, match=r"mix float16 and bfloat16.*convert them to one, or to float32"):
            call()
    wide = h.astype(np.float64)
    assert cattn.varlen_attention(h, b, wide, edges, edges).dtype == np.float64


def test_sinks_beyond_float32_become_its_largest_numbers() -> None:
    """Finite numbers stay finite, as in masks, and nothing warns."""
    x = np.ones((2, 2), np.float32)
    least = np.finfo(np.float32).min
    lse = cattn.scaled_dot_product_attention(x, x, x, np.zeros((2, 2), bool), sinks=[-1e300], return_lse=True).lse
    assert (lse == least).all()
    assert np.isfinite(cattn.scaled_dot_product_attention(x, x, x, sinks=[1e300])).all()


WITH_A_COMMA = """
import locale, sys
import numpy as np
import cattn
try:
    locale.setlocale(locale.LC_NUMERIC, "de_DE.UTF-8")
except locale.Error:
    sys.exit("no such locale")
assert locale.localeconv()["decimal_point"] == ","
x = np.ones((1, 2, 2, 4), np.float32)
for call in (
    *(
        lambda slope=slope: cattn.scaled_dot_product_attention(x, x, x, alibi_slopes=np.array([slope, 1], np.float32))
        for slope in (-0.5, -0.1, -1.5e-7, -2.5e20, -np.inf)
    ),
    lambda: cattn.attention_backward(x, x, x, x, x, np.full((1, 2, 2), 2.5 + np.log(2))),
):
    try:
        call()
    except ValueError as error:
        print(error)
"""


def test_numbers_in_errors_have_a_point_in_every_locale(tmp_path: Path) -> None:
    """C's printf has the decimal sign of the locale. Few machines have one with a comma, so it is compiled here."""
    if shutil.which("localedef") is not None:
        command = ["localedef", "-i", "de_DE", "-f", "UTF-8", str(tmp_path / "de_DE.UTF-8")]
        subprocess.run(command, check=False, capture_output=True)
    own = {"LOCPATH": str(tmp_path)} if any(tmp_path.iterdir()) else {}
    run = run_command([sys.executable, "-c", WITH_A_COMMA], capture_output=True, text=True, env=os.environ | own)
    if "no such locale" in run.stderr:
        pytest.skip("no locale with a decimal comma")
    *slopes, weights = run.stdout.splitlines()
    assert [line.rpartition("got ")[2] for line in slopes] == ["-0.5", "-0.1", "-1.5e-07", "-2.5e+20", "-inf"]
    assert "the weights sum to 0.607," in weights


@pytest.mark.parametrize("rng", ["x", 1.5, b"x"])
@pytest.mark.parametrize("dropout_p", [0.0, 0.5])
def test_a_wrong_rng_is_refused_with_or_without_dropout(rng: Any, dropout_p: float) -> None:
    x = np.ones((2, 2))
    with pytest.raises(TypeError, match="rng must be None, an int"):
        cattn.scaled_dot_product_attention(x, x, x, dropout_p=dropout_p, rng=rng)


@pytest.mark.parametrize(
    ("name", "right"),
    [
        ("sdpa", "cattn.scaled_dot_product_attention"),
        ("attention", "cattn.scaled_dot_product_attention"),
        ("MultiheadAttention", "cattn.MultiHeadAttention"),
        ("diagnose", "cattn.testing.diagnose"),
        ("heatmap", "cattn.plot_attention"),
        ("gelu", "cattn.functional.gelu"),
        ("silu", "cattn.functional.silu"),
        ("LayerNorm", "cattn.functional.layer_norm"),
        ("KVcache", "cattn.KVCache"),
        ("kv_cache", "cattn.KVCache"),
        ("blockmask", "cattn.BlockMask"),
        ("scaled_dot_product_atention", "cattn.scaled_dot_product_attention"),
        ("set_num_thread", "cattn.set_num_threads"),
        ("Report", "cattn.testing.Report"),
        ("default_generator", "cattn.random.default_generator"),
    ],
)
def test_names_of_other_libraries_get_the_right_one(name: str, right: str) -> None:
    with pytest.raises(AttributeError, match=f"has no attribute '{name}': did you mean {right}?"):
        getattr(cattn, name)
    assert operator.attrgetter(right.removeprefix("cattn."))(cattn)


@pytest.mark.parametrize("module", sorted(INTEGRATIONS))
def test_names_of_integrations_are_found_from_the_package(module: str) -> None:
    pytest.importorskip(module)
    found = importlib.import_module(f"cattn.integrations.{module}")
    assert sorted(INTEGRATIONS[module].split()) == sorted(found.__all__)
    others = {"attention", "Attention", "dot_product_attention", "nn", *cattn.__all__, *cattn.functional.__all__}
    for name in {*found.__all__} - others:
        with pytest.raises(AttributeError, match=rf"did you mean cattn\.integrations\.\w+\.{name}\?$"):
            getattr(cattn, name)
    with pytest.raises(AttributeError, match=rf"did you mean cattn\.integrations\.{module}\?$"):
        getattr(cattn, module)


@pytest.mark.parametrize("module", ["functional", "nn", "testing", "random", "reference", "cache", *INTEGRATIONS])
def test_dir_lists_the_public_names_only(module: str) -> None:
    if module in INTEGRATIONS:
        pytest.importorskip(module)
        module = f"integrations.{module}"
    found = importlib.import_module(f"cattn.{module}")
    assert [name for name in dir(found) if not name.startswith("__")] == sorted(found.__all__)


CACHE = cattn.KVCache((), 1, 4, 2)
BLOCKS = cattn.BlockMask(np.eye(2, dtype=bool), 2)
EIGHT = cattn.quantize(np.ones((1, 3, 2), np.float32))
TOKENS = np.ones((1, 3, 2), np.float32)
USE_CACHE = r"KVCache: call causal_attention\(query, cache\), without value; other functions take cache.k and cache.v"
ATTEND = cattn.scaled_dot_product_attention


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: ATTEND(TOKENS, TOKENS, TOKENS, attn_mask=BLOCKS), "attn_mask must be .* got BlockMask: .*block_mask="),
        (lambda: ATTEND(TOKENS, TOKENS, TOKENS, bias=BLOCKS), "bias must be .* got BlockMask: .*block_mask="),
        (lambda: cattn.masked_softmax(TOKENS, BLOCKS), "mask must be .* got BlockMask: .*block_mask="),
        (lambda: cattn.causal_attention(TOKENS, CACHE, TOKENS), f"key must be .* got {USE_CACHE}"),
        (lambda: ATTEND(TOKENS, CACHE), f"missing 1 required .*'value', and got a {USE_CACHE}"),
        (lambda: ATTEND(TOKENS, CACHE, CACHE), f"key must be .* got {USE_CACHE}"),
        (lambda: cattn.attention_weights(TOKENS, CACHE), f"key must be .* got {USE_CACHE}"),
        (lambda: cattn.attention_statistics(TOKENS, CACHE), f"key must be .* got {USE_CACHE}"),
        (lambda: cattn.softmax(EIGHT), "x must be .* got Quantized: .*cattn.dequantize"),
        (lambda: np.asarray(EIGHT), "a Quantized is not an array: .*cattn.dequantize"),
        (lambda: TOKENS @ EIGHT, "a Quantized is not an array: .*cattn.dequantize"),
        (lambda: np.asarray(BLOCKS), "a BlockMask is not an array: .*block_mask="),
        (lambda: np.array(CACHE), f"a KVCache is not an array: {USE_CACHE.removeprefix('KVCache: ')}"),
        (
            lambda: cattn.attention_jvp(TOKENS, TOKENS, TOKENS, query_tangent=TOKENS.astype(int)),
            r"query_tangent has dtype int64, read as float64, its input float32: pass query_.*astype\('float32'\)",
        ),
        (
            lambda: cattn.attention_jvp(TOKENS, TOKENS, TOKENS, query_tangent=TOKENS.tolist()),
            r"query_tangent has dtype float64 as a list of numbers, .*: pass np.asarray\(query_tangent, 'float32'\)",
        ),
        (
            lambda: cattn.attention_backward(TOKENS.astype(int), TOKENS, TOKENS, TOKENS, TOKENS, TOKENS[..., 0]),
            "grad_out has dtype int64, read as float64, the forward pass gives float32: pass",
        ),
    ],
)
def test_objects_and_integers_in_the_wrong_place_are_told_where_they_go(call: Callable[[], object], says: str) -> None:
    with pytest.raises(TypeError, match=says):
        call()


def test_an_unknown_name_gets_no_hint() -> None:
    with pytest.raises(AttributeError, match=r"module 'cattn' has no attribute 'qwerty'$"):
        _ = cattn.qwerty
    with pytest.raises(AttributeError, match="has no attribute 'tensorflow'; it has dask, jax"):
        _ = cattn.integrations.tensorflow


@pytest.mark.parametrize(("module", "library"), [("torch", "PyTorch"), ("jax", "JAX"), ("dask", "dask")])
def test_a_missing_library_is_named_with_its_extra(module: str, library: str) -> None:
    code = f"import sys, cattn; sys.modules['{module}'] = None; cattn.integrations.{module}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert f"cattn.integrations.{module} needs {library}: pip install 'cattn[{module}]'" in done.stderr


def test_arguments_of_other_meanings_get_the_right_one() -> None:
    x = np.zeros((2, 3, 4))
    with pytest.raises(TypeError, match=r"'num_heads': heads are an axis of the arrays, \(B, num_heads, T, head_dim\)"):
        cattn.causal_attention(x, x, x, num_heads=2)  # type: ignore[call-overload]
    calls: dict[str, Callable[[], object]] = {
        r"unpack the tuple, causal_attention\(\*arrays\)$": lambda: cattn.causal_attention((x, x, x)),  # type: ignore[call-overload]
        r"unpack the list, linear_attention\(\*arrays\)$": lambda: cattn.linear_attention([x, x, x]),  # type: ignore[call-overload]
        "'out' and 'lse': out and lse are results of the forward call, with return_lse=True$": (
            lambda: cattn.attention_backward(x, x, x, x)  # type: ignore[call-arg]
        ),
        r"fork\(\) takes .*; pass \[cache\.fork\(\) for _ in range\(n\)\]": (
            lambda: cattn.KVCache((), 1, 2, 3).fork(3)  # type: ignore[call-arg]
        ),
    }
    for says, call in calls.items():
        with pytest.raises(TypeError, match=says):
            call()


def test_a_state_beyond_memory_is_named_by_its_shape() -> None:
    x = np.broadcast_to(np.float32(1), (1, 2**24))
    with pytest.raises(MemoryError, match=r"array with shape \(16777216, 16777216\) and data type float32"):
        cattn.linear_attention(x, x, x, return_state=True)


def test_the_cure_for_a_masked_key_is_a_mask_of_its_keys() -> None:
    rng = np.random.default_rng(0)
    query, value = rng.standard_normal((2, 4, 3))
    key = np.ma.masked_array(rng.standard_normal((4, 3)), [[False] * 3, [True] * 3, [False] * 3, [False] * 3])
    with pytest.raises(TypeError, match="key is a masked array") as caught:
        cattn.scaled_dot_product_attention(query, key, value)
    cure = re.search(r"attn_mask=(.*?) \(True", str(caught.value))
    assert cure is not None
    mask = eval(cure[1], {"np": np, "key": key})
    assert mask.shape == (1, 4)
    weights = cattn.attention_weights(query, key.data, mask)
    assert (weights[:, 1] == 0).all()


# ---- which calls warn, and which do not ------------------------------------------------------------------------------
INF, NAN = np.inf, np.nan


@pytest.fixture
def caught() -> Iterator[list[warnings.WarningMessage]]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        yield found


CAUSAL_CALLS: dict[str, Callable[..., Any]] = {
    "attention": lambda q, k, **c: cattn.scaled_dot_product_attention(np.ones((q, 2)), *[np.ones((k, 2))] * 2, **c),
    "weights": lambda q, k, **c: cattn.attention_weights(np.ones((q, 2)), np.ones((k, 2)), **c),
    "masked_softmax": lambda q, k, **c: cattn.masked_softmax(np.ones((q, k)), **c),
    "causal_mask": lambda q, k, **c: cattn.causal_mask(q, k, **c),
}


@pytest.mark.parametrize("name", CAUSAL_CALLS)
def test_is_causal_true_warns_if_the_lengths_differ(name: str, caught: list[warnings.WarningMessage]) -> None:
    call = CAUSAL_CALLS[name]
    for is_causal in (False, np.False_, "upper_left", "lower_right"):
        call(2, 3, is_causal=is_causal)
    call(3, 3, is_causal=True)
    call(2, 3, is_causal=True, query_offset=0)
    call(2, 3, is_causal=True, query_offset=1)
    assert caught == []
    for n, is_causal in enumerate((True, np.True_), 1):
        call(2, 3, is_causal=is_causal)
        call(3, 2, is_causal=is_causal)
        assert [w.category for w in caught] == [cattn.CausalAlignmentWarning] * 2 * n
    assert all(word in str(caught[0].message) for word in ("2 queries", "3 keys", "upper_left", "lower_right"))
    assert {w.filename for w in caught} == {__file__}, "the warning points to the caller's line"


def test_causal_attention_warns_of_queries_without_keys(caught: list[warnings.WarningMessage]) -> None:
    for q, k in ((2, 3), (3, 2), (3, 3), (1, 0)):
        if q <= k:
            cattn.causal_attention(np.ones((q, 2)), np.ones((k, 2)), np.ones((k, 2)))
        cattn.causal_attention(np.ones((q, 2)), np.ones((k, 2)), np.ones((k, 2)), query_offset=1)
    long, short = np.ones((3, 2)), np.ones((2, 2))
    cattn.causal_attention(long, short, short, query_seq_lengths=2)
    cattn.scaled_dot_product_attention(long, short, short, is_causal="lower_right")
    assert caught == []
    out = cattn.causal_attention(long, short, short)
    assert not out[0].any()
    assert "with 3 queries and 2 keys" in str(caught[0].message)
    assert "the first 1 queries see no key" in str(caught[0].message)
    assert "query_offset=-1" in str(caught[0].message)
    assert not cattn.causal_attention(long, long[:0], long[:0]).any()
    assert "there are 3 queries and no keys" in str(caught[1].message)
    assert caught[0].filename == __file__


def test_a_float_mask_of_zeros_and_ones_warns(dtype: Any, caught: list[warnings.WarningMessage]) -> None:
    q = np.ones((3, 4), dtype)
    zeros, one = np.zeros((3, 3), dtype), np.zeros((3, 3), dtype)
    one[2, 2] = 1
    two, half = one + one, one / 2
    for mask in (zeros, two, half, -one, one * NAN, np.where(one, -INF, zeros), one > 0):
        cattn.scaled_dot_product_attention(q, q, q, mask)
        cattn.scaled_dot_product_attention(q, q, q, bias=one)  # a bias is meant to be added
    cattn.scaled_dot_product_attention(q[:0], q, q, np.ones((0, 3), dtype))
    assert caught == []
    binary = [one, np.ones((3, 3), dtype), np.ones(1, dtype), np.float64(1), one.astype(np.float16), one[::-1, ::-1]]
    binary += [one.T, np.broadcast_to(one[2], (3, 3)), [[1.0, 0.0, -0.0]], np.asfortranarray(one)]
    for n, mask in enumerate(binary, 1):
        cattn.scaled_dot_product_attention(q, q, q, mask)
        assert len(caught) == n, mask
    cattn.attention_weights(q, q, one)
    cattn.causal_attention(q, q, q, one)
    assert len(caught) == len(binary) + 2
    assert {w.category for w in caught} == {UserWarning}
    assert all("attn_mask" in str(w.message) and "additive" in str(w.message) for w in caught)
    assert {w.filename for w in caught} == {__file__}, "the warning points to the caller's line"


def test_one_element_decides_whether_a_float_mask_is_binary(caught: list[warnings.WarningMessage]) -> None:
    """At every place of five dimensions: a 1 among zeros makes the mask binary, a 2 makes it an ordinary one."""
    x = np.ones((2, 3, 2, 3, 1))
    for place in np.ndindex(2, 3, 2, 3, 3):
        mask = np.zeros((2, 3, 2, 3, 3))
        mask[place] = 1
        for layout in (mask, np.asfortranarray(mask), mask[:, ::-1]):
            caught.clear()
            cattn.scaled_dot_product_attention(x, x, x, layout)
            assert len(caught) == 1
        other = 1 - mask
        other[place] = 2
        caught.clear()
        cattn.scaled_dot_product_attention(x, x, x, other)
        assert caught == []


def test_large_binary_masks_warn_too(caught: list[warnings.WarningMessage]) -> None:
    """Both ways through the search: a mask with ones is searched to its end; a mask of zeros alone does not warn."""
    mask = np.tri(1500, dtype=np.float32)
    x = np.ones((1500, 1), np.float32)
    cattn.scaled_dot_product_attention(x, x, x, mask)
    assert len(caught) == 1
    cattn.scaled_dot_product_attention(x, x, x, 0 * mask)
    assert len(caught) == 1
