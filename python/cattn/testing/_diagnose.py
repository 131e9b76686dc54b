"""`diagnose`: which mistake explains what a function returns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

from ._diagnosis import Diagnosis
from ._report import Report
from ._subject import (
    Masks,
    Subject,
    find_num_heads,
    find_projections,
    find_state,
    library_of,
    number_of_inputs,
    possible_heads,
    prepared,
    unknown_weights,
)

Kind = Literal["causal", "full", "multi_head", "multi_head_full"]
KINDS = ("causal", "full", "multi_head", "multi_head_full")


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
    kind : {"causal", "full", "multi_head", "multi_head_full"}
        What the function should compute. "causal": a token sees itself and the tokens before it. "full": all tokens see
        all. The other two are causal and full attention that split the columns of (B, T, num_heads * head_dim) arrays
        into heads themselves. The heads of a module are found in each kind.
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
    if isinstance(function, type):
        raise TypeError(
            f"function is the class {function.__name__}: make an object, diagnose({function.__name__}(...))"
        )
    if not callable(function):
        raise TypeError(f"function must be callable, got {type(function).__name__}")
    for name, given, allowed in (
        ("kind", kind, KINDS), ("ndim", ndim, (None, 2, 3, 4)), ("num_inputs", num_inputs, (None, 1, 3)),
        ("library", library, (None, "numpy", "torch")), ("alignment", alignment, (None, "upper_left", "lower_right")),
    ):  # fmt: skip
        if given not in allowed:
            raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}, got {given!r}")
    numbers: tuple[tuple[str, Any, int], ...] = (
        ("num_tokens", num_tokens, 4), ("width", width, 1), ("num_heads", num_heads, 1),
    )  # fmt: skip
    for name, number, least in numbers:
        if number is None and name != "num_tokens":
            continue
        if isinstance(number, bool) or not isinstance(number, int):
            raise TypeError(f"{name} must be an int, got {type(number).__name__}")
        if number < least:
            raise ValueError(f"{name} must be at least {least}, got {number}")
    for name, argument in (("mask", mask), ("padding", padding), ("dropout", dropout)):
        if argument is not None and not isinstance(argument, str):
            raise TypeError(f"{name} must be the name of an argument, a str, got {type(argument).__name__}")

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
    with prepared(function):
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
