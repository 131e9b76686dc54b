"""Every error of every public function: its type and message, and that the call wrote and drew nothing before it.

The calls come from wrong_calls.py. This file also tests errors of user code, which pass through unchanged, and
wrong environment variables.
"""

import copy
import os
import sys
import warnings
from typing import Any

import numpy as np
import pytest

import cattn
from support import find
from support.processes import run_command
from support.wrong_calls import CASES, WORKING, Row, ones


def label(case: Any) -> str:
    if isinstance(case, Row):
        return "-".join(f"{name}:{type(value).__name__}" for name, value in case.changes.items())
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


@pytest.mark.promise("errors")
@pytest.mark.parametrize(("function", "row"), CASES, ids=label)
def test_a_wrong_argument_is_refused_by_name_and_nothing_is_written(function: str, row: Row) -> None:
    arguments = {**WORKING[function](), **row.changes}
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
    if "out" in arguments:
        assert result is arguments["out"]
    if "rng" in arguments:
        assert state_of(arguments["rng"]) != state_of(np.random.default_rng(1)), "the call did not draw"


def test_every_public_function_is_in_the_table() -> None:
    public = {name: find(name) for name in {*cattn.__all__, *cattn.functional.__all__}}
    functions = {name for name, value in public.items() if callable(value) and not isinstance(value, type)}
    without_errors = {"get_num_threads"}
    in_their_own_files = {"manual_seed", "plot_attention", "get_alibi_slopes", "merge_attention", "show_mask"}
    in_their_own_files |= {"sliding_window", "varlen_attention", "explain", "head_scores", "attention_rollout"}
    in_their_own_files |= {"attention_statistics", "varlen_attention_statistics", "view_attention"}
    in_their_own_files |= {"attention_backward", "varlen_attention_backward", "softmax_backward", "dropout_backward"}
    in_their_own_files |= {"attention_jvp", "attention_jvp_backward"}
    in_their_own_files |= {"rms_norm_backward", "layer_norm_backward", "gelu_backward", "silu_backward"}
    in_their_own_files |= {"quantize", "dequantize", "linear", "linear_backward"}
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
