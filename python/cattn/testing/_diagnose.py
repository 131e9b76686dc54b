"""`diagnose`: which mistakes explain the result of a function, and its checks by formulas, masks and leaks."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from . import _formulas, _properties
from ._formulas import Choices, Positions, Problem, Wrong, compute, formulas, matches, mistakes_of, scores_of
from ._function import (
    Masks,
    Probe,
    RefusedError,
    Subject,
    find_num_heads,
    find_projections,
    find_state,
    inner_batch_second,
    library_of,
    number_of_inputs,
    possible_heads,
    possible_positions,
    prepared,
    unknown_weights,
)
from ._properties import Dropout, differs
from ._report import Mistake, Report
from ._unnamed import fits, mask_mistake, possible_masks

Kind = Literal["causal", "full", "multi_head", "multi_head_full", "linear"]
KINDS = ("causal", "full", "multi_head", "multi_head_full", "linear")


def diagnose(
    function: Callable[..., Any],
    *,
    kind: Kind = "causal",
    num_heads: int | None = None,
    ndim: Literal[2, 3, 4] | None = None,
    num_inputs: Literal[1, 3] | None = None,
    num_tokens: int = 5,
    width: int | None = None,
    mask: str | None = None,
    padding: str | None = None,
    true_hides: bool = False,
    dropout: str | None = None,
    weights: Mapping[str, Any] | bool = True,
    library: Literal["numpy", "torch"] | None = None,
    dtype: Any = None,
    check_nan: bool = False,
    alignment: Literal["upper_left", "lower_right"] | None = None,
) -> Report:
    """Call an attention function or module on small inputs, and name its mistake.

    The results are compared with the right formula and with the formulas of known mistakes, each alone and up to three
    together. Where there is no formula, as for a module whose weights are not found, properties are checked: a token
    after it must not change a token's result.

    Parameters
    ----------
    function : callable
        ``function(query, key, value)``, ``function(x)``, or a module. It takes and returns NumPy arrays or PyTorch
        tensors; of a returned tuple the first is the output. A module is tested in evaluation mode, and for its dropout
        also in training mode; its mode is restored at the end.
    kind : {"causal", "full", "multi_head", "multi_head_full", "linear"}
        What the function should compute. "causal": a token sees itself and the tokens before it. "full": all tokens see
        all. The other two are causal and full attention that split the columns of (B, T, num_heads * head_dim) arrays
        into heads themselves. The heads of a module are found in each kind. "linear": causal attention without the
        softmax, by a state or by matrices, which is `cattn.linear_attention` without decay and beta. Its scores are
        divided by √d: of a function that does not, test the result divided by √d.
    num_heads : int, optional
        Number of heads into which the function splits its arrays. The default is the attribute ``num_heads`` or
        ``n_heads`` of a module. For a module without it, numbers up to 64 are tried. A function of kind "multi_head"
        needs it.
    ndim : {2, 3, 4}, optional
        The rank of the arrays: (T, D), (B, T, D) or (B, H, T, D). By default all are tested that the function takes,
        and it has to be right for all of them.
    num_inputs : {1, 3}, optional
        1 for ``function(x)``, 3 for ``function(query, key, value)``. The signature decides by default.
    num_tokens : int
        Number of tokens T. At least 4.
    width : int, optional
        Number of columns of the arrays, for functions that take one number only. A module's is found in its weights.
    mask : str, optional
        The name of the argument for a boolean mask (T, T). The function gets a mask by it, in addition to its kind.
    padding : str, optional
        The name of the argument for a boolean mask (B, T) of tokens.
    true_hides : bool
        Whether True in these masks means hidden, as in ``torch.nn.MultiheadAttention``. By default it means visible.
    dropout : str, optional
        The name of the argument for the dropout probability of a function. The dropout of modules is found.
    weights : mapping of str to array_like, or bool
        The arrays of query, key, value and output projections, in names that
        `cattn.CausalAttention.load_state_dict` knows. By default they come from the module. False checks properties
        only, for modules with positions, norms or windows, whose formula is another one.
    library : {"numpy", "torch"}, optional
        What the function takes. By default its code decides, and what it accepts.
    dtype : dtype, optional
        The dtype of the inputs. The default is a module's own, float32 for PyTorch and float64 for NumPy.
    check_nan : bool
        Whether it is a mistake that NaN in a hidden token reaches the results of others. Most attention has it,
        PyTorch's too.
    alignment : {"upper_left", "lower_right"}, optional
        Which query and key a causal function aligns if it takes fewer queries than keys: the first ones, as PyTorch
        does, or the last ones, as decoding with a cache needs. The other one is a mistake then. By default both are
        right, and a note tells of the upper left.

    Returns
    -------
    Report
        Its ``mistakes``, whether it is ``ok``, and ``raise_if_wrong()`` for tests.

    Raises
    ------
    TypeError, ValueError
        An argument of this function is wrong. What the tested function raises is part of the report.

    See Also
    --------
    cattn.testing.assert_attention_close : Whether the errors of a result are rounding errors.
    cattn.show_mask : Which query sees which keys.

    Examples
    --------
    >>> import numpy as np
    >>> from cattn.testing import diagnose
    >>> def attention(query, key, value):
    ...     scores = query @ key.T / np.sqrt(query.shape[-1])
    ...     scores[np.tri(len(query), dtype=bool)] = -np.inf
    ...     weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    ...     return weights / weights.sum(axis=-1, keepdims=True) @ value
    >>> report = diagnose(attention)
    >>> print(report.mistakes[0].text)
    The mask is inverted: a token sees the tokens after it, and not those before it.
    >>> report.mistakes[0].inputs["query"].shape
    (2, 1)
    >>> report.raise_if_wrong()
    Traceback (most recent call last):
        ...
    AssertionError: attention(query, key, value), causal: 1 mistake
    ...
    """
    choices: dict[str, Any] = {"kind": (kind, KINDS), "ndim": (ndim, (None, 2, 3, 4))}
    choices |= {"num_inputs": (num_inputs, (None, 1, 3)), "library": (library, (None, "numpy", "torch"))}
    choices |= {"alignment": (alignment, (None, "upper_left", "lower_right"))}
    numbers = {"num_tokens": (num_tokens, 4), "width": (width, 1), "num_heads": (num_heads, 1)}
    _check_arguments(function, choices, numbers, {"mask": mask, "padding": padding, "dropout": dropout})
    inputs = num_inputs or number_of_inputs(function)
    state = find_state(function) if weights is True else dict(weights) if isinstance(weights, Mapping) else {}
    named = num_heads or find_num_heads(function, state)
    heads = named or 1
    projects = inputs == 1 or hasattr(function, "state_dict") or isinstance(weights, Mapping)
    projections = find_projections(state, named) if projects else None
    if weights is True and inputs == 1 and unknown_weights(state):
        projections = None
    multi = kind.startswith("multi_head")
    splits = multi and inputs == 3 and projections is None
    if splits and num_heads is None and not hasattr(function, "num_heads"):
        raise ValueError(f'kind="{kind}" needs num_heads, the number of heads that the function makes')
    if isinstance(weights, Mapping) and projections is None:
        raise ValueError(
            "weights must hold query, key and value projections that num_heads divides, in names of load_state_dict"
        )
    if width is not None and splits and width % heads:
        raise ValueError(f"width must be a multiple of num_heads, {heads}, got {width}")
    ranks = (ndim,) if ndim else (3,) if splits else (2, 3) if inputs == 1 or projections else (2, 3, 4)
    libraries = [library] if library else library_of(function)
    masks = Masks(mask, padding, dropout, true_hides)
    with prepared(function), np.errstate(all="ignore"):
        runs: list[Diagnosis] = []
        for each in libraries:
            subject = Subject(function, inputs, masks, each, dtype)
            subject.heads = heads if splits else 1
            run = Diagnosis(
                subject, kind, heads, projections, num_tokens, width, check_nan=check_nan, alignment=alignment
            )
            if not run.find_ranks(ranks):
                runs.append(run)
                continue
            if projections is not None:
                run.find_formula([named] if named else possible_heads(projections))
            return run.report()
        return runs[0].report_refusal()


def _check_arguments(
    function: object, choices: dict[str, Any], numbers: dict[str, tuple[Any, int]], names: dict[str, str | None]
) -> None:
    if isinstance(function, type):
        raise TypeError(
            f"function is the class {function.__name__}: make an object, diagnose({function.__name__}(...))"
        )
    if not callable(function):
        raise TypeError(f"function must be callable, got {type(function).__name__}")
    for name, (given, allowed) in choices.items():
        if given not in allowed:
            raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}, got {given!r}")
    for name, (number, least) in numbers.items():
        if number is None and name != "num_tokens":
            continue
        if isinstance(number, bool) or not isinstance(number, int):
            raise TypeError(f"{name} must be an int, got {type(number).__name__}")
        if number < least:
            raise ValueError(f"{name} must be at least {least}, got {number}")
    for name, argument in names.items():
        if argument is not None and not isinstance(argument, str):
            raise TypeError(f"{name} must be the name of an argument, a str, got {type(argument).__name__}")


Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
SHAPES = {2: "(T, D)", 3: "(B, T, D)", 4: "(B, H, T, D)"}
_MOST = 3  # mistakes at a time
_COLUMNS = 16  # of the result that are compared first
_ROUNDED = 2.0**-7  # the largest error of a few roundings to halves, relative to the largest result
_GROUPS = "With 2 heads of keys and values, query heads 0 and 1 do not share the first one, and 2 and 3 the other one."
_UNKNOWN = "The result differs from attention in a way that no known mistake explains."


class Diagnosis(Probe):
    """One call of `diagnose` with arrays of one library."""

    def __init__(self, *probed: Any, check_nan: bool, alignment: str | None) -> None:
        super().__init__(*probed)
        self.check_nan = check_nan
        self.wanted = alignment
        self.ranks: list[int] = []
        self.wrong_ranks: list[int] = []
        self.refusals: dict[int, RefusedError] = {}
        self.mistakes: list[Mistake] = []
        self.notes: list[str] = []
        self.checked: list[str] = []
        self.not_checked: list[str] = []

    def find_ranks(self, ranks: tuple[int, ...]) -> bool:
        """Find the ranks of arrays that the function takes; return whether there is one."""
        for ndim in ranks:
            try:
                self.call(self.draw(self.shape(ndim), 0))
            except RefusedError as error:
                self.refusals[ndim] = error
            else:
                self.ranks.append(ndim)
        return bool(self.ranks)

    # ---- the whole ----
    @property
    def title(self) -> str:
        """What is tested, for the first line of the report."""
        function = self.subject.function
        name = getattr(function, "__name__", None) or type(function).__name__
        name = "the function" if name == "<lambda>" else name
        arguments = "x" if self.subject.num_inputs == 1 else "query, key, value"
        return f"{name}({arguments}), {self.kind.replace('_', ' ')}"

    def report_refusal(self) -> Report:
        """Return the report on a function that no arrays suit."""
        refusals = list(self.refusals.values())
        shown = [error for error in refusals if error.name == "wrong_shape"][:1]
        if not shown:  # one text for each kind of error
            shown = list({str(error).split(" for arrays")[0]: error for error in reversed(refusals)}.values())[::-1]
        text = " ".join(str(error) for error in shown)
        cure = "If it takes other arrays, say so by ndim=, num_inputs=, width= or num_tokens=."
        return Report((Mistake(shown[0].name, text, cure),), subject=self.title)

    def report(self) -> Report:
        """Check everything and return the report."""
        if (wrong := Dropout(self, self.ranks[-1]).without()) is not None:
            self.mistakes.append(wrong)
        elif self.is_repeatable():
            for ndim in self.ranks:
                self.check_rank(ndim)
            if not self.mistakes:
                Dropout(self, self.ranks[-1]).check()
        if self.subject.changed_inputs:
            text = "It changes its inputs in place."
            cure = "Compute with a copy, or without += and masked_fill_."
            self.mistakes.append(Mistake("changes_inputs", text, cure))
        first: dict[str, Mistake] = {}  # the same mistake for arrays of another rank is not told again
        for mistake in self.mistakes:
            first.setdefault(mistake.name if mistake.name == "different" else mistake.text, mistake)
        if self.subject.swaps and 3 in self.ranks:
            self.notes.append("batch_first is False, so it was given arrays of (T, B, D)")
        if 0 < len(self.wrong_ranks) < len(self.ranks):
            shapes = " and ".join(SHAPES[ndim] for ndim in self.wrong_ranks)
            self.notes.append(f"it is wrong only for arrays of {shapes}; if it is not meant for them, say so by ndim=")
        if self.ranks and self.checked:
            self.checked[0] = f"arrays of {', '.join(SHAPES[ndim] for ndim in self.ranks)}: {self.checked[0]}"
        return Report(
            tuple(first.values()), tuple(dict.fromkeys(self.notes)), tuple(self.checked),
            tuple(dict.fromkeys(self.not_checked)), self.title,
        )  # fmt: skip

    def has_checked(self, what: str) -> None:
        """Remember what was checked."""
        if what not in self.checked:
            self.checked.append(what)

    def is_repeatable(self) -> bool:
        """Return whether two calls agree."""
        shown = self.draw(self.shape(self.ranks[-1]), 0)
        if (found := self.two_results(shown)) is None:
            return True
        for small in self.small_inputs(self.ranks[-1]):
            try:
                other = self.two_results(small)
            except RefusedError:
                continue
            if other is not None and other[0] == found[0]:
                shown, found = small, other
                break
        name, one, another = found
        mode = "In evaluation mode two" if hasattr(self.subject.function, "eval") else "Two"
        why = "dropout, or a state kept from the call before." if self.subject.pristine is None else "by dropout."
        cure = "Drop in training only: nn.Dropout, or F.dropout(weights, p, training=self.training)."
        if not hasattr(self.subject.function, "eval"):
            cure = "Give it an argument that turns dropout off; to test dropout itself, name that argument by dropout=."
        if name == "keeps_state":
            why = "a state is kept from the call before."
            cure = "Start each call with a new state, or take the state as an argument and return it."
        named = self.named(shown) | {"one call": one, "another": another}
        self.mistakes.append(Mistake(name, f"{mode} calls with the same arguments differ: {why}", cure, named))
        self.not_checked.append("all else, because two calls differ")
        return False

    def two_results(self, inputs: tuple[Floats, ...]) -> tuple[str, Floats, Floats] | None:
        """Return two results that should be equal and are not, and the name of the mistake."""
        for name, runs in (("keeps_state", ((77, 1), (78, 1))), ("dropout_in_evaluation", ((77, 1), (77, 2)))):
            one, another = (self.call_untouched(self.draw_like(inputs, drawn), inputs, seed) for drawn, seed in runs)
            if one is not None and another is not None and differs(one, another, self.subject.tolerance).any():
                return name, one, another
        first, _, *others = (self.call(each) for each in (inputs, self.draw_like(inputs, 77), *[inputs] * 3))
        other = next((each for each in others if not np.array_equal(each, first, equal_nan=True)), None)
        if other is None:
            return None
        return "keeps_state" if self.keeps_state(inputs) else "dropout_in_evaluation", first, other

    def keeps_state(self, inputs: tuple[Floats, ...]) -> bool:
        """Return whether values of 0 alone give a result other than 0, which no dropout does."""
        if self.subject.num_inputs == 1 or self.projections is not None:  # a bias may be in the result
            return False
        self.call(inputs)
        after = self.call((*inputs[:-1], np.zeros_like(inputs[-1])))
        return bool(np.isfinite(after).all() and after.any())

    def check_rank(self, ndim: int) -> None:
        """Compare with formulas, or check properties, for arrays of one rank."""
        names = self.subject.masks
        before = len(self.mistakes)
        known = self.subject.num_inputs == 3 or self.projections is not None or self.is_plain(ndim)
        for name, wanted in (("mask", names.mask), ("padding", names.padding)):
            if wanted is not None and len(self.mistakes) == before and not (name == "padding" and ndim == 2):
                self.check_masked(ndim, name, known)
        if len(self.mistakes) == before and known:
            self.compare(ndim)
            self.has_checked("formulas")
            if len(self.mistakes) == before and self.subject.num_inputs == 3 and self.projections is None:
                if not self.linear:
                    self.check_lengths(ndim)
                self.check_groups(ndim)
        elif len(self.mistakes) == before:
            found = _properties.check(self.call_of_x, self.shape(ndim), self.causal, self.subject.tolerance)
            for wrong, x, got, right in found:
                self.mistakes.append(Mistake(wrong.name, wrong.text, wrong.cure, {"x": x}, got, right))
            self.has_checked("properties")
        if not known:
            why = (
                "the projections are not known: pass them as weights={'W_query': ..., 'W_key': ..., 'W_value': ...}"
                if self.is_only_attention() else "other layers stand around them: diagnose the attention inside"
            )  # fmt: skip
            self.not_checked.append(f"scale, order of heads, query, key and value, because {why}")
        if len(self.mistakes) == before and not self.linear and (large := self.large(ndim, known)) is not None:
            self.mistakes.append(large)
        if len(self.mistakes) == before and (self.causal or (names.padding is not None and ndim > 2)):
            self.check_leaks(ndim)
        if len(self.mistakes) > before:
            self.wrong_ranks.append(ndim)

    def is_plain(self, ndim: int) -> bool:
        """Return whether function(x) is attention of x itself, right or wrong, without projections."""
        inputs = self.draw(self.shape(ndim), 1)
        return self.explain(inputs, {}) is not None

    def find_formula(self, numbers: list[int]) -> None:
        """Take the number of heads, and the positions, with which a formula gives the results for one sequence."""
        assert self.projections is not None
        before = self.num_heads, None
        inputs = self.draw(self.shape(self.ranks[-1], lead=1), 1)
        places: list[Positions | None] = [None, *possible_positions(self.subject.function)]
        for most, (positions, number) in itertools.product(range(_MOST), itertools.product(places, numbers)):
            self.num_heads, self.positions = number, positions
            d = self.projections.weights[0].shape[1] // number
            if positions is not None and (most == 2 or (positions.name == "rotary" and d % 2)):
                continue
            try:
                chosen = self.explain(inputs, {}, most)
            except RefusedError:  # it takes another number of sequences
                break
            if chosen is not None and positions is not None:
                self.notes.append(f"the scores depend on positions: {positions}")
            if chosen is not None:
                return
        self.num_heads, self.positions = before

    # ---- formulas ----
    def explain(
        self, inputs: tuple[Floats, ...], masks: dict[str, Any], most: int = _MOST, seen: Bools | None = None
    ) -> dict[str, Any] | None:
        """Return the choices of the formula that gives the function's result for these inputs and for others."""
        got, problem = self.call(inputs, **masks), self.problem(inputs, **masks)._replace(seen=seen)
        columns, first = slice(None), problem
        if self.projections is not None and self.projections.out is not None:  # a wide output projection takes long
            columns, first = slice(_COLUMNS), problem._replace(finish=self.projections.narrowed(_COLUMNS).finish)
        for chosen in formulas(problem, most):
            part, rows = compute(first, chosen)
            fits_part = matches(got[..., columns], part[..., columns], rows, 10 * self.subject.tolerance)
            if fits_part and self.agrees(inputs, masks, chosen, seen):
                return chosen
        return None

    def agrees(self, inputs: tuple[Floats, ...], masks: dict[str, Any], chosen: Choices, seen: Bools | None) -> bool:
        """Return whether a formula gives the function's result for these inputs and for others."""
        for each in (inputs, self.draw_like(inputs, 77)):
            problem = self.problem(each, **masks)._replace(seen=seen)
            if not matches(self.call(each, **masks), *compute(problem, chosen), self.subject.tolerance):
                return False
        return True

    def compare(self, ndim: int, **masks: Any) -> None:
        """Compare with the formulas, and add the mistakes."""
        inputs = self.draw(self.shape(ndim), 1)
        chosen = self.explain(inputs, masks)
        if chosen is not None:
            self.add([(wrong, chosen) for wrong in mistakes_of(chosen)], ndim, masks)
            return
        mixed = _properties.mixes_batch(lambda *a: self.call(a, **masks), inputs, self.subject.tolerance)
        if mixed and not masks:
            self.add([(self.batch_mixed(), None)], ndim, masks, lead=2)
            alone = self.draw(self.shape(ndim, lead=1), 1)
            chosen = self.explain(alone, masks)
            if chosen is not None:
                self.add([(wrong, chosen) for wrong in mistakes_of(chosen)], ndim, masks, lead=1)
            return
        self.add_unlisted(inputs, ndim, masks)

    def add_unlisted(self, inputs: tuple[Floats, ...], ndim: int, masks: dict[str, Any]) -> None:
        """Add the mistakes of a result that no listed formula explains, and show who sees whom where that is wrong."""
        problem, T = self.problem(inputs, **masks), inputs[-1].shape[-2]
        if not np.isfinite(self.call(inputs, **masks)).all(axis=-1).any():
            self.add([(self.unknown(inputs, masks, True), None)], ndim, masks)
            return
        wanted = np.broadcast_to(_formulas.visible_keys(problem, {}, T, T), (*problem.query.shape[:1], 1, T, T))[-1, 0]
        seen = _properties.influence(lambda *a: self.call(a, **masks), self.subject.tolerance, *inputs)
        same, wrongs = np.array_equal(seen, wanted), self.fitted(inputs, masks)
        for mask in [] if same or masks or wrongs else possible_masks(seen, wanted, len(inputs) == 1):
            chosen = self.explain(inputs, {}, _MOST - 1, mask)
            others = self.fitted(inputs, {}, mask) if chosen is None else mistakes_of(chosen)
            if others or chosen is not None:
                wrongs = [mask_mistake(mask, wanted), *others]
                break
        if not wrongs and (seen & ~wanted).any():
            text = "A token sees tokens after it: by the mask, or because tokens are mixed before or after the softmax."
            wrongs = [Wrong("sees_future", text) if self.causal and not masks else _properties.SOME]
        if not wrongs and not self.linear and len(inputs) == 3 and self.projections is None:
            zeros, ones = (self.call((*inputs[:-1], np.full_like(inputs[-1], n)), **masks) for n in (0.0, 1.0))
            if not zeros.any() and not matches(ones, zeros + 1, compute(problem, {})[1], self.subject.tolerance):
                wrongs = [_properties.ROW_SUMS]
        wrongs = wrongs or [self.unknown(inputs, masks, same)]
        self.add([(wrong, None) for wrong in wrongs], ndim, masks, seen=None if same else (seen, wanted))

    def fitted(self, inputs: tuple[Floats, ...], masks: dict[str, Any], seen: Bools | None = None) -> list[Wrong]:
        """Return the mistake of a formula with a fitted number, if it gives the result for other inputs, too."""
        problem = self.problem(inputs, **masks)._replace(seen=seen)
        found = fits(problem, self.call(inputs, **masks))
        return [wrong for chosen, wrong in found if self.agrees(inputs, masks, chosen, seen)][:1]

    def batch_mixed(self) -> Wrong:
        """Return the mistake of mixed entries of a batch; PyTorch's module inside may be the cause."""
        inner = None if self.subject.swaps else inner_batch_second(self.subject.function)
        if inner is None:
            return _properties.BATCH
        cure = f"{inner} inside has batch_first=False and takes (T, B, D): make it with batch_first=True."
        return _properties.BATCH._replace(cure=cure)

    def unknown(self, inputs: tuple[Floats, ...], masks: dict[str, Any], same: bool) -> Wrong:
        """Return a sentence for a result that no formula explains."""
        got, (right, rows) = self.call(inputs, **masks), compute(self.problem(inputs, **masks), {})
        wrong = rows & ~np.isclose(got, right, rtol=0, atol=self.subject.tolerance * np.abs(right).max()).all(axis=-1)
        largest = float(np.abs(got - right)[rows].max(initial=0.0))
        text = f"{_UNKNOWN} {wrong.sum()} of {rows.sum()} rows differ, by up to {largest:.2g}."
        if not np.isfinite(got[rows]).all():
            text = f"{_UNKNOWN} {(~np.isfinite(got).all(axis=-1)).sum()} of {rows.size} rows hold NaN or infinity."
        cure = ""
        first = wrong.reshape(-1, wrong.shape[-1])[:, 0]
        if largest <= _ROUNDED * np.abs(right[rows]).max(initial=0.0):
            text += " These are errors of the size of float16 or bfloat16: is something rounded to it inside?"
        elif same and self.causal and not masks and wrong.any() and not first.any():
            text += " The first token, which sees only itself, agrees: rotary positions, or another bias of the scores?"
        if self.projections is not None:
            cure = "If it also has positions, norms or a window, weights=False checks its properties without a formula."
        return Wrong("different", text, cure)

    def add(
        self,
        wrongs: list[tuple[Wrong, dict[str, Any] | None]],
        ndim: int,
        masks: dict[str, Any],
        lead: int | None = None,
        seen: tuple[Bools, Bools] | None = None,
    ) -> None:
        """Add mistakes with the smallest input that shows them, and with who sees whom."""
        if not wrongs:
            return
        chosen = wrongs[0][1]
        shown = self.draw(self.shape(ndim), 1)
        given = masks
        for small in self.small_inputs(ndim, (1, 2) if lead is None else (lead,)):
            small_masks = self.masks_like(masks, small[0].shape)
            problem = self.problem(small, **small_masks)
            try:
                got = self.call(small, **small_masks)
            except RefusedError:
                continue
            right, rows = compute(problem, {})
            if not rows.any() or matches(got, right, rows, self.subject.tolerance):
                continue
            explained = chosen is None or matches(got, *compute(problem, chosen), self.subject.tolerance)
            if explained and all(self.tells(problem, got, w, chosen) for w, _ in wrongs):
                shown, given = small, small_masks
                break
        got, (right, _) = self.call(shown, **given), compute(self.problem(shown, **given), {})
        named = self.named(shown) | dict(given)
        known = right if np.isfinite(right).any() else None
        self.mistakes += [Mistake(w.name, w.text, w.cure, named, got, known, *(seen or ())) for w, _ in wrongs]

    def tells(self, problem: Problem, got: Floats, wrong: Wrong, chosen: dict[str, Any] | None) -> bool:
        """Return whether an input shows a mistake: without it the result would be another."""
        if chosen is None:
            return True
        for step in chosen:
            if mistakes_of({step: chosen[step]})[0] == wrong:
                without = {name: picked for name, picked in chosen.items() if name != step}
                return not matches(got, *compute(problem, without), self.subject.tolerance)
        return True

    # ---- other shapes and large numbers ----
    def check_lengths(self, ndim: int) -> None:
        """Compare with the formula for fewer queries than keys, if the function takes them."""
        masked = self.subject.masks.mask is not None or self.subject.masks.padding is not None
        for T_q in () if masked else (3, 1):
            query, *rest = self.draw(self.shape(ndim), 3)
            inputs = (query[..., :T_q, :], *rest)
            self.alignment = self.wanted or "lower_right"
            found = self.explain_other(inputs)
            if found is None:
                continue
            what = f"with {T_q} {'queries' if T_q > 1 else 'query'} and {self.T} keys"
            if not found:
                self.notes.append(f"{what} the result is another one, which no known mistake explains")
            for wrong in found[:1]:
                if wrong.name in ("upper_left", "lower_right") and self.wanted is None:
                    self.notes.append(f"{wrong.name}: {what}, {wrong.text[0].lower()}{wrong.text[1:]} {wrong.cure}")
                else:
                    text = f"{what[0].upper()}{what[1:]}: {wrong.text}"
                    got, (right, _) = self.call(inputs), compute(self.problem(inputs), {})
                    self.mistakes.append(Mistake(wrong.name, text, wrong.cure, self.named(inputs), got, right))
            return

    def check_groups(self, ndim: int) -> None:
        """Compare with the formula for key and value of fewer heads than the query, if the function takes them."""
        if ndim < 4 or self.mistakes:
            return
        for T, D in ((2, 1), (3, 2), (self.T, self.width or self.shape(ndim)[-1])):
            shape = (1, 4, T, self.width or D)
            query, key, value = self.draw(shape, 9)
            inputs = (query, key[:, :2], value[:, :2])
            found = self.explain_other(inputs)
            if found is None or (not found and T < self.T):
                continue
            found = found or [_formulas.GROUPS["tiled"]._replace(text=_GROUPS)]
            got, (right, _) = self.call(inputs), compute(self.problem(inputs), {})
            self.mistakes += [Mistake(w.name, w.text, w.cure, self.named(inputs), got, right) for w in found]
            return

    def explain_other(self, inputs: tuple[Floats, ...]) -> list[Wrong] | None:
        """Return the mistakes for inputs of other shapes, [] if unknown; None if it is right or refuses them."""
        try:
            got = self.call(inputs)
        except RefusedError:
            return None
        if matches(got, *compute(self.problem(inputs), {}), self.subject.tolerance):
            return None
        chosen = self.explain(inputs, {}, 2)
        return [] if chosen is None else mistakes_of(chosen)

    def large(self, ndim: int, known: bool) -> Mistake | None:
        """Return the mistake if the result is wrong where scores are so large that exp(score) is infinite."""
        sizes = {"float64": 900.0, "float32": 900.0, "bfloat16": 400.0, "float16": 40.0}
        dtype = str(self.subject.dtype).removeprefix("torch.")

        def test(shape: tuple[int, ...], masks: dict[str, Any], sign: float = 1.0) -> Mistake | None:
            query, *others = self.draw((*shape[:-2], 1, shape[-1]), 10)
            noise = self.draw(shape, 11)
            centre = (
                query,
                *([sign * query, others[-1]] if others else []),
            )  # scores are far from 0, and close together
            inputs = tuple(middle + 0.01 * array for middle, array in zip(centre, noise, strict=True))
            scores = np.abs(scores_of(self.problem(inputs))).max() if known else 1.0
            factor = (sizes.get(dtype, 40.0) / max(scores, 1e-6)) ** 0.5 if known else 100.0
            inputs = tuple(factor * array if i < 2 or known else array for i, array in enumerate(inputs))
            got = self.call(inputs)
            right, rows = compute(self.problem(inputs), {}) if known else (got, np.ones(got.shape[:-1], np.bool_))
            if not np.isfinite(got[rows]).all():
                text = "With large scores the result is NaN or infinite: exp(score) overflows."
                cure = "Subtract the maximum of each row first: np.exp(scores - scores.max(axis=-1, keepdims=True))."
                shown = right if known else None
                return Mistake("softmax_overflows", text, cure, self.named(inputs), got, shown)
            loose = max(self.subject.tolerance, 0.01)
            if not known or dtype not in ("float64", "float32") or matches(got, right, rows, loose):
                return None
            if not self.causal:
                return Mistake(
                    "different", f"{_UNKNOWN} It is right for small scores.", "", self.named(inputs), got, right
                )
            text = "With large scores, hidden tokens have weight."
            cure = "Fill hidden scores with -inf, or a number like -1e9, not with one that scores can reach."
            return Mistake("hidden_has_weight", text, cure, self.named(inputs), got, right)

        if not known and dtype in ("float16", "bfloat16"):  # products may overflow, too
            return None
        try:
            return self.smallest(ndim, test, {}) or self.smallest(ndim, functools.partial(test, sign=-1.0), {})
        except RefusedError as error:
            return Mistake(error.name, f"With large scores: {error}")

    # ---- masks ----
    def check_masked(self, ndim: int, name: str, known: bool) -> None:
        """Check a mask that the function is given as an argument."""
        shape = self.shape(ndim)
        masks = self.example_mask(name, shape)
        try:
            if known:
                self.compare(ndim, **masks)
            else:
                call = functools.partial(self.call_of_x, **masks)
                found = _properties.check_hidden(call, shape, masks, self.causal, self.subject.tolerance)
                if found is not None:
                    wrong, x, got = found
                    self.mistakes.append(Mistake(wrong.name, wrong.text, wrong.cure, {"x": x, **masks}, got))
        except RefusedError as error:
            argument = getattr(self.subject.masks, name)
            size = "(T, T)" if name == "mask" else "(B, T)"
            self.mistakes.append(Mistake(error.name, f"With {argument}= of {size}: {error}"))
        self.has_checked(name)

    def poisoned(
        self, shape: tuple[int, ...], masks: dict[str, Any], numbers: tuple[float, float]
    ) -> tuple[tuple[Floats, ...], Any]:
        """Return inputs whose hidden keys and values are multiplied by these numbers, and the index of other rows."""
        inputs = tuple(np.round(array, 1) for array in self.draw(shape, 2))
        hidden: Any = np.s_[..., -1, :]
        kept: Any = np.s_[..., :-1, :]
        if "padding" in masks:
            place = self.padded(shape[-2], int(masks["padding"][-1].sum()))
            rest = slice(place.stop, None) if self.causal else slice(place.start)
            hidden, kept = np.s_[-1, ..., place, :], np.s_[-1, ..., rest, :]
        for array, number in zip(inputs[-2:], numbers[-len(inputs) :], strict=False):
            array[hidden] *= number
        return inputs, kept

    def leak(self, shape: tuple[int, ...], masks: dict[str, Any]) -> Mistake | None:
        """Return the mistake if large numbers in hidden tokens change the others."""
        before, kept = self.poisoned(shape, masks, (1.0, 1.0))
        changed, _ = self.poisoned(shape, masks, (3.0, 1000.0))
        first, second = self.call(before, **masks), self.call(changed, **masks)
        size = np.abs(first[kept]).max(initial=0.0)
        difference = np.abs(second[kept] - first[kept]).max(initial=0.0)
        if difference <= self.subject.tolerance * size or not np.isfinite(first).all():
            return None
        named = self.named(changed) | masks
        what = "padding" if masks else "the last token"
        text = f"Hidden tokens have a small weight: larger numbers in {what} change the results of others."
        cure = "Fill hidden scores with -inf, or a number like -1e9, not with one that scores can reach."
        return Mistake("hidden_has_weight", text, cure, named, second, None)

    def nan_leak(self, shape: tuple[int, ...], masks: dict[str, Any]) -> Mistake | None:
        """Return the mistake if NaN in hidden tokens reaches the others."""
        changed, kept = self.poisoned(shape, masks, (np.nan, np.nan))
        after = self.call(changed, **masks)
        if np.isfinite(after[kept]).all():
            return None
        what = "padding" if masks else "the last token"
        text = f"NaN in {what} reaches tokens that do not see it, because 0 * NaN is NaN."
        cure = "Leave hidden keys out, as cattn does, or set their values to 0: np.where(visible, value, 0)."
        return Mistake("nan_leaks", text, cure, self.named(changed) | masks, after, None)

    def smallest(self, ndim: int, test: Callable[..., Mistake | None], masks: dict[str, Any]) -> Mistake | None:
        """Return the mistake that a test finds in the full inputs, with the smallest inputs that show it."""
        if (whole := test(self.shape(ndim), masks)) is None:
            return None
        depth = None if self.width else self.num_heads if self.splits else 1
        for T in range(2, self.T):
            shape = self.shape(ndim, T=T, lead=1, depth=depth)
            try:
                found = test(shape, self.masks_like(masks, shape))
            except RefusedError:
                continue
            if found is not None and found.text == whole.text:
                return found
        return whole

    def check_leaks(self, ndim: int) -> None:
        """Check that large numbers, and NaN, in hidden tokens do not reach the others."""
        masks: dict[str, Any] = {}
        if self.subject.masks.padding is not None and ndim > 2:
            masks = self.example_mask("padding", self.shape(ndim))
        self.has_checked("leaks of hidden tokens")
        if (leak := self.smallest(ndim, self.leak, masks)) is not None:
            self.mistakes.append(leak)
            return
        if not self.check_nan:
            return
        try:
            leak = self.smallest(ndim, self.nan_leak, masks)
        except RefusedError:  # a function may refuse NaN
            return
        if leak is not None:
            self.mistakes.append(leak)
