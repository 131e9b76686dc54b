"""The vectors of python/cattn/testing/vectors.json: every door gives their bits, and finds a bit that is flipped."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from cattn import _cattn, law
from cattn._input.doors import DOORS
from cattn.testing import _vectors
from support import as_tuple, table, without
from support.laws import SAME_BITS
from support.vectors import (
    ATTENTION,
    MOST_BYTES,
    Results,
    Vector,
    assert_every_flipped_bit_is_found,
    call_of,
    differing,
    named,
    of_numpy,
    problems,
    text,
)

VECTORS = _vectors.read()["vectors"]
Reader = Callable[[Vector, str], Results]
# Vectors that a door leaves out although it has their options.
NOT_OF_JAX = {"dropout_p": "a key of JAX gives the seed", "enable_gqa": DOORS["jax"].refused["enable_gqa"]}


@pytest.fixture(autouse=True)
def table_in_the_contract() -> Iterator[None]:
    with table(SAME_BITS[0]):
        yield


def lacks(door: str, vector: Vector) -> str:
    """Return why a door leaves a vector out, or ""."""
    given = {*vector["arrays"], *vector["options"]}
    if door == "law":
        others = given - OF_LAW.get(vector["function"], set())
        return ", ".join(others) + ("PyTorch's generator" if isinstance(vector["options"].get("rng"), dict) else "")
    name = "dot_product_attention" if (door, vector["function"]) == ("jax", ATTENTION) else vector["function"]
    function = getattr(importlib.import_module(f"cattn.integrations.{door}"), name, None)
    if function is None:
        return f"cattn.integrations.{door} has no {name}"
    given -= {"key_scale", "value_scale", "block_size"}  # parts of others
    others = dict(NOT_OF_JAX) if door == "jax" else {}
    if isinstance(vector["options"].get("rng"), dict):
        others["rng"] = "from a generator of PyTorch one number is drawn, the seed of cattn's own bits"
    taken = {*inspect.signature(function).parameters}
    refused = {name: others.get(name) or DOORS[door].why_refused(name) for name in given
               if name in others or DOORS[door].spelled.get(name, name) not in taken}  # fmt: skip
    assert all(refused.values()), f"the table of doors has no reason for {refused}"
    return next(iter(refused.values()), "")


def of_torch(vector: Vector, dtype: str) -> Results:
    import torch

    bridge = importlib.import_module("cattn.integrations.torch")
    call = call_of(vector, dtype, None, as_tuple, as_tuple)
    tensors = {name: each_array(torch.from_numpy, x) for name, x in call.items()}
    return named(getattr(bridge, vector["function"])(**tensors))


def of_jax(vector: Vector, dtype: str) -> Results:
    import jax

    bridge = importlib.import_module("cattn.integrations.jax")
    call = call_of(vector, dtype, None, as_tuple, as_tuple)
    call = {DOORS["jax"].spelled.get(name, name): x for name, x in call.items() if name not in DOORS["jax"].refused}
    for name in ("query", "key", "value", "gate"):
        call |= {name: each_array(lambda x: x.swapaxes(1, 2), call[name])} if name in call else {}
    if call.get("mask", np.True_).dtype != bool:
        call["bias"] = call.pop("mask")
    with jax.enable_x64(dtype == "float64"):
        call = {name: each_array(jax.numpy.asarray, x) for name, x in call.items()}
        out, lse = bridge.dot_product_attention(**call)
        return {"out": np.asarray(out).swapaxes(1, 2), "lse": np.asarray(lse).swapaxes(1, 2)}


def each_array(change: Callable[[Any], Any], given: Any) -> Any:
    """Change an array, or the arrays of a tuple."""
    if isinstance(given, tuple):
        return tuple(each_array(change, x) for x in given)
    return change(given) if isinstance(given, np.ndarray) else given


def of_law(vector: Vector, dtype: str) -> Results:
    call = without(_vectors.arguments(vector, dtype), "enable_gqa")  # groups follow from the shapes
    if vector["function"] == "linear_attention":
        return steps(**call)
    if vector["function"] != ATTENTION:
        return {"out": law.softmax(*call.values())}
    out, weights, lse = law.attention(**call)
    return {"out": out, "weights": weights, "lse": lse.astype(dtype)}


def steps(
    query: Any, key: Any, value: Any, state: Any = 0, decay: Any = 0.0, beta: Any = None, scale: Any = None
) -> Results:
    """Take the tokens of each sequence and head one by one."""
    batch, heads, tokens, width = query.shape
    out, final = np.empty_like(value), np.zeros((batch, heads, width, value.shape[-1]), query.dtype) + state
    for at in np.ndindex(batch, heads):
        for t in range(tokens):
            here = (*at, t)
            factor = decay[here] if np.ndim(decay) else decay
            out[here], final[at] = law.linear_attention_step(
                query[here], key[here], value[here], final[at], factor, beta[here], scale
            )
    return {"out": out, "state": final}


READERS: dict[str, Reader] = {"torch": of_torch, "jax": of_jax, "law": of_law}
# The functions that the law has, and the options that they take.
OF_LAW = {
    ATTENTION: {*inspect.signature(law.attention).parameters, "enable_gqa"},
    "softmax": {"x"},
    "masked_softmax": {"scores", "mask"},
    "linear_attention": {*inspect.signature(steps).parameters},
}


def read_by(door: str) -> list[Vector]:
    return [vector for vector in VECTORS if not lacks(door, vector)]


def remembered(read: Reader, vectors: list[Vector]) -> Reader:
    """Return a reader that has computed the vectors once."""
    known = {(vector["name"], dtype): read(vector, dtype) for vector, dtype in problems(vectors)}
    return lambda vector, dtype: known[vector["name"], dtype]


@pytest.mark.parametrize("isa", SAME_BITS)
def test_functions_of_numpy(isa: str) -> None:
    with table(isa):
        assert differing(VECTORS, of_numpy) == []
        assert_every_flipped_bit_is_found(VECTORS, remembered(of_numpy, VECTORS))


@pytest.mark.parametrize(
    ("door", "least"), [("torch", 35), pytest.param("jax", 24, marks=pytest.mark.thorough), ("law", 31)]
)
def test_doors(door: str, least: int) -> None:
    if door != "law":
        pytest.importorskip(door)
    vectors = read_by(door)
    assert len(vectors) >= least
    read = remembered(READERS[door], vectors)
    assert differing(vectors, read) == []
    assert_every_flipped_bit_is_found(vectors, read)


# ---- the file --------------------------------------------------------------------------------------------------------
def test_the_file_is_what_its_tool_writes() -> None:
    stored = _vectors.FILE.read_text("utf-8")
    assert text() == stored, "cd tests && python -m support.vectors --write"
    assert len(stored.encode()) <= MOST_BYTES
    assert len({vector["name"] for vector in VECTORS}) == len(VECTORS)


def test_every_option_of_attention_has_a_vector() -> None:
    of_attention = [vector for vector in VECTORS if vector["function"] == ATTENTION]
    given = {name for vector in of_attention for name in (*vector["arrays"], *vector["options"])}
    assert given == {row[0] for row in (*_cattn._operands(), *_cattn._numbers())}
