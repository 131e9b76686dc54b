"""cattn.testing.diagnose of PyTorch's functions and modules: right ones pass, and wrong ones are named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import cattn
from cattn.testing import Report, diagnose
from support import assert_passes

torch = pytest.importorskip("torch")
nn = torch.nn


def names(report: Report) -> list[str]:
    return [mistake.name for mistake in report.mistakes]


def by_torch(q: Any, k: Any, v: Any) -> Any:
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)


class Book(nn.Module):  # type: ignore[misc, name-defined]
    """CausalAttention as a textbook has it; the steps can be replaced by wrong ones."""

    def __init__(self, d_in: int = 6, d_out: int = 4, p: float = 0.2, n: int = 1, out: bool = False) -> None:
        super().__init__()
        self.num_heads, self.d_out = n, d_out
        self.W_query = nn.Linear(d_in, d_out, bias=False)
        self.W_key = nn.Linear(d_in, d_out, bias=False)
        self.W_value = nn.Linear(d_in, d_out, bias=False)
        self.out_proj = nn.Linear(d_out, d_out) if out else nn.Identity()
        self.dropout = nn.Dropout(p)
        self.register_buffer("mask", torch.triu(torch.ones(16, 16), diagonal=1))

    def split(self, x: Any) -> Any:
        B, T, _ = x.shape
        return x.view(B, T, self.num_heads, -1).transpose(1, 2)

    def hide(self, scores: Any) -> Any:
        T = scores.shape[-1]
        return scores.masked_fill(self.mask.bool()[:T, :T], -torch.inf)

    def weigh(self, scores: Any, d: int) -> Any:
        return self.dropout(torch.softmax(scores / d**0.5, dim=-1))

    def project(self, x: Any) -> tuple[Any, Any, Any]:
        return self.W_query(x), self.W_key(x), self.W_value(x)

    def forward(self, x: Any) -> Any:
        B, T, _ = x.shape
        q, k, v = (self.split(each) for each in self.project(x))
        weights = self.weigh(self.hide(q @ k.transpose(2, 3)), k.shape[-1])
        return self.out_proj((weights @ v).transpose(1, 2).reshape(B, T, self.d_out))


def unnamed(module: Any) -> Any:
    """The same module under names that no scheme has, so that only properties are left."""
    module.first, module.second, module.third = module.W_query, module.W_key, module.W_value
    del module.W_query, module.W_key, module.W_value
    module.project = lambda x: (module.first(x), module.second(x), module.third(x))
    module.last = module.out_proj
    del module.out_proj
    module.out_proj = lambda context: module.last(context)
    return module


def made(module: Callable[[], Any]) -> Any:
    torch.manual_seed(1)
    return module()


class Mha(nn.Module):  # type: ignore[misc, name-defined]
    """PyTorch's own module, called with one input; its weights have their names from PyTorch."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(8, 2, batch_first=True)
        self.num_heads = 2

    def forward(self, x: Any, attn_mask: Any = None) -> Any:
        return self.inner(x, x, x, attn_mask=attn_mask)


class Hiding(Book):
    """The book's module with a mask of pairs and one of padding, True for visible; `use` may spoil the mask."""

    def __init__(self, use: Callable[[Any], Any] = lambda visible: visible) -> None:
        super().__init__(6, 8, 0.0, 2, out=True)
        self.use = use

    def forward(self, x: Any, mask: Any = None, pad: Any = None) -> Any:
        visible = torch.ones(len(x), 1, x.shape[1], x.shape[1], dtype=torch.bool)
        visible = visible & (True if mask is None else mask) & (True if pad is None else pad[:, None, None, :])
        self.hide = lambda scores: Book.hide(self, scores).masked_fill(~self.use(visible), -1e9)
        return super().forward(x)


class Grouped(nn.Module):  # type: ignore[misc, name-defined]
    """Causal attention whose heads share keys and values; the repetition and the rotation may be wrong ones."""

    def __init__(
        self, repeat: tuple[str, str] = ("right", "right"), turns: str = "", says: bool = True, scale: float = 0.5
    ) -> None:
        super().__init__()
        self.H, self.turns, self.repeat, self.scale = 6, turns, repeat, scale
        if says:
            self.num_heads = 6
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(12, n * 4, bias=False) for n in (6, 2, 2))
        self.o_proj = nn.Linear(24, 12)

    def turn(self, x: Any, heads: bool = False) -> Any:
        turned = cattn.rope(x.detach().transpose(1, 2) if heads else x.detach(), interleaved="pairs" in self.turns)
        return torch.from_numpy(turned).transpose(1, 2) if heads else torch.from_numpy(turned)

    def project(self, x: Any) -> tuple[Any, Any, Any]:
        return self.q_proj(x), self.k_proj(x), self.v_proj(x)

    def forward(self, x: Any) -> Any:
        B, T, _ = x.shape
        q, k, v = (each.view(B, T, -1, 4).transpose(1, 2) for each in self.project(x))
        if self.turns:
            q, k = self.turn(q, "heads" in self.turns), self.turn(k, "heads" in self.turns)
            v = self.turn(v) if "values" in self.turns else v
        k, v = (
            each.repeat_interleave(3, dim=1) if how == "right" else each.repeat(1, 3, 1, 1)
            for each, how in zip((k, v), self.repeat, strict=True)
        )
        scores = (q @ k.transpose(2, 3) * self.scale).masked_fill(torch.ones(T, T).triu(1).bool(), -torch.inf)
        return self.o_proj((torch.softmax(scores, -1) @ v).transpose(1, 2).reshape(B, T, -1))


def grouped_weights(module: Any) -> dict[str, Any]:
    """Hide the projections of a module under other names; return them by names that `diagnose` knows."""
    module.a, module.b, module.c = module.q_proj, module.k_proj, module.v_proj
    del module.q_proj, module.k_proj, module.v_proj
    module.project = lambda x: (module.a(x), module.b(x), module.c(x))
    named = {"W_query": module.a.weight.T, "W_key": module.b.weight.T, "W_value": module.c.weight.T}
    return named | {"out_proj.weight": module.o_proj.weight, "out_proj.bias": module.o_proj.bias}


def by_weights(repeat: str) -> Report:
    module = made(lambda: Grouped((repeat, repeat)))
    return diagnose(module, weights=grouped_weights(module))


RIGHT: dict[str, Callable[[], Report]] = {
    "functional": lambda: diagnose(by_torch),
    "bfloat16": lambda: diagnose(by_torch, dtype=torch.bfloat16),
    "the book's module": lambda: diagnose(made(Book)),
    "the book's heads": lambda: diagnose(made(lambda: Book(6, 8, n=2, out=True)).double()),
    "unknown names": lambda: diagnose(unnamed(made(lambda: Book(6, 8, n=2, out=True)))),
    "PyTorch's module": lambda: diagnose(made(Mha), kind="full", mask="attn_mask", true_hides=True),
    "PyTorch's module of three": lambda: diagnose(
        made(lambda: nn.MultiheadAttention(8, 2, batch_first=True)), kind="full"
    ),
    "fewer heads of keys": lambda: diagnose(made(Grouped)),
    "fewer heads of keys, not said": lambda: diagnose(made(lambda: Grouped(says=False))),
    "weights of fewer heads": lambda: by_weights("right"),
    "rotary": lambda: diagnose(made(lambda: Grouped(turns="halves"))),
    "rotary of pairs": lambda: diagnose(made(lambda: Grouped(turns="pairs", says=False))),
    "an encoder layer, unknown": lambda: diagnose(made(lambda: nn.TransformerEncoderLayer(8, 2, 16)), kind="full"),
    "the batch is the second axis": lambda: diagnose(
        made(lambda: nn.MultiheadAttention(8, 2)), kind="full", mask="attn_mask", true_hides=True
    ),
    "mask and padding": lambda: diagnose(made(Hiding), mask="mask", padding="pad"),
    "mask and padding, unknown names": lambda: diagnose(unnamed(made(Hiding)), mask="mask", padding="pad"),
}


@pytest.mark.parametrize("style", RIGHT)
def test_right_attention_passes(style: str) -> None:
    assert_passes(RIGHT[style](), unknown="unknown" in style)


class Replaced(Book):
    """The book's module with some steps of a learner."""

    def __init__(self, p: float = 0.0, n: int = 2, **steps: Callable[..., Any]) -> None:
        super().__init__(6, 8, p, n, out=True)
        for name, step in steps.items():
            setattr(self, name, step.__get__(self))


def swapped(self: Any, x: Any) -> tuple[Any, Any, Any]:
    return self.W_query(x), self.W_value(x), self.W_key(x)


def replaced(p: float = 0.0, n: int = 2, **steps: Callable[..., Any]) -> Callable[[], Any]:
    return lambda: made(lambda: Replaced(p, n, **steps))


def anonymous(p: float = 0.0, n: int = 2, **steps: Callable[..., Any]) -> Callable[[], Any]:
    return lambda: unnamed(made(lambda: Replaced(p, n, **steps)))


class Residual(Book):
    def forward(self, x: Any) -> Any:
        return super().forward(x) + x


class Unprojected(Book):
    def project(self, x: Any) -> tuple[Any, Any, Any]:
        return self.W_query(x), x, self.W_value(x)


class NoOutput(Book):
    def forward(self, x: Any) -> Any:
        out, self.out_proj = self.out_proj, nn.Identity()
        result, self.out_proj = super().forward(x), out
        return result


class Averaged(Book):
    """The output projection takes the mean of the heads."""

    def __init__(self) -> None:
        super().__init__(6, 8, 0.0, 2)
        self.out_proj = nn.Linear(4, 6)

    def forward(self, x: Any) -> Any:
        q, k, v = (self.split(each) for each in self.project(x))
        return self.out_proj((self.weigh(self.hide(q @ k.transpose(2, 3)), 4) @ v).mean(1))


WRONG_MODULES: dict[str, tuple[str, Callable[[], Any]]] = {
    "repeat for repeat_interleave": ("groups_order", lambda: made(lambda: Grouped(("wrong", "wrong")))),
    "repeat of the values only": ("groups_order", lambda: made(lambda: Grouped(("right", "wrong"), says=False))),
    "fewer heads of keys, no scale": ("no_scale", lambda: made(lambda: Grouped(scale=1.0))),
    "rotary values": ("wrong_rotary", lambda: made(lambda: Grouped(turns="halves, values"))),
    "rotary along the heads": ("wrong_rotary", lambda: made(lambda: Grouped(turns="halves, heads"))),
    "rotary, no scale": ("no_scale", lambda: made(lambda: Grouped(turns="pairs", scale=1.0))),
    "residual": ("residual_inside", lambda: made(lambda: Residual(8, 8, 0.0, 2, out=True))),
    "the key is x": ("not_projected", lambda: made(lambda: Unprojected(8, 8, 0.0, 2, out=True))),
    "no output projection": ("no_output_projection", lambda: made(lambda: NoOutput(6, 8, 0.0, 2, out=True))),
    "mean of heads": ("heads_averaged", lambda: made(Averaged)),
    "mean of weights": (
        "heads_averaged",
        replaced(weigh=lambda self, s, d: torch.softmax(s / d**0.5, -1).mean(1, keepdim=True)),
    ),
    "two softmaxes": (
        "softmax_twice",
        replaced(weigh=lambda self, s, d: torch.softmax(torch.softmax(s / d**0.5, -1), -1)),
    ),
    "no maximum": (
        "softmax_overflows",
        replaced(weigh=lambda self, s, d: torch.exp(s / d**0.5) / torch.exp(s / d**0.5).sum(-1, keepdim=True)),
    ),
    "dropout is never called": ("no_dropout", replaced(0.5, weigh=lambda self, s, d: torch.softmax(s / d**0.5, -1))),
    "scores are scaled by d": ("scaled_by_d", replaced(weigh=lambda self, s, d: torch.softmax(s / d, -1))),
    "scores are not scaled": ("no_scale", replaced(weigh=lambda self, s, d: torch.softmax(s, -1))),
    "key and value projections swapped": ("key_value_swapped", replaced(project=swapped)),
    "view without transpose": (
        "heads_order",
        replaced(split=lambda self, x: x.view(x.shape[0], self.num_heads, x.shape[1], -1)),
    ),
    "F.dropout without training": (
        "dropout_in_evaluation",
        replaced(weigh=lambda self, s, d: nn.functional.dropout(torch.softmax(s / d**0.5, -1), 0.1)),
    ),
    "dropout by hand": (
        "dropout_not_rescaled",
        replaced(
            weigh=lambda self, s, d: torch.softmax(s / d**0.5, -1) * (torch.rand_like(s) > 0.2 * self.training).float()
        ),
    ),
}  # fmt: skip
WRONG_PROPERTIES: dict[str, tuple[str, Callable[[], Any]]] = {
    "no mask": ("sees_future", anonymous(hide=lambda self, s: s)),
    "inverted": (
        "inverted_mask",
        anonymous(hide=lambda self, s: s.masked_fill(~self.mask.bool()[: s.shape[-1], : s.shape[-1]], -1e9)),
    ),
    "diagonal hidden": (
        "mask_off_by_one",
        anonymous(hide=lambda self, s: s.masked_fill(torch.ones_like(s).triu().bool(), -1e9)),
    ),
    "next token seen": (
        "mask_off_by_one",
        anonymous(hide=lambda self, s: s.masked_fill(torch.ones_like(s).triu(2).bool(), -1e9)),
    ),
    "axis": ("softmax_axis", anonymous(weigh=lambda self, s, d: torch.softmax(s / d**0.5, -2))),
    "masked after": (
        "masked_after_softmax",
        anonymous(hide=lambda self, s: s, weigh=lambda self, s, d: torch.softmax(s / d**0.5, -1).tril()),
    ),
    "batch": (
        "batch_mixed",
        anonymous(weigh=lambda self, s, d: torch.softmax(s / d**0.5, -1) + 0.1 * s.tril().mean(0) / 8),
    ),
}


@pytest.mark.parametrize("unknown", [False, True])
@pytest.mark.parametrize(
    ("argument", "use", "name"),
    [
        ("mask", torch.ones_like, "mask_ignored"),
        ("mask", lambda visible: visible.transpose(2, 3), "transposed_mask"),
        ("pad", torch.ones_like, "padding_visible"),
    ],
)
def test_wrong_masks_of_modules_are_named(unknown: bool, argument: str, use: Any, name: str) -> None:
    module = made(lambda: Hiding(use))
    masks: dict[str, Any] = {"mask": argument} if argument == "mask" else {"padding": argument}
    report = diagnose(unnamed(module) if unknown else module, **masks)
    assert names(report) == [name], report
    assert bool(report.not_checked) == unknown


@pytest.mark.parametrize("which", [*WRONG_MODULES, *WRONG_PROPERTIES])
def test_wrong_modules_are_named(which: str) -> None:
    name, make = {**WRONG_MODULES, **WRONG_PROPERTIES}[which]
    module = make()
    module.train()
    report = diagnose(module)
    assert names(report)[0] == name, report
    assert module.training
    assert bool(report.not_checked) == (which in WRONG_PROPERTIES or name == "dropout_in_evaluation")


def test_a_module_inside_that_wants_the_batch_second_mixes_the_batch() -> None:
    """It is the default of PyTorch's module, and a wrapper does not say it."""
    module = made(Mha)
    module.inner.batch_first = False
    (mistake,) = diagnose(module, kind="full", ndim=3).mistakes
    assert mistake.name == "batch_mixed"
    assert mistake.cure.startswith("MultiheadAttention inside has batch_first=False")


def test_a_module_of_other_positions_is_said_to_differ_in_the_scores() -> None:
    class Other(Grouped):
        def turn(self, x: Any, heads: bool = False) -> Any:
            return torch.from_numpy(cattn.rope(x.detach(), theta=77.0))

    (mistake,) = diagnose(made(lambda: Other(turns="halves"))).mistakes
    assert mistake.name == "different"
    assert "The first token, which sees only itself, agrees: rotary positions" in mistake.text
    note = diagnose(made(lambda: Grouped(turns="pairs"))).notes[0]
    assert note == "the scores depend on positions: cattn.rope(x, theta=10000, interleaved=True) of query and key"


class Fused(nn.Module):  # type: ignore[misc, name-defined]
    """Multi-head attention that does not say how many heads it has; `last` is the name of its output projection."""

    def __init__(self, last: str, scale: float | None = None, d: int = 32, h: int = 4) -> None:
        super().__init__()
        self.h, self.name, self.scale = h, last, scale
        self.qkv = nn.Linear(d, 3 * d)
        setattr(self, last, nn.Linear(d, d))

    def forward(self, x: Any) -> Any:
        B, T, d = x.shape
        q, k, v = self.qkv(x).view(B, T, 3, self.h, d // self.h).permute(2, 0, 3, 1, 4)
        out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale)
        return getattr(self, self.name)(out.transpose(1, 2).reshape(B, T, d))


def test_a_number_of_heads_that_a_module_does_not_say_is_found() -> None:
    report = diagnose(Fused("proj"))
    assert report.ok
    assert "formulas" in str(report)
    assert names(diagnose(Fused("proj", scale=1.0))) == ["no_scale"]
    assert names(diagnose(Fused("proj", scale=1.0), kind="full")) == ["sees_no_future", "no_scale"]


def test_a_projection_of_unknown_name_leaves_the_properties() -> None:
    """The formula would be incomplete, and the right module wrong."""
    report = diagnose(Fused("last"))
    assert report.ok
    assert "properties" in str(report)
    assert report.not_checked


class Head(nn.Module):  # type: ignore[misc, name-defined]
    """One head, as lectures write it; `hide` is the mask."""

    def __init__(self, hide: Any, d: int = 24, size: int = 8) -> None:
        super().__init__()
        self.hide = hide
        self.key, self.query, self.value = (nn.Linear(d, size, bias=False) for _ in range(3))
        self.register_buffer("tril", torch.tril(torch.ones(16, 16)))
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: Any) -> Any:
        T = x.shape[-2]
        weights = self.query(x) @ self.key(x).transpose(-2, -1) * self.key.out_features**-0.5
        weights = weights.masked_fill(self.hide(self.tril[:T, :T]), float("-inf")).softmax(dim=-1)
        return self.dropout(weights) @ self.value(x)


class ListOfHeads(nn.Module):  # type: ignore[misc, name-defined]
    def __init__(self, hide: Any) -> None:
        super().__init__()
        self.heads = nn.ModuleList([Head(hide) for _ in range(3)])
        self.proj = nn.Linear(24, 24)

    def forward(self, x: Any) -> Any:
        return self.proj(torch.cat([head(x) for head in self.heads], dim=-1))


@pytest.mark.parametrize(
    ("hide", "wrong"),
    [
        (lambda tril: tril == 0, []),
        (lambda tril: tril == 1, ["inverted_mask"]),
        (lambda tril: tril.tril(-1) == 0, ["mask_off_by_one"]),
        (lambda tril: tril > 1, ["sees_future"]),
    ],
)
def test_heads_in_a_list_are_compared_with_the_formula(hide: Any, wrong: list[str]) -> None:
    report = diagnose(ListOfHeads(hide))
    assert names(report) == wrong, report
    assert "formulas" in str(report)


def test_a_softmax_over_the_batch_is_one_mistake() -> None:
    """Its hidden scores are equal, so that it looks like zeros, too."""

    def attention(q: Any, k: Any, v: Any) -> Any:
        scores = torch.bmm(q, k.transpose(1, 2)) / q.shape[-1] ** 0.5
        scores = scores.masked_fill(torch.triu(torch.ones_like(scores[0]), 1) == 1, -1e9)
        return torch.bmm(nn.functional.softmax(scores, dim=0), v)

    assert names(diagnose(attention)) == ["softmax_axis"]


def test_the_number_of_threads_comes_back() -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        seen = []
        diagnose(lambda q, k, v: (seen.append(torch.get_num_threads()), q)[1])
        assert set(seen) == {1}
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
