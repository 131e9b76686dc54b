"""Public functions whose work is C's alone, without the frame of Python in between."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from .. import _cattn

_F = TypeVar("_F", bound=Callable[..., Any])


def shortcut(function: _F) -> _F:
    """Return a builtin that takes arguments as `function` does, and gives them to C itself.

    It has the name, signature and documentation of `function`, which it calls where arguments do not fit: then Python
    says why.
    """
    python: Any = function
    code = python.__code__
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    by_name = python.__kwdefaults__ or {}
    defaults = (*(python.__defaults__ or ()), *(by_name[name] for name in names[code.co_argcount :]))
    required = len(names) - len(defaults)
    shown = [f"={default!r}" for default in defaults]
    listed = [name + default for name, default in zip(names, [""] * required + shown, strict=True)]
    listed.insert(code.co_argcount, "*")
    text = f"{python.__name__}({', '.join(listed)})\n--\n\n{python.__doc__}"
    return _cattn._shortcut(function, text, names, defaults, code.co_argcount)
