"""Tangents of attention: a call with its direction, its derivative and second derivatives, and the right ones."""

from __future__ import annotations

from typing import Any

import numpy as np

import cattn
from cattn import reference
from support.gradients import FIELDS, Call, arguments

TANGENTS = [f"{name}_tangent" for name in FIELDS]


def direction(call: Call, seed: int = 2, names: Any = FIELDS) -> Call:
    """Return random tangents of the inputs, each with the shape and type of its input."""
    rng = np.random.default_rng(seed)
    found = {name: np.asarray(a) for name, a in arguments(call).items()}
    own = {name: rng.standard_normal(a.shape).astype(a.dtype) for name, a in found.items()}
    return {f"{name}_tangent": own[name] for name in own if name in names}


def derive(call: Call, tangents: Call, **more: Any) -> cattn.AttentionTangents:
    return cattn.attention_jvp(**call, **tangents, return_lse=True, **more)


def results_of(result: cattn.AttentionTangents) -> Call:
    return dict(zip(result._fields, result, strict=True))


def second(call: Call, tangents: Call, seed: int = 3, **more: Any) -> cattn.AttentionGradients:
    """Return the gradients of a random function of the derivatives."""
    result = cattn.attention_jvp(**call, **tangents, return_lse=np.float64)
    given = cotangents(result, seed)
    return cattn.attention_jvp_backward(**given, **call, **tangents, **results_of(result), **more)


def cotangents(result: Any, seed: int = 3) -> Call:
    rng = np.random.default_rng(seed)
    grad_out = rng.standard_normal(result.out.shape).astype(result.out.dtype)
    return {"grad_out_tangent": grad_out, "grad_lse_tangent": rng.standard_normal(result.lse.shape)}


def check_tangents(call: Call, tangents: Call, rtol: float) -> None:
    """Assert that the reference agrees, up to rtol times the largest number of each array."""
    actual = derive(call, tangents)
    expected = reference.attention_jvp(**call, **tangents, return_lse=True)
    _compare(actual, expected, rtol, call)
    given = cotangents(actual)
    of_expected = reference.attention_jvp_backward(**given, **call, **tangents, **results_of(expected))
    _compare(second(call, tangents), of_expected, rtol, call)


def _compare(actual: Any, expected: Any, rtol: float, call: Call) -> None:
    for name, a, b in zip(actual._fields, actual, expected, strict=True):
        assert (a is None) == (b is None), name
        if a is not None:
            assert a.shape == b.shape, name
            finite = b[np.isfinite(b)]
            tolerance = rtol * (1 + np.abs(finite).max(initial=0))
            np.testing.assert_allclose(a, b, rtol=0, atol=tolerance, err_msg=f"{name} of {list(call)}")
