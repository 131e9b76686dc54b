"""Linear attention through PyTorch, ONNX and dask: the numbers and gradients of cattn's functions, and refusals."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import numpy as np
import pytest

import cattn
from cattn._input.doors import BESIDE_ATTENTION

B, N, T, D, E = 2, 2, 5, 3, 2


def arrays(dtype: Any = np.float64, *, by_row: bool = False, n_queries: int = 4, n_keys: int = 1) -> dict[str, Any]:
    """Return query, key, value and the options of the gated delta rule."""
    rng = np.random.default_rng(3)
    shapes = {"query": (B, n_queries, T, D), "key": (B, n_keys, T, D), "value": (B, N, T, E), "state": (B, N, D, E)}
    made = {name: rng.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}
    made["decay"] = -rng.random((B, N, T, D) if by_row else (B, N, T)).astype(dtype)
    made["beta"] = rng.random((B, N, T)).astype(dtype)
    return made


@pytest.mark.parametrize("door", BESIDE_ATTENTION)
def test_each_option_is_a_parameter_or_refused_by_name(door: str) -> None:
    module, name = door.split(".")
    pytest.importorskip(module)
    function = getattr(importlib.import_module(f"cattn.integrations.{module}"), name)
    options = inspect.signature(getattr(cattn.functional, name)).parameters
    refused = BESIDE_ATTENTION[door]
    lacks = [name for name in options if name not in inspect.signature(function).parameters]
    assert sorted(lacks) == sorted(refused)
    x = np.ones((1, 2, 2))
    for name, reason in refused.items():
        with pytest.raises(TypeError) as caught:
            function(x, x, x, **{name: None})
        assert str(caught.value).endswith(f"unexpected keyword argument '{name}': {reason}")


# ---- dask ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("n_queries", "n_keys", "n_values"), [(4, 4, 4), (2, 2, 4), (8, 2, 4), (1, 4, 1), (4, 1, 1)])
def test_chunks_of_batch_and_heads_give_the_bits_of_one_call(n_queries: int, n_keys: int, n_values: int) -> None:
    da = pytest.importorskip("dask.array")
    from cattn.integrations.dask import linear_attention

    rng = np.random.default_rng(2)
    n = max(n_keys, n_values)
    shapes = {"query": (3, n_queries, T, D), "key": (3, n_keys, T, D), "value": (3, n_values, T, E)}
    shapes |= {"decay": (n, 1), "beta": (3, n, T), "state": (n, D, E)}
    given = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    given["decay"] = -abs(given["decay"])
    want = cattn.linear_attention(**given, seq_lengths=[1, T, 3], return_state=True)
    chunked = {
        name: da.from_array(x, chunks=tuple(1 if i == 0 else 2 if i == 1 else -1 for i in range(x.ndim)))
        if name in ("query", "key", "value")
        else x
        for name, x in given.items()
    }
    found = linear_attention(**chunked, seq_lengths=[1, T, 3], return_state=True)
    for a, b in zip(found, want, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        np.testing.assert_array_equal(a.compute(scheduler="sync"), b)
    assert found.out.npartitions >= 3
    np.testing.assert_array_equal(linear_attention(**chunked).compute(), cattn.linear_attention(**given))


def test_dask_names_chunks_of_tokens_and_shapes_that_do_not_fit() -> None:
    da = pytest.importorskip("dask.array")
    from cattn.integrations.dask import linear_attention

    x = da.ones((2, 2, 6, 3), chunks=(1, 1, 2, 3))
    whole = x.rechunk({2: -1})
    with pytest.raises(ValueError, match=r"key has 3 chunks of tokens, .* pass key\.rechunk\(\{2: -1\}\)"):
        linear_attention(whole, x, whole)
    with pytest.raises(ValueError, match="beta has 4 tokens, query has 6"):
        linear_attention(whole, whole, whole, beta=np.ones((2, 2, 4)))
    with pytest.raises(ValueError, match="key has d_k 2, query has 3"):
        linear_attention(whole, whole[..., :2], whole)
    assert linear_attention(whole[:0], whole[:0], whole[:0]).compute().shape == (0, 2, 6, 3)


def test_jax_says_what_to_call_instead() -> None:
    pytest.importorskip("jax")
    door: Any = importlib.import_module("cattn.integrations.jax")
    with pytest.raises(
        AttributeError, match=r"'linear_attention': call cattn\.linear_attention on arrays, under jit by"
    ):
        _ = door.linear_attention
    with pytest.raises(AttributeError, match=r"has no attribute 'nothing'$"):
        _ = door.nothing
