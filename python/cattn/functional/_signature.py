"""Public functions whose work is done in C: their Python definitions are the signature and the documentation."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from .. import _cattn
from .._input.doors import why_refused
from .._input.names import with_hints
from ._options import DEFAULTS, TEXTS

_F = TypeVar("_F", bound=Callable[..., Any])

_HEADING = "Other Parameters\n----------------\n"
_ENTRY = re.compile(r"^(\w+(?:, \w+)*) : .*\n(?:    .*\n?)+", re.MULTILINE)


def _entries(section: str) -> dict[tuple[str, ...], str]:
    """Return the entries of a section of parameters by the names in their first lines."""
    return {tuple(entry[1].split(", ")): entry[0].rstrip("\n") for entry in _ENTRY.finditer(section)}


def _document(text: str, options: set[str], table: Sequence[str]) -> str:
    """Return the documentation with an entry for each option, in the order of the table: its own, or the common one."""
    before, heading, after = inspect.cleandoc(text).partition(_HEADING)
    section, _, after = after.partition("\n\n")
    if not heading:
        before, raises, after = before.partition("Raises\n------\n")
        after = raises + after
    own = _entries(section)
    left = options.difference(*own)
    entries = own | {names: entry for names, entry in _entries(TEXTS).items() if left.issuperset(names)}
    in_order = [entries[names] for names in sorted(entries, key=lambda names: table.index(names[0]))]
    return "\n".join([f"{before}{_HEADING}{in_order[0]}", *in_order[1:], "", after, ""])


def implemented_in_c(function: _F) -> _F:
    """Return the builtin that takes the place of `function`, whose body is empty.

    The builtin has the name, signature and documentation of `function`. The place of `**options` take the options of
    attention in the table in C that are no parameters, and that `function` does not refuse. The builtin calls a
    function of Python only if the arguments do not bind, for the TypeError that Python raises then, with a hint.
    """
    python: Any = function
    code, document = python.__code__, python.__doc__
    given = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    positional, keywords = given[: code.co_argcount], list(given[code.co_argcount :])
    defaults = dict(zip(reversed(positional), reversed(python.__defaults__ or ()), strict=False))
    defaults |= python.__kwdefaults__ or {}
    if code.co_flags & inspect.CO_VARKEYWORDS:
        table = _cattn._arguments(python.__name__)
        options = [name for name in table if name not in given and why_refused(function, name) is None]
        defaults |= {name: DEFAULTS.get(name) for name in options}
        keywords = sorted([*keywords, *options], key=table.index)
        document = document and _document(document, set(options), table)
    names = (*positional, *keywords)
    listed = [f"{name}={defaults[name]!r}" if name in defaults else name for name in names]
    if keywords:
        listed.insert(len(positional), "*")
    text = f"{python.__name__}({', '.join(listed)})"
    place: dict[str, Any] = {"__name__": python.__module__}
    exec(f"def {text}: ...", place)  # a function that Python calls with the errors of this signature
    refusing: Any = with_hints(place[python.__name__])
    in_order = tuple(defaults[name] for name in names if name in defaults)
    builtin: _F = _cattn._register(refusing, f"{text}\n--\n\n{document}", names, in_order, len(positional))
    return builtin
