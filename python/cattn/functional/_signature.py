"""Public functions whose work is done in C: their Python definitions are the signature and the documentation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from .. import _cattn
from .._input.names import with_hints

_F = TypeVar("_F", bound=Callable[..., Any])


def implemented_in_c(function: _F) -> _F:
    """Return the builtin that takes the place of `function`, whose body is empty.

    The builtin has the name, signature and documentation of `function`. It calls `function` only if the arguments do
    not bind, for the TypeError that Python raises then, with a hint.
    """
    python: Any = function
    code = python.__code__
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    by_name = python.__kwdefaults__ or {}
    defaults = (*(python.__defaults__ or ()), *(by_name[name] for name in names[code.co_argcount :]))
    required = len(names) - len(defaults)
    shown = [f"={default!r}" for default in defaults]
    listed = [name + default for name, default in zip(names, [""] * required + shown, strict=True)]
    if code.co_kwonlyargcount:
        listed.insert(code.co_argcount, "*")
    text = f"{python.__name__}({', '.join(listed)})\n--\n\n{python.__doc__}"
    refusing: Any = with_hints(function)
    builtin: _F = _cattn._register(refusing, text, names, defaults, code.co_argcount)
    return builtin
