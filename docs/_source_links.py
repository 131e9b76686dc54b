"""Where the public names are defined, for the links from the API reference to the source.

Functions and classes name the package as their module, so `sphinx.ext.viewcode` cannot find their files by itself.
"""

import re
import sys
from functools import cache
from typing import Any

from sphinx.errors import PycodeError
from sphinx.pycode import ModuleAnalyzer

import cattn

WITHOUT = ("cattn.reference", "cattn.integrations")  # their functions name their own modules


@cache
def homes() -> dict[str, str]:
    """Return the module that defines each public function and class of cattn."""
    found: dict[str, str] = {}
    public = {*cattn.__all__, *cattn.functional.__all__}
    for module in sorted(sys.modules):
        if module.startswith("cattn.") and not module.startswith(WITHOUT):
            try:
                analyzer = ModuleAnalyzer.for_module(module)
            except PycodeError:  # the extension module has no source in Python
                continue
            found.update({name: module for name in analyzer.find_tags() if name in public})
    return found


def name_targets(body: str) -> str:
    """Return a page of code whose links back to the API have the names of that page.

    viewcode gives all of them the module under which the first function of a file is documented.
    """
    return re.sub(r"(api/generated/((?:\w+\.)*)(\w+)\.html#)[\w.]*?\b\3\b", r"\1\2\3", body)


def find_module(app: Any, module: str, name: str) -> str | None:
    """Return the module that defines a name of cattn; None leaves the search to Sphinx."""
    return homes().get(name.partition(".")[0]) if module in ("cattn", "cattn.nn", "cattn.functional") else None
