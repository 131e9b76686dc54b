"""The inputs: functions of one number, softmax, attention, each in classes of easy and hard numbers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import cattn

from .. import contestants as peers
from ..contestants import as_floats, as_tensor
from . import contestants, oracle
from .contestants import Call, Results
from .oracle import Array, Errors

SEEDS = 3
# Numbers near the ends of each dtype's range: large, small, subnormal.
ENDS = {"float32": (1e38, 1e-38, 1e-40), "float64": (1e300, 1e-300, 1e-310)}
LOWEST = {"float32": -87.33, "float64": -708.39}  # exp of it is a normal number


@dataclass
class Case:
    """One class of inputs. `make` draws them; every contestant and the oracle get them with the same options."""

    group: str
    name: str
    dtype: Any
    make: Callable[[np.random.Generator], list[Array]]
    calls: dict[str, Call]  # by contestant
    exact: Call
    options: dict[str, Any] = field(default_factory=dict)

    def run(self, seeds: int = SEEDS) -> list[dict[str, Any]]:
        """Return a row for each quantity."""
        gathered: dict[str, dict[str, Errors]] = {}
        for seed in range(seeds):
            arrays = self.make(np.random.default_rng(seed))
            with np.errstate(all="ignore"):
                kind = oracle.wide(self.dtype) if self.group == "attention" else oracle.WIDE
                exact = self.exact(*(a.astype(kind) for a in arrays), **self.options)
                for who, call in self.calls.items():
                    for quantity, actual in call(*arrays, **self.options).items():
                        errors = gathered.setdefault(quantity, {}).setdefault(who, Errors(self.dtype))
                        errors.add(as_floats(actual), exact[quantity])
        return [self._row(quantity, errors) for quantity, errors in gathered.items()]

    def _row(self, quantity: str, errors: dict[str, Errors]) -> dict[str, Any]:
        kind = np.dtype(self.dtype).name
        summaries = {who: error.summary() for who, error in errors.items()}
        return {"group": self.group, "name": self.name, "dtype": kind, "quantity": quantity, "errors": summaries}


# ---- functions of one number ---------------------------------------------------------------------------------------
def elementwise(dtype: Any) -> Iterator[Case]:
    """Return exp, tanh and log of the kernels, NumPy, PyTorch and JAX."""
    lowest = LOWEST[np.dtype(dtype).name]

    def below_zero(rng: np.random.Generator) -> Array:
        return np.concatenate([rng.uniform(lowest, 0, 50_000), -np.exp(rng.uniform(-50, np.log(-lowest), 50_000))])

    ranges: dict[str, tuple[str, Any, Any, Any]] = {
        "exp": ("exp", contestants.exp, f"{lowest:.1f} to 0", below_zero),
        "exp, near": ("exp", contestants.exp, "-10 to 0", lambda rng: rng.uniform(-10, 0, 100_000)),
        "exp, of subnormals": (
            "exp", contestants.exp, "subnormal results",
            lambda rng: rng.uniform(*((-103, -87.4) if dtype == np.float32 else (-744, -708.5)), 10_000),
        ),
        "tanh": ("tanh", contestants.tanh, "1e-30 to 20", lambda rng: np.exp(rng.uniform(-69, 3, 100_000))),
        "log": ("log", contestants.log, "1 to 3000", lambda rng: rng.integers(1, 3000, 300)),
    }  # fmt: skip
    for name, (function, ours, between, make) in ranges.items():
        calls: dict[str, Call] = {"cattn": _named(name, ours), "numpy": _named(name, getattr(np, function))}
        if torch := peers.torch_or_none():
            calls["torch"] = _named(name, getattr(torch, function), torch.from_numpy)
        if jax := peers.jax_or_none():
            calls["jax"] = _named(name, getattr(jax.numpy, function), jax.numpy.asarray)
        exact = _named(name, getattr(np, function))
        yield Case("functions", between, dtype, functools.partial(_typed, make, dtype), calls, exact)


def _named(name: str, function: Callable[[Any], Any], convert: Callable[[Array], Any] = np.asarray) -> Call:
    return lambda x: {name: function(convert(x))}


def _typed(make: Callable[[np.random.Generator], Array], dtype: Any, rng: np.random.Generator) -> list[Array]:
    return [make(rng).astype(dtype)]


# ---- softmax -------------------------------------------------------------------------------------------------------
def scores(dtype: Any) -> dict[str, Callable[[np.random.Generator], Array]]:
    """Return the classes of scores."""
    large, small, subnormal = ENDS.get(np.dtype(dtype).name, (1e4, 1e-4, 1e-7))

    def normal(rng: np.random.Generator, rows: int = 500, columns: int = 200) -> Array:
        return rng.standard_normal((rows, columns))

    def one_huge(rng: np.random.Generator) -> Array:
        x = normal(rng)
        x[:, 17] = 1e4
        return x

    return {
        "normal": normal,
        "within ±88": lambda rng: rng.uniform(-88, 88, (500, 200)),
        "normal + 10000": lambda rng: normal(rng) + 1e4,
        "all equal": lambda rng: np.broadcast_to(normal(rng, columns=1), (500, 200)),
        "one huge": one_huge,
        f"normal · {large:.0e}": lambda rng: np.clip(normal(rng), -3, 3) * large,
        f"normal · {small:.0e}": lambda rng: normal(rng) * small,
        f"normal · {subnormal:.0e}": lambda rng: normal(rng) * subnormal,
        "rows of 100000": lambda rng: normal(rng, 4, 100_000),
    }


def softmaxes(dtype: Any) -> Iterator[Case]:
    """Return softmax, both methods of the causal masked softmax, and the gradient."""
    torch, jax = peers.torch_or_none(), peers.jax_or_none()
    half = np.dtype(dtype).itemsize == 2

    def plain(x: Array) -> Results:
        return {"softmax": oracle.softmax(x)}

    def causal(x: Array) -> Results:
        weights = oracle.softmax(x, ~np.tri(*x.shape, dtype=bool))
        return dict.fromkeys(("masked, neg_inf", "masked, renormalize"), weights)

    def backward(weights: Array, grad: Array) -> Results:
        return {"softmax_backward": oracle.softmax_backward(grad, weights)}

    plains: dict[str, Call] = {"cattn": lambda x: {"softmax": cattn.softmax(x)}, "numpy": plain}
    causals: dict[str, Call] = {
        "cattn": lambda x: {
            f"masked, {method}": cattn.masked_softmax(x, is_causal="upper_left", method=method)
            for method in ("neg_inf", "renormalize")
        },
        "numpy": causal,
    }
    backwards: dict[str, Call] = {
        "cattn": lambda weights, grad: {"softmax_backward": cattn.softmax_backward(grad, weights)}, "numpy": backward
    }  # fmt: skip
    if torch:
        plains["torch"] = lambda x: {"softmax": torch.softmax(as_tensor(torch, x), -1)}

        def mask_torch(x: Array) -> Results:
            hidden = ~torch.ones(x.shape, dtype=torch.bool).tril()
            weights = as_tensor(torch, x).masked_fill(hidden, -torch.inf).softmax(-1)
            return dict.fromkeys(("masked, neg_inf", "masked, renormalize"), weights)

        def back_torch(weights: Array, grad: Array) -> Results:
            tensors = as_tensor(torch, grad), as_tensor(torch, weights)
            return {"softmax_backward": torch.ops.aten._softmax_backward_data(*tensors, -1, tensors[0].dtype)}

        causals["torch"], backwards["torch"] = mask_torch, back_torch
    if jax:
        plains["jax"] = lambda x: {"softmax": jax.nn.softmax(jax.numpy.asarray(x), axis=-1)}

        def mask_jax(x: Array) -> Results:
            weights = jax.nn.softmax(jax.numpy.asarray(x), axis=-1, where=np.tri(*x.shape, dtype=bool))
            return dict.fromkeys(("masked, neg_inf", "masked, renormalize"), weights)

        causals["jax"] = mask_jax
    for name, make in scores(dtype).items():
        if half and name not in ("normal", "within ±88", "all equal"):
            continue
        yield Case("softmax", name, dtype, functools.partial(_typed, make, dtype), plains, plain)
        if name in ("normal", "within ±88"):
            yield Case("softmax", name, dtype, functools.partial(_typed, make, dtype), causals, causal)

            def weights_and_grad(rng: np.random.Generator, make: Any = make) -> list[Array]:
                weights = oracle.softmax(make(rng)).astype(dtype)
                return [weights, rng.standard_normal(weights.shape).astype(dtype)]

            yield Case("softmax", name, dtype, weights_and_grad, backwards, backward)


# ---- attention -----------------------------------------------------------------------------------------------------
@dataclass
class Inputs:
    """Shape and size of query, key, value and gradient, all of normal numbers; `change` may edit them."""

    queries: int = 200
    keys: int = 200
    heads: int = 2
    head_dim: int = 64
    query: float = 1.0
    value: float = 1.0
    grad: float = 1.0
    change: Callable[[np.random.Generator, list[Array]], object] | None = None
    options: dict[str, Any] = field(default_factory=dict)

    def draw(self, dtype: Any, rng: np.random.Generator) -> list[Array]:
        """Return the arrays."""
        lengths = (self.queries, self.query), (self.keys, 1.0), (self.keys, self.value), (self.queries, self.grad)
        arrays = []
        for length, size in lengths:
            normal = np.clip(rng.standard_normal((1, self.heads, length, self.head_dim)), -3, 3)
            arrays.append(normal * size)
        if self.change is not None:
            self.change(rng, arrays)
        return [a.astype(dtype) for a in arrays]


def _bias(mean: float, rng: np.random.Generator, arrays: list[Array]) -> None:
    query, key = arrays[:2]
    arrays.append(mean + rng.standard_normal((*query.shape[:-1], key.shape[-2])))


def _one_huge(rng: np.random.Generator, arrays: list[Array]) -> None:
    arrays[1][..., 17, :] *= 50


def inputs(dtype: Any) -> dict[str, Inputs]:
    """Return the classes of inputs."""
    found = {
        "normal": Inputs(),
        "normal, causal": Inputs(options={"causal": True}),
        "head_dim 128, causal": Inputs(head_dim=128, options={"causal": True}),
        "6 tokens, head_dim 8": Inputs(6, 6, heads=300, head_dim=8),
        "one query, 1000 keys": Inputs(1, 1000, heads=12),
        "4 queries, 100000 keys": Inputs(4, 100_000, heads=1),
        "scores within ±88": Inputs(query=25),
        "all scores equal": Inputs(query=0),
        "one huge score": Inputs(change=_one_huge),
        "bias": Inputs(change=functools.partial(_bias, 0.0)),
        "bias + 10000": Inputs(change=functools.partial(_bias, 1e4)),
        "softcap 5": Inputs(query=5, options={"softcap": 5.0, "causal": True}),
    }
    if np.dtype(dtype).itemsize == 2:
        return {name: found[name] for name in ("normal", "normal, causal", "one query, 1000 keys")}
    large, small, subnormal = ENDS[np.dtype(dtype).name]
    found[f"values of {large:.0e}"] = Inputs(value=large, grad=1e-3)
    found[f"values of {large / 100:.0e}"] = Inputs(value=large / 100, grad=1e-3)
    found[f"values of {small:.0e}"] = Inputs(value=small)
    found[f"values of {subnormal:.0e}"] = Inputs(value=subnormal)
    found[f"queries of {subnormal:.0e}"] = Inputs(query=subnormal)
    return found


def attentions(dtype: Any) -> Iterator[Case]:
    """Return output, weights, log-sum-exp and gradients."""
    for name, kind in inputs(dtype).items():
        make = functools.partial(kind.draw, dtype)
        calls = contestants.attention_calls()
        if np.dtype(dtype).name == "bfloat16":
            del calls["numpy"]  # NumPy cannot multiply matrices of bfloat16
        yield Case("attention", name, dtype, make, calls, oracle.attention, kind.options)


def cases() -> Iterator[Case]:
    """Return all cases."""
    halves = [np.dtype(np.float16)]
    try:
        import ml_dtypes

        halves.append(np.dtype(ml_dtypes.bfloat16))
    except ImportError:
        print("bfloat16 is left out: ml_dtypes is not installed")
    for dtype in (np.float32, np.float64):
        yield from elementwise(dtype)
    for dtype in (np.float32, np.float64, *halves):
        yield from softmaxes(dtype)
    for dtype in (np.float32, np.float64, *halves):
        yield from attentions(dtype)
