"""Configuration of the documentation site. ``nox -s docs`` builds it.

The build needs cattn and the packages of the group "docs", and no network. The API reference comes from the docstrings.
The gallery shows the notebooks of ``examples/`` with their committed outputs.
"""

import inspect
import os
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))  # of benchmarks

os.environ["KERAS_BACKEND"] = "numpy"  # autodoc imports cattn.integrations.keras

import _build_time
import _site

import cattn

project = "cattn"
author = "the cattn contributors"
copyright = author  # noqa: A001 - Sphinx's name
version = release = cattn.__version__

extensions = [
    "myst_nb",
    "numpydoc",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "sphinx_design",
]
exclude_patterns = ["_build", "api/generated/*.txt"]
templates_path = ["_templates"]

# Every reference must have a target. Single backticks in a docstring are a reference or the name of a parameter.
nitpicky = True
default_role = "py:obj"
add_function_parentheses = False
python_maximum_signature_line_length = 60  # longer signatures have one parameter a line
MOST_PARAMETERS = 8  # of a signature that is not folded
toc_object_entries_show_parents = "hide"
smartquotes = False  # "lower_right" in a docstring is code, so its quotes must stay straight
highlight_language = "none"  # literal blocks in docstrings are formulas; Sphinx recognises examples by their >>>

# ---- pages ----
myst_enable_extensions = ["colon_fence", "deflist"]
myst_fence_as_directive = ["math"]  # GitHub, too, draws formulas of ```math
myst_heading_anchors = 3
nb_execution_mode = "off"  # `nox -s notebooks` executes the notebooks; the site shows their committed outputs
nb_ipywidgets_js = {}  # the default would load scripts from a CDN
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

# ---- API reference ----
autodoc_typehints = "none"  # the numpydoc sections give the types
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autosummary_generate = True
numpydoc_show_class_members = False  # the template for classes lists the members
numpydoc_xref_param_type = False
numpydoc_validation_checks = {
    "all",
    "ES01",  # an extended summary is not always necessary
    "EX01",  # tests/project/test_docs.py requires examples where they help
    "GL01",  # ruff requires the summary on the line of the opening quotes
    "PR08",  # a description may start with the name of a dtype, in lower case
    "RT01",  # one-line docstrings of methods have no Returns section
    "RT03",  # the type "ndarray" may be description enough
    "SA01",  # a See Also section is not required
}
# These docstrings are prose without sections: the reference and the law, results and a warning that users do not
# construct, the classes that only ONNX constructs, a mask that only transformers constructs, and the reports of
# cattn.testing.
numpydoc_validation_exclude = {
    r"^cattn\.(law|reference)",
    r"^cattn\.(Attention(Gradients|Output|Statistics|Tangents)|CausalAlignmentWarning|Explanation|HeadScores)$",
    r"^cattn\.LinearAttention(Gradients|Output)$",
    r"^cattn\.integrations\.onnx\.(Attention(Outputs)?|LinearAttention|CausalConvWithState)$",
    r"^cattn\.integrations\.transformers\.AttentionMask$",
    r"^cattn\.testing\.(Mistake|Report)$",
}

# ---- HTML ----
html_theme = "furo"
html_math_renderer = "mathml"
html_title = f"cattn {release}"
html_static_path = ["_static", "_views", "_pictures"]  # _build_time.py writes the last two
html_css_files = ["cattn.css"]
html_js_files = ["cattn.js"]
html_logo = html_favicon = "_pictures/logo.svg"
html_baseurl = ""  # the address of the site; with it, links to its pages show the card
pygments_dark_style = "github-dark"
html_copy_source = False
html_show_copyright = False
html_show_sphinx = False


def emphasise_parameters(app, what, name, obj, options, lines):
    """Replace references to an object's own parameters in its docstring by emphasis."""
    try:
        names = inspect.signature(obj).parameters
    except (TypeError, ValueError):
        return
    own = re.compile(rf"(?<![`:])`({'|'.join(names)})`(?!`)") if names else None
    lines[:] = [own.sub(r"*\1*", line) if own else line for line in lines]


def fold_parameters(found):
    """Fold the parameters of a long signature, so that the first sentence of the description is seen."""
    count = found[2].count('<em class="sig-param">') - found[2].count("-only-separator")
    if count <= MOST_PARAMETERS:
        return found[0]
    return f"{found[1]}<details><summary>{count} parameters</summary>{found[2]}</details>{found[3]}"


def edit_page(app, pagename, templatename, context, doctree):
    """Let names of headings break after underscores and points, fold long signatures, and name the card of the page."""
    heading = re.compile(r"<h[1-3]>(.*?)(?=<a class=\"headerlink\")", re.DOTALL)
    if "body" in context:
        signature = r'(<span class="sig-paren">\(</span>)(\s*<dl>.*?</dl>\s*)(<span class="sig-paren">\)</span>)'
        context["body"] = re.sub(signature, fold_parameters, context["body"], flags=re.DOTALL)
        if pagename.startswith("_modules/"):
            context["body"] = _site.name_targets(context["body"])
        context["body"] = heading.sub(lambda found: re.sub(r"([_.])(?=\w)", r"\1<wbr>", found[0]), context["body"])
    if app.config.html_baseurl:
        tags = {"og:title": context["title"], "og:image": f"{app.config.html_baseurl}_static/card.png"}
        lines = (f'<meta property="{name}" content="{text}">' for name, text in tags.items())
        context["metatags"] = context.get("metatags", "") + "\n".join(lines)


def setup(app):
    """Connect the hooks that edit docstrings and pages, and write the generated pages."""
    app.connect("autodoc-process-docstring", emphasise_parameters, priority=900)
    app.connect("html-page-context", edit_page)
    app.connect("config-inited", _build_time.write_pages)
    app.connect("build-finished", _site.check)
    app.connect("viewcode-follow-imported", _site.find_module)
    _site.setup(app)
