"""python -m benchmarks.accuracy: errors of cattn, PyTorch, JAX and NumPy on the same inputs, against the oracle.

Measures (a few minutes), prints, and keeps results/accuracy.json; with --into docs/accuracy.md also writes the tables
there, with --report from what is kept, without measuring. --exhaustive instead tries every float32: exp from 0 down to
where it becomes 0, tanh up to where it is 1. Needs the extra "test"; JAX takes part where it is installed, mpmath
checks the oracle.
"""

from __future__ import annotations

import argparse
import functools
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import cattn

from . import functions, oracle
from .accuracy_report import line, markdown
from .contestants import as_floats, as_tensor, jax_or_none, torch_or_none
from .machine import RESULTS, facts, load, save
from .oracle import Array, Errors
from .report import write_into

Results = dict[str, Any]  # quantity: array
Call = Callable[..., Results]
SEEDS = 3
# The numbers near both ends of a dtype: large, small, subnormal.
ENDS = {"float32": (1e38, 1e-38, 1e-40), "float64": (1e300, 1e-300, 1e-310)}
LOWEST = {"float32": -87.33, "float64": -708.39}  # exp of it is a normal number


@dataclass
class Case:
    """One class of inputs. `make` draws them; every contestant, and the oracle, takes them with the same options."""

    group: str
    name: str
    dtype: Any
    make: Callable[[np.random.Generator], list[Array]]
    contestants: dict[str, Call]
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
                for who, call in self.contestants.items():
                    for quantity, actual in call(*arrays, **self.options).items():
                        errors = gathered.setdefault(quantity, {}).setdefault(who, Errors(self.dtype))
                        errors.add(as_floats(actual), exact[quantity])
        return [self._row(quantity, errors) for quantity, errors in gathered.items()]

    def _row(self, quantity: str, errors: dict[str, Errors]) -> dict[str, Any]:
        told = {who: error.told() for who, error in errors.items()}
        kind = np.dtype(self.dtype).name
        return {"group": self.group, "name": self.name, "dtype": kind, "quantity": quantity, "errors": told}


# ---- functions of one number ---------------------------------------------------------------------------------------
def elementwise(dtype: Any) -> Iterator[Case]:
    """Measure exp, tanh and log: NumPy's, PyTorch's and JAX's own, and those in our kernels."""
    lowest = LOWEST[np.dtype(dtype).name]

    def below_zero(rng: np.random.Generator) -> Array:
        return np.concatenate([rng.uniform(lowest, 0, 50_000), -np.exp(rng.uniform(-50, np.log(-lowest), 50_000))])

    ranges: dict[str, tuple[str, Any, Any, Any]] = {
        "exp": ("exp", functions.exp, f"{lowest:.1f} to 0", below_zero),
        "exp, near": ("exp", functions.exp, "-10 to 0", lambda rng: rng.uniform(-10, 0, 100_000)),
        "exp, of subnormals": (
            "exp", functions.exp, "subnormal results",
            lambda rng: rng.uniform(*((-103, -87.4) if dtype == np.float32 else (-744, -708.5)), 10_000),
        ),
        "tanh": ("tanh", functions.tanh, "1e-30 to 20", lambda rng: np.exp(rng.uniform(-69, 3, 100_000))),
        "log": ("log", functions.log, "1 to 3000", lambda rng: rng.integers(1, 3000, 300)),
    }  # fmt: skip
    for name, (function, ours, between, make) in ranges.items():
        calls: dict[str, Call] = {"cattn": _named(name, ours), "numpy": _named(name, getattr(np, function))}
        if torch := torch_or_none():
            calls["torch"] = _named(name, getattr(torch, function), torch.from_numpy)
        if jax := jax_or_none():
            calls["jax"] = _named(name, getattr(jax.numpy, function), jax.numpy.asarray)
        exact = _named(name, getattr(np, function))
        yield Case("functions", between, dtype, functools.partial(_typed, make, dtype), calls, exact)


def _named(name: str, function: Callable[[Any], Any], convert: Callable[[Array], Any] = np.asarray) -> Call:
    return lambda x: {name: function(convert(x))}


def _typed(make: Callable[[np.random.Generator], Array], dtype: Any, rng: np.random.Generator) -> list[Array]:
    return [make(rng).astype(dtype)]


# ---- softmax -------------------------------------------------------------------------------------------------------
def scores(dtype: Any) -> dict[str, Callable[[np.random.Generator], Array]]:
    """Return the classes of scores, row by row."""
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
    """Measure softmax, its two masked forms under causality, its gradient."""
    torch, jax = torch_or_none(), jax_or_none()
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
def by_cattn(
    query: Array, key: Array, value: Array, grad_out: Array, bias: Array | None = None, *,
    causal: bool = False, softcap: float | None = None, double_lse: bool = True,
) -> Results:  # fmt: skip
    """Measure cattn.scaled_dot_product_attention and, with the log-sum-exp in float64, cattn.attention_backward."""
    options: dict[str, Any] = {"is_causal": "upper_left" if causal else False, "softcap": softcap, "bias": bias}
    result = cattn.scaled_dot_product_attention(query, key, value, need_weights=True, return_lse=True, **options)
    exact = cattn.AttentionOutput(lse=np.empty(query.shape[:-1]))
    cattn.scaled_dot_product_attention(query, key, value, return_lse=True, out=exact, **options)
    lse = exact.lse if double_lse else result.lse
    grads = cattn.attention_backward(grad_out, query, key, value, result.out, lse, **options)
    found = {"out": result.out, "weights": result.weights, "lse": result.lse}
    found |= {"dQ": grads.query, "dK": grads.key, "dV": grads.value}
    return found if bias is None else found | {"dbias": grads.bias}


def by_torch(
    query: Array, key: Array, value: Array, grad_out: Array, bias: Array | None = None, *,
    causal: bool = False, softcap: float | None = None,
) -> Results:  # fmt: skip
    """Measure PyTorch's fused function and its gradients; softcap, weights and log-sum-exp by tensor operations."""
    torch = torch_or_none()
    arrays = {"dQ": query, "dK": key, "dV": value} | ({} if bias is None else {"dbias": bias})
    leaves = {name: as_tensor(torch, a.copy()).requires_grad_() for name, a in arrays.items()}
    q, k, v = (leaves[name] for name in ("dQ", "dK", "dV"))
    scores = (q @ k.mT) * q.shape[-1] ** -0.5
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores + leaves["dbias"]
    if causal:
        scores = scores.masked_fill(~torch.ones(scores.shape[-2:], dtype=torch.bool).tril(), -torch.inf)
    weights = torch.softmax(scores, -1)
    found = {"weights": weights.detach(), "lse": torch.logsumexp(scores, -1).detach()}
    if softcap:
        out = weights @ v
    else:
        fused = torch.nn.functional.scaled_dot_product_attention
        out = fused(q, k, v, leaves.get("dbias"), is_causal=causal)
    out.backward(as_tensor(torch, grad_out))
    return {"out": out.detach()} | found | {name: leaf.grad for name, leaf in leaves.items()}


def by_jax(
    query: Array, key: Array, value: Array, grad_out: Array, bias: Array | None = None, *,
    causal: bool = False, softcap: float | None = None,
) -> Results:  # fmt: skip
    """Measure jax.nn.dot_product_attention and its gradients; it gives neither weights nor (everywhere) log-sum-exp."""
    jax = jax_or_none()
    np_ = jax.numpy

    def capped(q: Any, k: Any, v: Any, *_: Any) -> Any:
        scores = softcap * np_.tanh((q @ k.swapaxes(-1, -2)) * q.shape[-1] ** -0.5 / softcap)
        visible = np_.tri(*scores.shape[-2:], dtype=bool) if causal else True
        return jax.nn.softmax(np_.where(visible, scores, -np_.inf), axis=-1) @ v

    def fused(q: Any, k: Any, v: Any, *bias: Any) -> Any:
        heads_inside = (np_.moveaxis(a, -2, -3) for a in (q, k, v))
        out = jax.nn.dot_product_attention(*heads_inside, bias=bias[0] if bias else None, is_causal=causal)
        return np_.moveaxis(out, -3, -2)

    arrays = [query, key, value] + ([] if bias is None else [bias])
    out, backward = jax.vjp(capped if softcap else fused, *map(np_.asarray, arrays))
    grads = backward(np_.asarray(grad_out))
    return {"out": out} | dict(zip(("dQ", "dK", "dV", "dbias"), grads, strict=False))


PEERS: dict[str, tuple[Any, Call]] = {
    "torch": (torch_or_none, by_torch),
    "jax": (jax_or_none, by_jax),
    "numpy": (lambda: True, oracle.attention),
}


def contestants() -> dict[str, Call]:
    """Return cattn and the peers that are installed."""
    return {"cattn": by_cattn} | {name: call for name, (installed, call) in PEERS.items() if installed()}


@dataclass
class Inputs:
    """Shape and size of query, key, value and gradient, normal numbers all; `change` makes them special."""

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
    """Measure output, weights, log-sum-exp and gradients."""
    for name, kind in inputs(dtype).items():
        make = functools.partial(kind.draw, dtype)
        calls = contestants()
        if np.dtype(dtype).name == "bfloat16":
            del calls["numpy"]  # it has no product of such matrices
        yield Case("attention", name, dtype, make, calls, oracle.attention, kind.options)


# ---- the command ---------------------------------------------------------------------------------------------------
def cases() -> Iterator[Case]:
    """Return everything that is measured."""
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


def every_float32(first: int = 0, last: int | None = None, step: int = 1) -> dict[str, float]:
    """Return the largest error in ULP of exp and tanh in float32, over all numbers between two bit patterns."""
    ends = {
        "exp": (functions.exp, np.exp, np.float32(-87.336544), -1),
        "tanh": (functions.tanh, np.tanh, np.float32(10), 1),
    }
    worst = {}
    for name, (ours, right, end, sign) in ends.items():
        stop = int(np.abs(end).view(np.uint32)) + 1 if last is None else last
        largest = 0.0
        for begin in range(first, stop, 2**20 * step):
            x = sign * np.arange(begin, min(begin + 2**20 * step, stop), step, dtype=np.uint32).view(np.float32)
            exact = right(x.astype(np.float64))
            largest = max(largest, float((np.abs(ours(x) - exact) / oracle.spacing(exact, np.float32)).max()))
        worst[name] = largest
    return worst


def measure(only: str, folder: Path) -> None:
    """Measure, print and keep everything, or the cases whose group, dtype and inputs hold a text."""
    jax_or_none()  # before anything else imports it
    rows = {}
    if only and (kept := load(folder, "accuracy")):
        rows = {_key(row): row for row in kept["rows"]}
    for case in cases():
        if only in f"{case.group} {np.dtype(case.dtype).name} {case.name}":
            for row in case.run():
                rows[_key(row)] = row
                print(line(row), flush=True)
    checked = oracle.check()
    print("the oracle's own errors:", ", ".join(f"{name} {error:.1g}" for name, error in checked.items()))
    save(folder, "accuracy", list(rows.values()), oracle=checked)


def _key(row: dict[str, Any]) -> tuple[str, ...]:
    return row["group"], row["dtype"], row["name"], row["quantity"]


def main(arguments: list[str] | None = None) -> int:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.accuracy", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--exhaustive", type=int, nargs="?", const=1, metavar="STEP", help="every float32 (or every STEP-th) instead"
    )
    parser.add_argument("--report", action="store_true", help="measure nothing, tell what is kept")
    parser.add_argument(
        "--only",
        default="",
        help='measure what this is part of ("attention float32 softcap"), replace it in what is kept',
    )
    parser.add_argument("--into", type=Path, help="the Markdown file to write the tables into")
    parser.add_argument("-o", "--output", type=Path, default=RESULTS, help="folder of the results")
    found = parser.parse_args(arguments)
    found.output.mkdir(parents=True, exist_ok=True)
    if found.exhaustive:
        worst = every_float32(step=found.exhaustive)
        print("\n".join(f"{name:<20} {ulp:.3f} ULP at most" for name, ulp in worst.items()))
        path = found.output / "accuracy_exhaustive.json"
        path.write_text(json.dumps({"machine": facts(), "step": found.exhaustive, "float32": worst}, indent=1) + "\n")
        return 0
    if not found.report:
        measure(found.only, found.output)
    kept = load(found.output, "accuracy")
    if found.into and kept:
        write_into(found.into, markdown(kept))
    elif found.report and kept:
        print(markdown(kept))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
