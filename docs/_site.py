"""What Sphinx lacks for this site: formulas as MathML, links to the source, and a check of the built pages."""

import re
import sys
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.errors import PycodeError
from sphinx.pycode import ModuleAnalyzer
from sphinx.util import logging

import cattn


# ---- formulas, which browsers draw themselves: the pages need no script and no network -------------------------------
def visit_inline(translator: Any, node: nodes.math) -> None:
    """Write a formula within a line."""
    translator.body.append(tex2mathml(node.astext()))
    raise nodes.SkipNode


def visit_display(translator: Any, node: nodes.math_block) -> None:
    """Write a formula on lines of its own, which scroll on a narrow screen."""
    formula = tex2mathml(node.astext(), as_block=True)
    translator.body.append(translator.starttag(node, "div", CLASS="math-block") + formula + "</div>\n")
    raise nodes.SkipNode


def setup(app: Any) -> None:
    """Register the renderer; `html_math_renderer` selects it."""
    app.add_html_math_renderer("mathml", (visit_inline, None), (visit_display, None))


# ---- the check: each link within the site has a target, and each picture has a text ----------------------------------
class Page(HTMLParser):
    """The targets, links and pictures of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.pictures: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note what a tag has."""
        found = dict(attrs)
        self.ids.update(value for name in ("id", "name") if (value := found.get(name)))
        if tag == "a" and found.get("href"):
            self.links.append(found["href"] or "")
        if tag == "img" and not found.get("alt"):
            self.pictures.append(found.get("src") or "")


def problems(folder: Path) -> list[str]:
    """Return the dead links and the pictures without a text of all pages in a folder."""
    files = [path for path in sorted(folder.rglob("*.html")) if "_static" not in path.parts]  # views are no documents
    pages = {path.resolve(): Page(path.read_text(encoding="utf-8")) for path in files}
    found = []
    for path, page in pages.items():
        name = path.relative_to(folder.resolve())
        found += [f"{name}: {picture} has no alternative text" for picture in page.pictures]
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            missing = target in pages and parts.fragment and unquote(parts.fragment) not in pages[target].ids
            if missing or not target.exists():
                found.append(f"{name}: {link} has no target")
    return sorted(set(found))


def check(app: Any, error: Exception | None) -> None:
    """Warn of each problem after a build of HTML; `nox -s docs` fails for a warning."""
    if error is None and app.builder.name == "html":
        for problem in problems(Path(app.outdir)):
            logging.getLogger(__name__).warning(problem)


# ---- links from the API reference to the source ----------------------------------------------------------------------
# Functions and classes name the package as their module, so `sphinx.ext.viewcode` cannot find their files by itself.
WITHOUT = ("cattn.law", "cattn.reference", "cattn.integrations")  # their functions name their own modules


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
