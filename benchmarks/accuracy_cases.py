"""Accuracy: the oracle, the contestants, and the inputs in classes of easy and hard numbers.

The oracle is the textbook's formula in a wider type. For float64 that is NumPy's long double, with 64 bits of
significand on x86 and 113 elsewhere: its errors are at least 2048 times smaller than in float64.
For float32 and halves, float64 is wide enough to add up matrix products. `check` compares functions of long double
with mpmath in 60 digits.

Errors have two units. ULP is the spacing of the dtype at the exact value (below the normal numbers, the spacing of the
subnormals). It suits functions and sums of positive numbers. The terms of attention's outputs and gradients cancel: a
sum may be a thousand times smaller than its terms, and its error in ULP would measure the cancellation, not the
computation. There the unit is eps times the RMS of the whole result.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

import cattn

from . import contestants as peers
from .contestants import as_floats, as_tensor

Array = NDArray[Any]
WIDE = np.longdouble


def wide(dtype: Any) -> Any:
    """Return the type in which the oracle adds products up. For float32 and halves, float64 errs 5e8 times less."""
    return WIDE if np.dtype(dtype) == np.float64 else np.float64


def limits(dtype: Any) -> Any:
    """Return finfo of any floating dtype."""
    if np.dtype(dtype).name == "bfloat16":
        import ml_dtypes

        return ml_dtypes.finfo(dtype)
    return np.finfo(dtype)


def spacing(exact: Array, dtype: Any) -> Array:
    """Return the size of a unit in the last place of `dtype` at exact values."""
    info = limits(dtype)
    exponent = np.frexp(exact)[1] - 1
    return np.ldexp(exact.dtype.type(1), np.maximum(exponent, int(info.minexp)) - int(info.nmant))


@dataclass
class Errors:
    """Errors of one quantity over several inputs. Elements that are 0 in both results do not count."""

    dtype: Any
    count: int = 0
    lost: int = 0  # elements that are NaN or infinite although the exact value is a number of the dtype
    ulp_squares: float = 0.0
    ulp_largest: float = 0.0
    squares: np.longdouble = field(default_factory=WIDE)
    largest: np.longdouble = field(default_factory=WIDE)
    exact_squares: np.longdouble = field(default_factory=WIDE)

    def add(self, actual: Any, exact: Array) -> Errors:
        """Add a result."""
        actual = np.asarray(actual).astype(exact.dtype)
        assert actual.shape == exact.shape
        counts = (actual != 0) | (exact != 0)
        finite = np.isfinite(actual)
        self.lost += int((~finite).sum())
        actual, exact = actual[counts & finite], exact[counts & finite]
        if exact.size:
            error = np.abs(actual - exact)
            ulps = error / spacing(exact, self.dtype)
            self.count += error.size
            self.ulp_squares += float(np.square(ulps).sum())
            self.ulp_largest = max(self.ulp_largest, float(ulps.max()))
            self.squares += np.square(error).sum()
            self.largest = max(self.largest, error.max())
            self.exact_squares += np.square(exact).sum()
        return self

    def summary(self) -> dict[str, float]:
        """Return the RMS and the largest error, in ULP and in eps times the RMS of the exact values."""
        count = max(self.count, 1)
        unit = WIDE(limits(self.dtype).eps) * np.sqrt(self.exact_squares / count)
        rms = np.sqrt(self.squares / count)
        return {
            "ulp_rms": float(np.sqrt(self.ulp_squares / count)),
            "ulp_largest": self.ulp_largest,
            "rms": float(rms / unit) if unit else float(rms > 0),
            "largest": float(self.largest / unit) if unit else float(rms > 0),
            "lost": self.lost,
        }


# ---- the textbook's formulas: in the inputs' dtype a contestant (NumPy), in long double the oracle -------------------
def softmax(x: Array, hidden: Array | None = None) -> Array:
    """Return the softmax over the last axis."""
    if hidden is not None:
        x = np.where(hidden, x.dtype.type(-np.inf), x)
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def softmax_backward(grad: Array, weights: Array) -> Array:
    """Return the gradient of the scores."""
    return weights * (grad - (weights * grad).sum(axis=-1, keepdims=True))


def attention(
    query: Array, key: Array, value: Array, grad_out: Array, bias: Array | None = None, *,
    causal: bool = False, softcap: float | None = None,
) -> dict[str, Array]:  # fmt: skip
    """Return attention with all its gradients."""
    kind = query.dtype.type
    # 1/sqrt in the widest type: the contestant rounds it once, the oracle does not.
    scale = kind(1 / np.sqrt(WIDE(query.shape[-1])))
    scores = (query @ key.swapaxes(-1, -2)) * scale
    if softcap:
        bent = np.tanh(scores / kind(softcap))
        scores = bent * kind(softcap)
    if bias is not None:
        scores = scores + bias
    if causal:
        scores = np.where(np.tri(*scores.shape[-2:], dtype=bool), scores, kind(-np.inf))
    row_max = scores.max(axis=-1, keepdims=True)
    e = np.exp(scores - row_max)
    total = e.sum(axis=-1, keepdims=True)
    weights = e / total
    grad_scores = softmax_backward(grad_out @ value.swapaxes(-1, -2), weights)
    grad_bias = grad_scores
    if softcap:
        grad_scores = grad_scores * (1 - bent * bent)
    return {
        "out": weights @ value,
        "weights": weights,
        "lse": (row_max + np.log(total))[..., 0],
        "dQ": (grad_scores @ key) * scale,
        "dK": (grad_scores.swapaxes(-1, -2) @ query) * scale,
        "dV": weights.swapaxes(-1, -2) @ grad_out,
    } | ({} if bias is None else {"dbias": grad_bias})


# ---- the oracle's own error ----------------------------------------------------------------------------------------
def check() -> dict[str, float]:
    """Return how far functions of long double are from mpmath at most, in ULP of float64; nothing without mpmath."""
    try:
        import mpmath
    except ImportError:
        return {}
    rng = np.random.default_rng(0)
    largest = {}
    with mpmath.workdps(60):
        for name, x in {
            "exp": rng.uniform(-700, 0, 2000),
            "tanh": np.exp(rng.uniform(-69, 3, 2000)),
            "log": rng.uniform(1, 3000, 2000),
        }.items():
            y = getattr(np, name)(x.astype(WIDE))
            high = y.astype(np.float64)  # mpmath can read the sum of two doubles
            exact = [getattr(mpmath, name)(mpmath.mpf(number)) for number in x.tolist()]
            apart = [mpmath.mpf(a) + float(b) - c for a, b, c in zip(high.tolist(), y - high, exact, strict=True)]
            largest[name] = float((np.abs(np.array(apart, float)) / spacing(high, np.float64)).max())
    return largest


Results = dict[str, Any]  # quantity: array
Call = Callable[..., Results]


# ---- functions of one number ---------------------------------------------------------------------------------------
def exp(x: Array) -> Array:
    """Return exp of x <= 0. The gradients' weights are exp(score - lse), without a division."""
    one, keys = np.ones((1, 1), x.dtype), x[:, None]
    value, lse = np.zeros_like(keys), np.zeros(1, x.dtype)
    return cattn.attention_backward(one, one, keys, value, one, lse, scale=1.0, merged=True).value[:, 0]


def tanh(x: Array) -> Array:
    """Return tanh of x: scores with a softcap of 1."""
    one = np.ones((1, 1), x.dtype)
    return cattn.attention_weights(x[:, None], one, scale=1.0, softcap=1.0, stage="softcap")[:, 0]


def log(x: Array) -> Array:
    """Return log of whole numbers below 100000: the log-sum-exp of that many scores of 0."""
    most = int(x.max())
    query, key = np.zeros((x.size, 1, 1), x.dtype), np.zeros((1, most, 1), x.dtype)
    lengths = x.astype(np.int64)
    result = cattn.scaled_dot_product_attention(
        query, np.broadcast_to(key, (x.size, most, 1)), np.broadcast_to(key, (x.size, most, 1)),
        key_value_seq_lengths=lengths, return_lse=True,
    )  # fmt: skip
    assert result.lse is not None
    return result.lse[:, 0]


# ---- attention -----------------------------------------------------------------------------------------------------
def by_cattn(
    query: Array, key: Array, value: Array, grad_out: Array, bias: Array | None = None, *,
    causal: bool = False, softcap: float | None = None, double_lse: bool = True,
) -> Results:  # fmt: skip
    """Compute attention by cattn, and its gradients, by default from a float64 log-sum-exp."""
    options: dict[str, Any] = {"is_causal": "upper_left" if causal else False, "softcap": softcap, "bias": bias}
    result = cattn.scaled_dot_product_attention(query, key, value, return_weights=True, return_lse=True, **options)
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
    """Compute attention by PyTorch's fused function; softcap, weights and log-sum-exp by tensor operations."""
    torch = peers.torch_or_none()
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
    """Compute attention by jax.nn.dot_product_attention, which returns no weights and no log-sum-exp."""
    jax = peers.jax_or_none()
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


def attention_calls() -> dict[str, Call]:
    """Return attention by cattn and the peers that are installed."""
    calls: dict[str, Call] = {"cattn": by_cattn, "numpy": attention}
    if peers.torch_or_none():
        calls["torch"] = by_torch
    if peers.jax_or_none():
        calls["jax"] = by_jax
    return calls


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
                kind = wide(self.dtype) if self.group == "attention" else WIDE
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
        "exp": ("exp", exp, f"{lowest:.1f} to 0", below_zero),
        "exp, near": ("exp", exp, "-10 to 0", lambda rng: rng.uniform(-10, 0, 100_000)),
        "exp, of subnormals": (
            "exp", exp, "subnormal results",
            lambda rng: rng.uniform(*((-103, -87.4) if dtype == np.float32 else (-744, -708.5)), 10_000),
        ),
        "tanh": ("tanh", tanh, "1e-30 to 20", lambda rng: np.exp(rng.uniform(-69, 3, 100_000))),
        "log": ("log", log, "1 to 3000", lambda rng: rng.integers(1, 3000, 300)),
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
        return {"softmax": softmax(x)}

    def causal(x: Array) -> Results:
        weights = softmax(x, ~np.tri(*x.shape, dtype=bool))
        return dict.fromkeys(("masked, neg_inf", "masked, renormalize"), weights)

    def backward(weights: Array, grad: Array) -> Results:
        return {"softmax_backward": softmax_backward(grad, weights)}

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
                weights = softmax(make(rng)).astype(dtype)
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
    d_v: int | None = None  # the default is head_dim
    query: float = 1.0
    value: float = 1.0
    grad: float = 1.0
    change: Callable[[np.random.Generator, list[Array]], object] | None = None
    options: dict[str, Any] = field(default_factory=dict)

    def draw(self, dtype: Any, rng: np.random.Generator) -> list[Array]:
        """Return the arrays."""
        d_v = self.d_v or self.head_dim
        rows = (self.queries, self.head_dim, self.query), (self.keys, self.head_dim, 1.0)
        rows += (self.keys, d_v, self.value), (self.queries, d_v, self.grad)
        arrays = []
        for length, width, size in rows:
            normal = np.clip(rng.standard_normal((1, self.heads, length, width)), -3, 3)
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
        calls = attention_calls()
        if np.dtype(dtype).name == "bfloat16":
            del calls["numpy"]  # NumPy cannot multiply matrices of bfloat16
        yield Case("attention", name, dtype, make, calls, attention, kind.options)


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
