"""Formulas as MathML, which browsers draw themselves: the pages need no script and no network.

docutils, on which Sphinx is built, has the converter.
"""

from typing import Any

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml


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
