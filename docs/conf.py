"""Configuration of the documentation site: ``sphinx-build -W --keep-going -b html docs docs/_build/html``.

The build needs the extra "docs", cattn itself and no network. The API reference comes from the docstrings, the
gallery from the notebooks of ``examples/`` with the outputs they were committed with.
"""

import inspect
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import _build_time

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
    "sphinx_copybutton",
    "sphinx_design",
]
exclude_patterns = ["_build", "api/generated/*.txt"]
templates_path = ["_templates"]

# Every reference must have a target. A single backtick in a docstring is a reference, or the name of a parameter.
nitpicky = True
default_role = "py:obj"
add_function_parentheses = False
toc_object_entries_show_parents = "hide"
smartquotes = False  # in a docstring "lower_right" is code
highlight_language = "none"  # literal blocks of docstrings are formulas; examples are known by their >>>

# ---- pages ----
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
nb_execution_mode = "off"  # the tests execute the notebooks; here their committed outputs are shown
nb_ipywidgets_js = {}  # these would come from a CDN
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

# ---- API reference ----
autodoc_typehints = "none"  # numpydoc says the types
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autosummary_generate = True
numpydoc_show_class_members = False  # the template of classes does
numpydoc_xref_param_type = False
numpydoc_validation_checks = {
    "all",
    "ES01",  # a summary may say it all
    "EX01",  # tests/test_docs.py asks for examples where they help
    "GL01",  # summaries start behind the quotes, as ruff wants it
    "PR08",  # descriptions may start with the name of a dtype
    "RT01",  # methods of one line
    "RT03",  # "ndarray" says it
    "SA01",
}
# Written as prose, and two whose parameters are nobody's concern.
numpydoc_validation_exclude = {
    r"^cattn\.reference",
    r"^cattn\.(AttentionGradients|AttentionOutput|CausalAlignmentWarning|Explanation)$",
    r"^cattn\.integrations\.onnx\.Attention(Outputs)?$",
}

# ---- HTML ----
html_theme = "furo"
html_title = f"cattn {release}"
html_static_path = ["_static"]
html_css_files = ["cattn.css"]
html_copy_source = False
html_show_copyright = False
html_show_sphinx = False


def emphasise_parameters(app, what, name, obj, options, lines):
    """Turn the names of an object's own parameters in its docstring from references into emphasis."""
    try:
        names = inspect.signature(obj).parameters
    except (TypeError, ValueError):
        return
    own = re.compile(rf"(?<![`:])`({'|'.join(names)})`(?!`)") if names else None
    lines[:] = [own.sub(r"*\1*", line) if own else line for line in lines]


def setup(app):
    """Make what is written elsewhere in the repository a part of the site."""
    app.connect("autodoc-process-docstring", emphasise_parameters, priority=900)
    app.connect("config-inited", _build_time.write_pages)
