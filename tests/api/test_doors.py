"""Every function that computes attention has each option of attention, or refuses it with a reason.

The truth is the table of arguments in C. An option that is added to it must be added to every function, or to the list
of refusals of that function in cattn._input.doors.
"""

import argparse
import importlib
import inspect
import os
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest

import cattn
from cattn import _cattn
from cattn._cli import attend
from cattn._input.doors import DOORS, Door
from support import find

OPTIONS = _cattn._arguments("scaled_dot_product_attention")
INTEGRATIONS = {
    "torch": "scaled_dot_product_attention",
    "jax": "dot_product_attention",
    "dask": "attention",
    "keras": "_attention",
    "onnx": "attention",
}
X = np.ones((2, 3, 4))


def of_the_command_line() -> list[str]:
    parser = argparse.ArgumentParser()
    attend.add_arguments(parser)
    return [action.dest for action in parser._actions]


def parameters(door: str) -> list[str]:
    """The names of what a function, or the command, can be given."""
    if door == "attend":
        return of_the_command_line()
    if door not in INTEGRATIONS:
        return list(inspect.signature(find(door)).parameters)
    if door == "keras":
        os.environ.setdefault("KERAS_BACKEND", "numpy")
        pytest.importorskip("jax")  # the NumPy backend of Keras imports it
    pytest.importorskip(door)
    function = getattr(importlib.import_module(f"cattn.integrations.{door}"), INTEGRATIONS[door])
    return list(inspect.signature(function).parameters)


def differences(options: Iterable[str], given: Iterable[str], door: Door) -> dict[str, list[str]]:
    """What is wrong with a door; nothing if each option is one parameter or one refusal, and nothing else is."""
    parameters, own = set(given), set(door.own.split())
    spelled = {name: door.spelled.get(name, name) for name in options}
    lists = {
        "neither a parameter nor refused": [o for o, p in spelled.items() if p not in parameters | door.refused.keys()],
        "a parameter, and refused": [
            option for option in spelled.keys() & door.refused if (spelled[option] in parameters) != door.has_refused
        ],
        "refused, but no option": [o for o in door.refused if o not in spelled],
        "spelled, but no option": [o for o in door.spelled if o not in spelled],
        "an option, and the door's own": sorted(own & spelled.keys()),
        "the door's own, but no parameter": sorted(own - parameters),
        "neither an option nor the door's own": sorted(parameters - own - set(spelled.values())),
        "refused without a reason": [o for o, reason in door.refused.items() if not reason.strip()],
    }
    return {what: names for what, names in lists.items() if names}


def test_the_public_functions_are_the_table_in_c() -> None:
    """scaled_dot_product_attention has all of it, in its order, and so has the reference."""
    for module in (cattn, cattn.reference):
        assert list(OPTIONS) == list(inspect.signature(module.scaled_dot_product_attention).parameters)
    with pytest.raises(ValueError, match="no body in C for a function nothing"):
        _cattn._arguments("nothing")


@pytest.mark.parametrize("door", DOORS)
def test_every_option_is_a_parameter_or_refused(door: str) -> None:
    assert differences(OPTIONS, parameters(door), DOORS[door]) == {}


@pytest.mark.parametrize("door", [name for name in DOORS if hasattr(cattn, name)])
def test_the_parameters_of_a_door_are_in_its_table_in_c(door: str) -> None:
    table = _cattn._arguments(door)
    assert table[: len(OPTIONS)] == OPTIONS
    assert set(table[len(OPTIONS) :]) == set(DOORS[door].own.split())


@pytest.mark.parametrize(
    ("call", "door"),
    {
        "DENSE": "scaled_dot_product_attention", "PACKED": "varlen_attention", "STATISTICS": "attention_statistics",
        "XLA": "jax",
    }.items(),
)  # fmt: skip
def test_a_kind_of_call_has_the_arrays_that_its_door_takes(call: str, door: str) -> None:
    given = parameters(door)
    spelled = DOORS[door].spelled if door in DOORS else {}
    rows = [(name, calls) for name, _, kind, _, calls in _cattn._operands() if kind != "SCALES"]
    assert {name: spelled.get(name, name) in given for name, _ in rows} == {name: call in calls for name, calls in rows}


def test_scales_are_in_the_calls_of_their_arrays() -> None:
    calls = {name: calls for name, *_, calls in _cattn._operands()}
    assert {f"{name}_scale": calls[name] for name in ("key", "value")} == {
        name: calls[name] for name, _, kind, *_ in _cattn._operands() if kind == "SCALES"
    }


def test_the_table_of_options_has_every_argument_of_attention() -> None:
    rows = [row[0] for row in (*_cattn._operands(), *_cattn._numbers())]
    assert set(OPTIONS) - set(rows) == {"return_weights", "return_lse", "return_dropout_mask", "out"}
    assert len(rows) == len(set(rows))


@pytest.mark.parametrize("door", DOORS)
def test_a_new_option_of_one_door_only_is_found(door: str) -> None:
    given, new = parameters(door), "score_shift"
    assert differences([*OPTIONS, new], given, DOORS[door]) == {"neither a parameter nor refused": [new]}
    assert differences(OPTIONS, [*given, new], DOORS[door]) == {"neither an option nor the door's own": [new]}
    assert differences([*OPTIONS, new], [*given, new], DOORS[door]) == {}


def test_there_is_no_other_door() -> None:
    """Functions of cattn that take a query, but the viewer, which multiplies it only; and integrations that have a
    function for it."""
    public = {name for name in cattn.__all__ if callable(find(name)) and not isinstance(find(name), type)}
    takes_queries = {name for name in public if "query" in inspect.signature(find(name)).parameters} - {
        "view_attention"
    }
    assert takes_queries == {name for name in DOORS if name in public} | {"scaled_dot_product_attention"}
    assert DOORS.keys() - public == {*INTEGRATIONS, "attend"}


@pytest.mark.parametrize("door", [name for name in DOORS if hasattr(cattn, name)] + ["jax", "torch"])
def test_the_error_for_a_refused_option_says_why(door: str) -> None:
    function: Any
    if door in INTEGRATIONS:
        pytest.importorskip(door)
        function = getattr(importlib.import_module(f"cattn.integrations.{door}"), INTEGRATIONS[door])
    else:
        function = find(door)
    required = [p.name for p in inspect.signature(function).parameters.values() if p.default is p.empty]
    for option, reason in DOORS[door].refused.items():
        with pytest.raises(TypeError) as error:
            function(**dict.fromkeys(required, X), **{option: X})
        assert str(error.value).endswith(f"an unexpected keyword argument '{option}': {reason}")
