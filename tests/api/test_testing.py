"""cattn.testing: wrong attention in learners' styles is named, right attention passes, and errors are bounded."""

from __future__ import annotations

import doctest
import inspect
import math
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cattn
from cattn.testing import Report, assert_attention_close, diagnose
from support import ROOT, assert_passes
from support.processes import run_command

Array = np.ndarray[Any, Any]


def names(report: Report) -> list[str]:
    return [mistake.name for mistake in report.mistakes]


def softmax(scores: Array, axis: int = -1) -> Array:
    e = np.exp(scores - scores.max(axis=axis, keepdims=True))
    return e / e.sum(axis=axis, keepdims=True)


def scores_of(q: Array, k: Array) -> Array:
    return q @ np.swapaxes(k, -1, -2) / np.sqrt(q.shape[-1])


def hidden(T: int) -> Array:
    return np.triu(np.ones((T, T), bool), k=1)


# ---- right attention in several styles -----------------------------------------------------------------------------
def by_loops(query: Array, key: Array, value: Array) -> Array:
    T, d = query.shape
    out = np.zeros_like(value)
    for i in range(T):
        scores = [sum(query[i, c] * key[j, c] for c in range(d)) / math.sqrt(d) for j in range(i + 1)]
        e = [math.exp(s - max(scores)) for s in scores]
        for j in range(i + 1):
            out[i] += e[j] / sum(e) * value[j]
    return out


def by_einsum(q: Array, k: Array, v: Array) -> Array:
    scores = np.einsum("...id,...jd->...ij", q, k) / np.sqrt(q.shape[-1])
    scores[..., hidden(q.shape[-2])] = -1e9
    return np.einsum("...ij,...jd->...id", softmax(scores), v)


def by_renormalizing(q: Array, k: Array, v: Array) -> Array:
    weights = softmax(scores_of(q, k)) * ~hidden(q.shape[-2])
    return weights / weights.sum(axis=-1, keepdims=True) @ v


def heads_by_numpy(q: Array, k: Array, v: Array, n: int = 2) -> Array:
    B, T, width = q.shape
    q, k, v = (x.reshape(B, T, n, width // n).transpose(0, 2, 1, 3) for x in (q, k, v))
    return by_einsum(q, k, v).transpose(0, 2, 1, 3).reshape(B, T, width)


def hides_given(q: Array, k: Array, v: Array, mask: Array | None = None, pad: Array | None = None) -> Array:
    scores = scores_of(q, k)
    if mask is not None:
        scores = np.where(mask, scores, -np.inf)
    if pad is not None:
        scores = np.where(pad.reshape(len(pad), *[1] * (q.ndim - 2), -1), scores, -np.inf)
    return softmax(scores) @ v


def drops(q: Array, k: Array, v: Array, p: float) -> Array:
    weights = softmax(np.where(hidden(q.shape[-2]), -np.inf, scores_of(q, k)))
    return np.where(np.random.random(weights.shape) < p, 0, weights / (1 - p)) @ v  # noqa: NPY002


def rectangular(corner: str) -> Callable[[Array, Array, Array], Array]:
    """Causal attention of any numbers of queries and keys."""

    def attention(q: Array, k: Array, v: Array) -> Array:
        T_q, T_k = q.shape[-2], k.shape[-2]
        visible = np.tri(T_q, T_k, k=T_k - T_q if corner == "lower_right" else 0, dtype=bool)
        return softmax(np.where(visible, scores_of(q, k), -np.inf)) @ v

    return attention


def grouped(repeat: Callable[[Array, int], Array]) -> Callable[[Array, Array, Array], Array]:
    """Causal attention that repeats the heads of keys and values if there are fewer."""

    def attention(q: Array, k: Array, v: Array) -> Array:
        if q.ndim == 4 and k.shape[1] < q.shape[1]:
            k, v = (repeat(x, q.shape[1] // x.shape[1]) for x in (k, v))
        return by_einsum(q, k, v)

    return attention


def by_state(place: str, factor: float = 1.0) -> Callable[[Array, Array, Array], Array]:
    """Linear attention whose state is read before or after the token is added, or at the end."""

    def attention(q: Array, k: Array, v: Array) -> Array:
        state, out = np.zeros((*q.shape[:-2], q.shape[-1], v.shape[-1])), np.zeros_like(v)
        for t in range(q.shape[-2]):
            before, state = state, state + k[..., t, :, None] * v[..., t, None, :]
            out[..., t : t + 1, :] = q[..., t : t + 1, :] @ (before if place == "before" else state)
        return (q @ state if place == "end" else out) * factor / np.sqrt(q.shape[-1])

    return attention


def by_matrices(corner: Callable[[Array], Array]) -> Callable[[Array, Array, Array], Array]:
    return lambda q, k, v: corner(scores_of(q, k)) @ v


class Dropping:
    """A module of NumPy; `drop` gets the weights, random numbers and p."""

    def __init__(self, drop: Callable[[Array, Array, float], Array], p: float = 0.5) -> None:
        self.p, self.drop, self.training = p, drop, True
        self.W_query, self.W_key, self.W_value = np.random.default_rng(1).standard_normal((3, 6, 4))

    def train(self) -> None:
        self.training = True

    def eval(self) -> None:
        self.training = False

    def __call__(self, x: Array) -> Array:
        weights = softmax(np.where(hidden(x.shape[-2]), -np.inf, scores_of(x @ self.W_query, x @ self.W_key)))
        if self.training:
            weights = self.drop(weights, np.random.random(weights.shape), self.p)  # noqa: NPY002
        return weights @ (x @ self.W_value)


RIGHT: dict[str, Callable[[], Report]] = {
    "loops": lambda: diagnose(by_loops),
    "einsum": lambda: diagnose(by_einsum, num_tokens=6),
    "softmax, mask, divide": lambda: diagnose(by_renormalizing),
    "the library": lambda: diagnose(cattn.causal_attention, check_nan=True),
    "the library's class": lambda: diagnose(cattn.MultiHeadAttention(6, 4, 16, 0.1, 2, rng=1), check_nan=True),
    "the library, all visible": lambda: diagnose(cattn.scaled_dot_product_attention, kind="full", mask="attn_mask"),
    "float16": lambda: diagnose(by_einsum, dtype=np.float16),
    "of one array": lambda: diagnose(lambda x: by_einsum(x, x, x)),
    "own weights": lambda: diagnose(
        lambda x: by_einsum(x @ W, x @ W[::-1], x @ W[:, ::-1]),
        weights={"W_query": W, "W_key": W[::-1], "W_value": W[:, ::-1]},
    ),
    "own weights, unknown": lambda: diagnose(lambda x: by_einsum(x @ W, x @ W[::-1], x @ W[:, ::-1]), width=3),
    "heads": lambda: diagnose(heads_by_numpy, kind="multi_head", num_heads=2),
    "mask and padding": lambda: diagnose(hides_given, kind="full", mask="mask", padding="pad"),
    "dropout": lambda: diagnose(drops, dropout="p", ndim=3),
    "dropout of an object": lambda: diagnose(Dropping(lambda w, r, p: np.where(r < p, 0, w / (1 - p)))),
    "fewer queries": lambda: diagnose(rectangular("lower_right"), alignment="lower_right"),
    "fewer queries, as PyTorch": lambda: diagnose(rectangular("upper_left"), alignment="upper_left"),
    "fewer heads of keys": lambda: diagnose(grouped(lambda x, n: np.repeat(x, n, axis=1))),
    "linear": lambda: diagnose(cattn.linear_attention, kind="linear"),
    "linear, by a state": lambda: diagnose(by_state("after"), kind="linear"),
    "linear, by matrices": lambda: diagnose(by_matrices(np.tril), kind="linear"),
    "-1e4 hides": lambda: diagnose(causal(lambda s, m: softmax(np.where(m, -1e4, s)))),
}
W = np.random.default_rng(0).standard_normal((3, 3))


@pytest.mark.parametrize("style", RIGHT)
def test_right_attention_passes(style: str) -> None:
    assert_passes(RIGHT[style](), unknown="unknown" in style)


def causal(weigh: Callable[[Array, Array], Array]) -> Callable[[Array, Array, Array], Array]:
    """Attention whose weights are a function of the scaled scores and the mask, True where a key is hidden."""
    return lambda q, k, v: weigh(scores_of(q, k), hidden(q.shape[-2])) @ v


def weigh_hidden(change: Callable[[Array], Array]) -> Callable[[Array, Array, Array], Array]:
    """Causal attention whose weights are a function of the masked scores."""
    return causal(lambda scores, mask: change(np.where(mask, -np.inf, scores)))


def divided(e: Array, keepdims: bool = True) -> Array:
    return e / e.sum(axis=-1, keepdims=keepdims)


def dropping(change: Callable[[Array, Array, float], Array]) -> Report:
    """The report on attention with dropout of weights; `change` gets the weights, random numbers and p."""

    def attention(q: Array, k: Array, v: Array, p: float) -> Array:
        weights = softmax(np.where(hidden(q.shape[-2]), -np.inf, scores_of(q, k)))
        return change(weights, np.random.random(weights.shape), p) @ v  # noqa: NPY002

    return diagnose(attention, dropout="p")


def drops_scores(q: Array, k: Array, v: Array, p: float) -> Array:
    scores = scores_of(q, k)
    scores = np.where(np.random.random(scores.shape) < p, 0, scores / (1 - p))  # noqa: NPY002
    return softmax(np.where(hidden(q.shape[-2]), -np.inf, scores)) @ v


def drops_result(q: Array, k: Array, v: Array, p: float) -> Array:
    out = by_einsum(q, k, v)
    return np.where(np.random.random(out.shape) < p, 0, out / (1 - p))  # noqa: NPY002


def unmasked_rectangles(q: Array, k: Array, v: Array) -> Array:
    scores = scores_of(q, k)
    return softmax(np.where(hidden(len(q)), -np.inf, scores) if len(q) == len(k) else scores) @ v


# ---- wrong attention -----------------------------------------------------------------------------------------------
def wrong(change: Callable[..., Any]) -> Callable[[Array, Array, Array], Array]:
    """Attention of NumPy in which one step is replaced."""

    def attention(q: Array, k: Array, v: Array) -> Array:
        result: Array = change(q, k, v, np.swapaxes(k, -1, -2), hidden(q.shape[-2]))
        return result

    return attention


def no_mask(q: Array, k: Array, v: Array) -> Array:
    scores = scores_of(q, k)
    np.where(hidden(len(q)), -np.inf, scores)  # the result is forgotten
    return softmax(scores) @ v


def drops_always(q: Array, k: Array, v: Array) -> Array:
    weights = softmax(np.where(hidden(q.shape[-2]), -np.inf, scores_of(q, k)))
    return weights * (np.random.random(weights.shape) > 0.1) / 0.9 @ v  # noqa: NPY002


def drops_only(q: Array, k: Array, v: Array, p: float) -> Array:
    weights = softmax(np.where(hidden(q.shape[-2]), -np.inf, scores_of(q, k)))
    return weights * (np.random.random(weights.shape) > p) @ v  # noqa: NPY002


def joins_batch(q: Array, k: Array, v: Array) -> Array:
    B, T, d = q.shape
    weights = softmax(np.where(hidden(B * T), -np.inf, scores_of(q.reshape(-1, d), k.reshape(-1, d))))
    return (weights @ v.reshape(-1, d)).reshape(B, T, d)


def views_heads(q: Array, k: Array, v: Array) -> Array:
    B, T, width = q.shape
    q, k, v = (x.reshape(B, 2, T, width // 2) for x in (q, k, v))
    return by_einsum(q, k, v).transpose(0, 2, 1, 3).reshape(B, T, width)


def changes_query(q: Array, k: Array, v: Array) -> Array:
    q /= np.sqrt(q.shape[-1])
    return softmax(np.where(hidden(q.shape[-2]), -np.inf, q @ np.swapaxes(k, -1, -2))) @ v


def splits_heads(*ways: str) -> Report:
    """The report on two heads of query, key and value, each split by "swap" or, in the wrong order, by "view"."""

    def attention(*inputs: Array) -> Array:
        B, T, width = inputs[0].shape
        split = {"swap": lambda x: x.reshape(B, T, 2, -1).swapaxes(1, 2), "view": lambda x: x.reshape(B, 2, T, -1)}
        heads = (split[way](x) for way, x in zip(ways, inputs, strict=True))
        return by_einsum(*heads).swapaxes(1, 2).reshape(B, T, width)

    return diagnose(attention, kind="multi_head", num_heads=2)


class Keeps:
    """Something of the first call changes the weights of later ones: its weights, or its dropout."""

    def __init__(self, keep: Callable[[Array], Array]) -> None:
        self.keep, self.kept = keep, np.empty(0)

    def __call__(self, query: Array, key: Array, value: Array) -> Array:
        weights = softmax(np.where(hidden(query.shape[-2]), -np.inf, scores_of(query, key)))
        self.kept = self.kept if self.kept.shape == weights.shape else self.keep(weights)
        return weights * self.kept @ value


def drops_half(weights: Array) -> Array:
    return np.random.choice([0.0, 2.0], weights.shape)  # noqa: NPY002


class KeepsState:
    """Linear attention that begins with the state of the last call, unless the shapes are others."""

    state: Any = None

    def __call__(self, query: Array, key: Array, value: Array) -> Array:
        shape = (*query.shape[:-2], query.shape[-1], value.shape[-1])
        state = self.state if self.state is not None and self.state.shape == shape else None
        out, self.state = cattn.linear_attention(query, key, value, state=state, return_state=True)
        return np.asarray(out)


F = -np.inf
WRONG: dict[str, tuple[str, Callable[[], Report]]] = {
    "linear, the state before the token": ("mask_off_by_one", lambda: diagnose(by_state("before"), kind="linear")),
    "linear, the last state": ("sees_future", lambda: diagnose(by_state("end"), kind="linear")),
    "linear, triu": ("inverted_mask", lambda: diagnose(by_matrices(np.triu), kind="linear")),
    "linear, the next token": (
        "mask_off_by_one",
        lambda: diagnose(by_matrices(lambda s: np.tril(s, 1)), kind="linear"),
    ),
    "linear, twice the scale": ("other_scale", lambda: diagnose(by_state("after", 2.0), kind="linear")),
    "linear, all NaN": ("different", lambda: diagnose(by_matrices(lambda s: np.tril(s) * np.nan), kind="linear")),
    "linear, infinite": ("different", lambda: diagnose(by_matrices(lambda s: np.tril(s) + np.inf), kind="linear")),
    "linear, a state kept": ("keeps_state", lambda: diagnose(KeepsState(), kind="linear")),
    "linear, no scale": (
        "no_scale",
        lambda: diagnose(lambda q, k, v: cattn.linear_attention(q, k, v, scale=1.0), kind="linear"),
    ),
    "linear, a softmax": ("softmax", lambda: diagnose(by_einsum, kind="linear")),
    "linear, and none was meant": ("no_softmax", lambda: diagnose(by_state("after"))),
    "forgotten mask": ("sees_future", lambda: diagnose(no_mask)),
    "inverted mask": ("inverted_mask", lambda: diagnose(causal(lambda s, m: softmax(np.where(m, s, -1e9))))),
    "inverted mask with the diagonal": (
        "inverted_mask",
        lambda: diagnose(causal(lambda s, m: softmax(np.where(m.T, F, s)))),
    ),
    "triu without k=1": (
        "mask_off_by_one",
        lambda: diagnose(causal(lambda s, m: softmax(np.where(~np.tril(~m, -1), F, s)))),
    ),
    "tril with k=1": ("mask_off_by_one", lambda: diagnose(causal(lambda s, m: softmax(np.where(np.triu(m, 2), F, s))))),
    "axis of the queries": ("softmax_axis", lambda: diagnose(causal(lambda s, m: softmax(np.where(m, F, s), axis=-2)))),
    "axis 0 is the batch": (
        "softmax_axis",
        lambda: diagnose(lambda q, k, v: softmax(scores_of(q, k), axis=0) @ v, kind="full", ndim=3),
    ),
    "no scale": ("no_scale", lambda: diagnose(wrong(lambda q, k, v, kT, m: softmax(np.where(m, F, q @ kT)) @ v))),
    "scaled by d": (
        "scaled_by_d",
        lambda: diagnose(wrong(lambda q, k, v, kT, m: softmax(np.where(m, F, q @ kT / q.shape[-1])) @ v)),
    ),
    "masked after the softmax": ("masked_after_softmax", lambda: diagnose(causal(lambda s, m: softmax(s) * ~m))),
    "scores times mask": ("masked_with_zero", lambda: diagnose(causal(lambda s, m: softmax(s * ~m)))),
    "key and value swapped": ("key_value_swapped", lambda: diagnose(lambda q, k, v: by_einsum(q, v, k))),
    "heads by one reshape": ("heads_order", lambda: diagnose(views_heads, kind="multi_head", num_heads=2)),
    "key.view(B, H, T, d)": ("heads_order", lambda: splits_heads("swap", "view", "swap")),
    "query and value by a view": ("heads_order", lambda: splits_heads("view", "swap", "view")),
    "weights of the first call": ("keeps_state", lambda: diagnose(Keeps(lambda weights: weights))),
    "dropout of the first call": ("dropout_in_evaluation", lambda: diagnose(Keeps(drops_half))),
    "a window": ("window", lambda: diagnose(causal(lambda s, m: softmax(np.where(m | np.tril(~m, -2), F, s))))),
    "k=2": ("mask_off_by_one", lambda: diagnose(causal(lambda s, m: softmax(np.where(np.triu(m, 3), F, s))))),
    "mirrored": ("mirrored_mask", lambda: diagnose(causal(lambda s, m: softmax(np.where(m[:, ::-1], F, s))))),
    "one hidden": ("wrong_mask", lambda: diagnose(causal(lambda s, m: softmax(np.where(np.tril(m, 1), F, s))))),
    "a scale of 1/8": ("other_scale", lambda: diagnose(weigh_hidden(lambda s: softmax(s * s.shape[-1] / 8)), ndim=2)),
    "a minus sign": ("other_scale", lambda: diagnose(causal(lambda s, m: softmax(np.where(m, F, -s))))),
    "the largest score alone": ("other_scale", lambda: diagnose(weigh_hidden(lambda s: s == s.max(-1, keepdims=True)))),
    "no exponential": ("no_exponential", lambda: diagnose(causal(lambda s, m: divided(np.where(m, 0, s))))),
    "exp divided by T": ("rows_not_one", lambda: diagnose(weigh_hidden(lambda s: np.exp(s) / s.shape[-1]))),
    "heads share a softmax": ("softmax_axis", lambda: diagnose(weigh_hidden(lambda s: softmax(s, (1, 3))), ndim=4)),
    "a fill of +inf": ("mask_times_inf", lambda: diagnose(causal(lambda s, m: softmax(np.where(m, np.inf, s))))),
    "a fill of 1e9": ("hidden_has_weight", lambda: diagnose(causal(lambda s, m: softmax(np.where(m, 1e9, s))))),
    "a fill of -1": ("hidden_has_weight", lambda: diagnose(causal(lambda s, m: softmax(np.where(m, -1, s))))),
    "keys moved by one": ("sees_future", lambda: diagnose(lambda q, k, v: by_einsum(q, np.roll(k, 1, -2), v))),
    "one head": ("groups_order", lambda: diagnose(grouped(lambda x, n: np.repeat(x[:, :1], n * x.shape[1], 1)))),
    "heads without a split": ("one_head", lambda: diagnose(by_einsum, kind="multi_head", num_heads=2)),
    "padding ignored": (
        "padding_visible",
        lambda: diagnose(lambda q, k, v, pad: hides_given(q, k, v), kind="full", padding="pad", ndim=3),
    ),
    "padding before a causal text": (
        "padding_visible",
        lambda: diagnose(lambda q, k, v, pad: by_einsum(q, k, v), padding="pad", ndim=3),
    ),
    "padding inverted": (
        "inverted_mask",
        lambda: diagnose(lambda q, k, v, pad: hides_given(q, k, v, None, ~pad), kind="full", padding="pad", ndim=3),
    ),
    "mask with the other meaning": (
        "inverted_mask",
        lambda: diagnose(hides_given, kind="full", mask="mask", true_hides=True),
    ),
    "dropout for ever": ("dropout_in_evaluation", lambda: diagnose(drops_always)),
    "dropout without 1 / (1 - p)": ("dropout_not_rescaled", lambda: diagnose(drops_only, dropout="p")),
    "NaN behind the mask": ("nan_leaks", lambda: diagnose(by_einsum, check_nan=True)),
    "batch as one text": ("batch_mixed", lambda: diagnose(joins_batch)),
    "a small number instead of -inf": ("hidden_has_weight", lambda: diagnose(causal(lambda s, m: softmax(s - 12 * m)))),
    "no maximum": ("softmax_overflows", lambda: diagnose(weigh_hidden(lambda s: divided(np.exp(s))))),
    "no maximum, float32": (
        "softmax_overflows",
        lambda: diagnose(weigh_hidden(lambda s: divided(np.exp(s.astype(np.float32)))), dtype=np.float32),
    ),
    "one maximum for all rows": (
        "softmax_overflows",
        lambda: diagnose(lambda q, k, v: divided(np.exp(scores_of(q, k) - 1)) @ v, kind="full"),
    ),
    "a fill of -50": ("hidden_has_weight", lambda: diagnose(causal(lambda s, m: softmax(np.where(m, -50, s))))),
    "a fill of 1e-9": ("masked_with_zero", lambda: diagnose(causal(lambda s, m: softmax(np.where(m, 1e-9, s))))),
    "a mask that is added": ("mask_added", lambda: diagnose(causal(lambda s, m: softmax(s + m)))),
    "0 * -inf": ("mask_times_inf", lambda: diagnose(causal(lambda s, m: softmax(s + m * -np.inf)))),
    "-inf after the softmax": (
        "masked_after_softmax",
        lambda: diagnose(causal(lambda s, m: np.where(m, -np.inf, softmax(s)))),
    ),
    "two softmaxes": ("softmax_twice", lambda: diagnose(weigh_hidden(lambda s: softmax(softmax(s))))),
    "two softmaxes and two masks": (
        "softmax_twice",
        lambda: diagnose(causal(lambda s, m: softmax(np.where(m, F, softmax(np.where(m, F, s)))))),
    ),
    "a mask between two softmaxes": (
        "softmax_twice",
        lambda: diagnose(causal(lambda s, m: softmax(np.where(m, F, softmax(s))))),
    ),
    "weights.T": ("weights_transposed", lambda: diagnose(weigh_hidden(lambda s: softmax(s).swapaxes(-1, -2)))),
    "weights.T, all visible": (
        "weights_transposed",
        lambda: diagnose(lambda q, k, v: softmax(scores_of(q, k)).swapaxes(-1, -2) @ v, kind="full"),
    ),
    "sigmoid": ("sigmoid", lambda: diagnose(weigh_hidden(lambda s: 1 / (1 + np.exp(-s))))),
    "exp": ("not_normalized", lambda: diagnose(weigh_hidden(np.exp))),
    "log": ("log_softmax", lambda: diagnose(weigh_hidden(lambda s: np.log(softmax(s))))),
    "sums of columns": ("keepdims_missing", lambda: diagnose(weigh_hidden(lambda s: divided(np.exp(s), False)))),
    "maxima of columns": (
        "keepdims_missing",
        lambda: diagnose(weigh_hidden(lambda s: divided(np.exp(s - s.max(axis=-1))))),
    ),
    "key.reshape": (
        "key_reshaped",
        lambda: diagnose(
            wrong(lambda q, k, v, kT, m: softmax(np.where(m, F, q @ k.reshape(kT.shape) / q.shape[-1] ** 0.5)) @ v)
        ),
    ),
    "residual": ("residual_inside", lambda: diagnose(lambda q, k, v: by_einsum(q, k, v) + q)),
    "dropout keeps with p": ("dropout_keeps_p", lambda: dropping(lambda w, r, p: np.where(r < p, w, 0) / (1 - p))),
    "dropout keeps with p and divides by it": (
        "dropout_keeps_p",
        lambda: dropping(lambda w, r, p: np.where(r < p, w / (p or 1), 0)),
    ),
    "dropout of an object keeps with p": (
        "dropout_keeps_p",
        lambda: diagnose(Dropping(lambda w, r, p: np.where(r < p, w / p, 0))),
    ),
    "dropout divides by p": ("dropout_mean", lambda: dropping(lambda w, r, p: np.where(r < p, 0, w / p))),
    "dropout of scores": ("dropout_before_softmax", lambda: diagnose(drops_scores, dropout="p")),
    "dropout of the result": ("dropout_place", lambda: diagnose(drops_result, dropout="p")),
    "dropout without effect": ("no_dropout", lambda: dropping(lambda w, r, p: w)),
    "other corner": ("upper_left", lambda: diagnose(rectangular("upper_left"), alignment="lower_right")),
    "the corner of decoding": ("lower_right", lambda: diagnose(rectangular("lower_right"), alignment="upper_left")),
    "no mask for fewer queries": ("sees_future", lambda: diagnose(unmasked_rectangles, ndim=2)),
    "heads of keys in turn": ("groups_order", lambda: diagnose(grouped(lambda x, n: np.tile(x, (1, n, 1, 1))))),
    "in place": ("changes_inputs", lambda: diagnose(changes_query)),
    "(B, T, H, D)": (
        "other_layout",
        lambda: diagnose(lambda *a: by_einsum(*(x.swapaxes(1, 2) for x in a)).swapaxes(1, 2), ndim=4),
    ),
    "another function": ("different", lambda: diagnose(lambda q, k, v: by_einsum(q, k, v) + 0.01 * q)),
    "raises": ("raises", lambda: diagnose(lambda q, k, v: q @ k)),
    "weights returned": ("wrong_shape", lambda: diagnose(lambda q, k, v: softmax(scores_of(q, k)))),
    "nothing returned": ("wrong_shape", lambda: diagnose(lambda q, k, v: None)),
    "a word returned": ("wrong_shape", lambda: diagnose(lambda q, k, v: "attention")),
}


@pytest.mark.parametrize("which", WRONG)
def test_wrong_attention_is_named(which: str) -> None:
    name, call = WRONG[which]
    report = call()
    assert names(report)[0] == name, report
    assert len(set(names(report))) == 1, report


def test_a_function_whose_calls_differ_is_told_why_and_errors_of_a_dtype_by_their_size() -> None:
    (kept,) = diagnose(KeepsState(), kind="linear").mistakes
    assert kept.text == "Two calls with the same arguments differ: a state is kept from the call before."
    (copied,) = diagnose(Keeps(drops_half)).mistakes
    assert copied.text == "Two calls with the same arguments differ: by dropout."
    (drops,) = diagnose(drops_always).mistakes
    assert drops.text == "Two calls with the same arguments differ: dropout, or a state kept from the call before."
    text = diagnose(lambda *a: by_einsum(*(x.astype(np.float16).astype(float) for x in a)), ndim=2).mistakes[0].text
    assert "errors of the size of float16" in text
    assert "rotary" not in text


def test_a_note_tells_where_fewer_queries_stand() -> None:
    """Both alignments are in use, so that neither is a mistake unless the caller names one."""
    assert diagnose(rectangular("lower_right")).notes == ()
    report = diagnose(rectangular("upper_left"))
    assert report.ok
    assert report.notes[0].startswith("upper_left: with 3 queries and 5 keys, the first query sees the first key only")


def test_a_right_function_gets_no_note() -> None:
    """Most attention lets NaN in a hidden value through."""
    assert diagnose(by_einsum).notes == ()


def test_the_probability_of_a_module_comes_back() -> None:
    module = Dropping(lambda w, r, p: np.where(r < p, 0, w / (1 - p)), p=0.1)
    assert "the mean over dropout" in diagnose(module).checked
    assert module.p == 0.1


def test_several_mistakes_are_named_together() -> None:
    def attention(q: Array, k: Array, v: Array) -> Array:
        return softmax(np.where(hidden(len(q)).T, -np.inf, q @ v.T)) @ k

    assert set(names(diagnose(attention))) == {"inverted_mask", "no_scale", "key_value_swapped"}


def test_the_smallest_failing_input_fails() -> None:
    (mistake,) = diagnose(no_mask).mistakes
    assert mistake.inputs["query"].shape == (2, 1)  # one token has no future
    assert mistake.got is not None
    assert mistake.right is not None
    np.testing.assert_array_equal(no_mask(**{n[0]: a for n, a in mistake.inputs.items()}), mistake.got)
    np.testing.assert_allclose(cattn.causal_attention(**mistake.inputs), mistake.right, rtol=1e-12)
    assert np.abs(mistake.got - mistake.right).max() > 0.01


def test_who_sees_whom_is_shown_beside_what_should_be_seen() -> None:
    (mistake,) = diagnose(causal(lambda s, m: softmax(np.where(m | np.tril(~m, -2), -np.inf, s))), ndim=2).mistakes
    assert mistake.text == "The mask is a window: a token sees itself and 1 token before it, and no other."
    assert mistake.seen is not None
    np.testing.assert_array_equal(mistake.seen, np.tri(5, dtype=bool) & ~np.tri(5, k=-2, dtype=bool))
    assert "who sees whom     who should\n        key      01234    key      01234\n" in str(Report((mistake,)))
    assert "query 3  ..xx.    query 3  xxxx.\n" in Report((mistake,))._repr_html_()
    right = diagnose(lambda q, k, v: by_einsum(np.tanh(q), k, v), ndim=2).mistakes[0]
    assert (right.name, right.seen) == ("different", None)


def test_reports_print_and_raise() -> None:
    report = diagnose(no_mask)
    text = str(report)
    assert text.startswith("no_mask(query, key, value), causal: 1 mistake\n\nsees_future: A token sees ")
    assert "returned" in text
    assert repr(report) == text
    assert "sees_future" in report._repr_html_()
    assert "&lt;" not in report._repr_html_()
    assert repr(report.mistakes[0]).startswith("<Mistake sees_future: ")
    with pytest.raises(AssertionError, match=r"^no_mask\(query, key, value\), causal: 1 mistake"):
        report.raise_if_wrong()
    with pytest.raises(AttributeError):
        report.mistakes = ()  # type: ignore[misc]
    assert "no mistake found" in str(diagnose(by_loops))
    assert type(report).__module__ == "cattn.testing"


class FromBook:
    """The weights are attributes, and values have another width."""

    def __init__(self, scale: float) -> None:
        rng = np.random.default_rng(1)
        self.W_query, self.W_key, self.W_value = rng.random((3, 2)), rng.random((3, 2)), rng.random((3, 4))
        self.scale = scale

    def __call__(self, x: Array) -> Array:
        scores = (x @ self.W_query) @ np.swapaxes(x @ self.W_key, -1, -2) * self.scale
        return softmax(np.where(hidden(x.shape[-2]), -np.inf, scores)) @ (x @ self.W_value)


def test_the_weights_of_an_object_are_found() -> None:
    assert diagnose(FromBook(2**-0.5)).ok
    report = diagnose(FromBook(0.5))
    assert names(report) == ["scaled_by_d"]
    assert report.mistakes[0].inputs["x"].shape == (2, 3)


def test_a_rank_alone_is_wrong() -> None:
    """Axis 1 is the axis of the keys for (T, D) only."""
    report = diagnose(lambda q, k, v: softmax(scores_of(q, k), axis=1) @ v, kind="full")
    assert names(report) == ["softmax_axis", "softmax_axis"]  # over the queries of (B, T, D), the heads of (B, H, T, D)
    assert any("ndim=" in note for note in report.notes)
    assert diagnose(lambda q, k, v: softmax(scores_of(q, k), axis=1) @ v, kind="full", ndim=2).ok


def test_it_leaves_generators_and_modes_as_they_were() -> None:
    np.random.seed(3)  # noqa: NPY002
    before = np.random.get_state()[1].tolist()  # type: ignore[index, union-attr] # noqa: NPY002
    assert names(diagnose(drops_always)) == ["dropout_in_evaluation"]
    assert np.random.get_state()[1].tolist() == before  # type: ignore[index, union-attr] # noqa: NPY002
    layer = cattn.CausalAttention(6, 4, 16, 0.5, rng=1)
    layer.train()
    assert diagnose(layer).ok
    assert layer.training


def test_it_imports_no_torch_for_numpy() -> None:
    program = (
        "import sys, cattn; assert 'cattn.testing' not in sys.modules;"
        "report = cattn.testing.diagnose(cattn.causal_attention); assert report.ok, report;"
        "import numpy as np; x = np.ones((3, 2)); cattn.testing.assert_attention_close(x, x, x, x);"
        "assert 'torch' not in sys.modules"
    )
    run_command([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        (
            {"kind": "casual"},
            ValueError,
            "kind must be one of 'causal', 'full', 'multi_head', 'multi_head_full', 'linear',",
        ),
        ({"ndim": 5}, ValueError, "ndim must be one of None, 2, 3, 4, got 5"),
        ({"num_inputs": 2}, ValueError, "num_inputs must be one of None, 1, 3, got 2"),
        ({"library": "jax"}, ValueError, "library must be one of None, 'numpy', 'torch', got 'jax'"),
        ({"num_tokens": 2}, ValueError, "num_tokens must be at least 4, got 2"),
        ({"num_heads": "2"}, TypeError, "num_heads must be an int, got str"),
        ({"mask": True}, TypeError, "mask must be the name of an argument, a str, got bool"),
        ({"alignment": "left"}, ValueError, "alignment must be one of None, 'upper_left', 'lower_right', got 'left'"),
        ({"kind": "multi_head"}, ValueError, 'kind="multi_head" needs num_heads'),
        ({"kind": "multi_head", "num_heads": 2, "width": 5}, ValueError, "width must be a multiple of num_heads, 2"),
        ({"num_inputs": 1, "weights": {"W": np.eye(2)}}, ValueError, "weights must hold query, key and value"),
    ],
)
def test_wrong_arguments(options: dict[str, Any], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match="^" + re.escape(says)):
        diagnose(by_einsum, **options)


def test_what_is_not_callable_is_refused() -> None:
    with pytest.raises(TypeError, match=r"^function must be callable, got int"):
        diagnose(3)  # type: ignore[arg-type]
    with pytest.raises(
        TypeError, match=r"^function is the class Dropping: make an object, diagnose\(Dropping\(...\)\)"
    ):
        diagnose(Dropping)


def test_the_examples_run() -> None:
    for owner in (cattn.testing, diagnose, assert_attention_close):
        finder = doctest.DocTestFinder(exclude_empty=True, recurse=False)
        (test,) = finder.find(owner, getattr(owner, "__name__", "cattn.testing"), globs={})
        results = doctest.DocTestRunner(verbose=False, optionflags=doctest.ELLIPSIS).run(test)
        assert results.failed == 0
        assert results.attempted > 2


@pytest.mark.parametrize("function", [diagnose, assert_attention_close])
def test_every_parameter_is_documented(function: Callable[..., Any]) -> None:
    doc = inspect.getdoc(function) or ""
    for name in inspect.signature(function).parameters:
        assert re.search(rf"^(\w+, )*(\*\*)?{name}(, \w+)*( :.*)?$", doc, re.MULTILINE), name


def test_the_page_names_every_mistake() -> None:
    page = (ROOT / "docs" / "testing.md").read_text("utf-8")
    folder = Path(cattn.testing.__file__).parent
    code = "".join(path.read_text("utf-8") for path in folder.glob("*.py"))
    used = re.findall(r'\b(?:Wrong|Mistake|RefusedError)\(\s*"(\w+)"', code)
    assert len(set(used)) > 25
    assert [name for name in used if f"`{name}`" not in page] == []


# ---- assert_attention_close ------------------------------------------------------------------------------------------
try:
    import torch
except ImportError:
    torch = None  # type: ignore[assignment]

needs_torch = pytest.mark.skipif(torch is None, reason="PyTorch is not installed")
Array = np.ndarray[Any, Any]

DTYPES: list[Any] = [np.float16, ml_dtypes.bfloat16, np.float32, np.float64]
OPTIONS: dict[str, dict[str, Any]] = {
    "causal": {"is_causal": True},
    "mask, bias and scale": {
        "attn_mask": np.tri(40, dtype=bool),
        "bias": np.linspace(-9, 9, 1600).reshape(40, 40).astype(np.float32),
        "scale": 0.7,
    },
    "softcap, slopes, sinks, window": {
        "softcap": 3.0,
        "alibi_slopes": [0.5, 0.1],
        "sinks": [1.0, -3.0],
        "window_size": (7, 0),
    },
    "lengths": {"key_value_seq_lengths": [40, 3], "query_seq_lengths": [40, 0]},
    "dropout": {"dropout_p": 0.4, "rng": 5},
    "dropout of PyTorch's stream": {"dropout_p": 0.4, "is_causal": True},
    "listed keys": {"key_indices": np.stack([np.arange(40), np.arange(40)[::-1], np.full(40, -1)], axis=-1)},
}


def inputs_of(dtype: Any, T: int = 40, size: float = 1.0) -> list[Array]:
    rng = np.random.default_rng(2)
    return [(size * rng.standard_normal((2, 2, T, 16))).astype(dtype) for _ in range(3)]


def with_stream(options: dict[str, Any]) -> dict[str, Any]:
    needs = options.get("dropout_p") and "rng" not in options
    return options | {"rng": cattn.TorchGenerator(3)} if needs else options


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: np.dtype(dtype).name)
@pytest.mark.parametrize("name", OPTIONS)
def test_right_results_are_close(name: str, dtype: Any) -> None:
    """Small and large scores; and each result is close by the bound of its own dtype only."""
    for size in (1.0, 6.0):
        arrays = inputs_of(dtype, size=size)
        out = cattn.scaled_dot_product_attention(*arrays, **with_stream(OPTIONS[name]))
        assert_attention_close(out, *arrays, **with_stream(OPTIONS[name]))
    if np.dtype(dtype).itemsize < 8:
        wide = [a.astype(np.float64) for a in arrays]
        with pytest.raises(AssertionError, match="rows are off"):
            assert_attention_close(out.astype(np.float64), *wide, **with_stream(OPTIONS[name]))


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: np.dtype(dtype).name)
def test_errors_above_the_bound_are_found(dtype: Any) -> None:
    """One weight of 40 dropped, and one element moved by a few units in the last place."""
    q, k, v = inputs_of(dtype)
    weights = cattn.attention_weights(*(a.astype(np.float64) for a in (q, k)))
    right = (weights @ v.astype(np.float64)).astype(dtype)
    assert_attention_close(right, q, k, v)
    weights[1, 0, 7, np.argsort(weights[1, 0, 7])[20]] = 0
    with pytest.raises(AssertionError, match=r"1 of 160 rows is off .*\n    row \(1, 0, 7\): ") as info:
        assert_attention_close((weights @ v.astype(np.float64)).astype(dtype), q, k, v)
    assert "all other rows are within" in str(info.value)

    limit = float(re.findall(r"the bound is (\S+)", str(info.value))[0])
    for factor, close in ((0.2, True), (4.0, False)):
        moved = right.astype(np.float64)
        moved[1, 0, 7] += factor * limit
        if close:
            assert_attention_close(moved.astype(dtype), q, k, v)
        else:
            with pytest.raises(AssertionError, match=r"row \(1, 0, 7\)"):
                assert_attention_close(moved.astype(dtype), q, k, v)


def test_the_bound_is_a_bound_and_not_far_from_the_errors() -> None:
    """Sums in float32, one after the other, in the worst order that NumPy can be made to take."""
    rng = np.random.default_rng(4)
    q, k, v = (np.abs(rng.standard_normal((300, 8), dtype=np.float32)) for _ in range(3))
    e = np.exp(np.cumsum(q[:, None] * k * np.float32(8**-0.5), axis=-1, dtype=np.float32)[..., -1])
    numerator = np.cumsum(e[..., None] * v, axis=1, dtype=np.float32)[:, -1]
    out = numerator / np.cumsum(e, axis=1, dtype=np.float32)[:, -1:]
    assert_attention_close(out, q, k, v)
    with pytest.raises(AssertionError, match="300 of 300 rows are off"):
        assert_attention_close(out * np.float32(1 + 2e-4), q, k, v)


def test_weights_in_halves_are_found_in_float32_and_allowed_in_halves() -> None:
    q, k, v = inputs_of(np.float32, T=200)
    weights = cattn.attention_weights(q, k).astype(ml_dtypes.bfloat16).astype(np.float32)
    with pytest.raises(AssertionError, match=r"of 800 rows are off .*\(float32\):\n(.*\n){5}    and \d+ more rows"):
        assert_attention_close(weights @ v, q, k, v)
    assert_attention_close(weights @ v, q, k, v, weights_dtype=ml_dtypes.bfloat16)
    half = [a.astype(ml_dtypes.bfloat16) for a in (q, k, v)]
    weights = cattn.attention_weights(*(a.astype(np.float32) for a in half[:2]))
    rounded = weights.astype(ml_dtypes.bfloat16).astype(np.float32) @ half[2].astype(np.float32)
    assert_attention_close(rounded.astype(ml_dtypes.bfloat16), *half)


def test_nan_and_infinity_have_to_stand_where_they_stand() -> None:
    q, k, v = inputs_of(np.float32)
    v[0, 0, 5, 2] = np.nan
    out = cattn.causal_attention(q, k, v)
    assert_attention_close(out, q, k, v, is_causal=True)
    with pytest.raises(AssertionError, match=r"35 of 160 rows .*\n    row \(0, 0, 5\): inf times the bound"):
        assert_attention_close(np.nan_to_num(out), q, k, v, is_causal=True)
    out[1, 1, 3] = np.nan
    with pytest.raises(AssertionError, match=r"row \(1, 1, 3\): inf times the bound.* got nan"):
        assert_attention_close(out, q, k, v, is_causal=True)


@needs_torch
@pytest.mark.parametrize("name", ["float16", "bfloat16", "float32", "float64"])
def test_tensors_are_close(name: str) -> None:
    q, k, v = (torch.from_numpy(a).to(getattr(torch, name)).requires_grad_() for a in inputs_of(np.float64, T=70))
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, torch.ones(70, 70).tril().bool())
    assert_attention_close(out, q, k, v, attn_mask=torch.ones(70, 70).tril().bool())
    with pytest.raises(AssertionError, match="rows are off"):
        assert_attention_close(out, q, k, v)


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda x: assert_attention_close(x[:2], x, x, x), AssertionError, r"out has shape \(2, 4\), wanted \(4, 4\)"),
        (lambda x: assert_attention_close(x.astype(int), x, x, x), TypeError, "out must be float16, bfloat16, "),
        (lambda x: assert_attention_close(x, x, x, x, return_lse=True), TypeError, "return_lse does not change"),
        (lambda x: assert_attention_close(x, x, x, x, causal=True), TypeError, "did you mean 'is_causal'"),
        (lambda x: assert_attention_close(x, x, x[:, :3], x), ValueError, "key"),
        (lambda x: assert_attention_close(x, x, x, x, compute_dtype=int), TypeError, "compute_dtype must be one of"),
    ],
)
def test_wrong_arguments_of_the_comparison(call: Callable[[Array], None], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        call(np.eye(4))
