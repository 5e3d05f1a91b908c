"""Sphinx: the book of the formats. Pages are rendered by docs/_generate before Sphinx reads them."""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from sphinx.writers.html5 import HTML5Translator  # noqa: E402

import mxref  # noqa: E402
from docs._generate import cards, pages  # noqa: E402

torch.set_num_threads(1)  # the tensors of a page are small

project = "mxref"
author = "the authors of mxref"
version = release = mxref.__version__
html_title = "mxref: the book of the formats"
html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["book.css"]
html_copy_source = False
html_show_copyright = False

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx_copybutton"]
exclude_patterns = ["_build", "_generate", "example_kernel"]
myst_enable_extensions = ["colon_fence", "deflist", "attrs_inline"]
myst_heading_anchors = 3
suppress_warnings = ["myst.xref_ambiguous"]
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True
copybutton_selector = "div:not(.output) > div.highlight > pre"

default_role = "code"  # docstrings mark code with single backticks
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_default_options = {"members": True}
python_maximum_signature_line_length = 90
python_use_unqualified_type_names = True

DECISIONS = "\n\n```{toctree}\n:hidden:\n:glob:\n\n[0-9]*\n```\n"  # the list of decisions is a page of its own


def render(app, docname, source):
    """Compute a page before it is parsed."""
    source[0] = pages.render(source[0], docname) + (DECISIONS if docname == "decisions/README" else "")


def plain_text(app, what, name, obj, options, lines):
    """Docstrings are prose with `code`: what reStructuredText would read as markup outside code is escaped."""
    if name.startswith("mxref.") and lines:
        lines[:] = [escape(line) for line in lines]


def escape(line: str) -> str:
    """`line` with bars, stars and trailing underscores outside backticks escaped; bullets and examples stay."""
    if line.lstrip().startswith(">>>") or set(line.strip()) <= set("|-: "):
        return line
    bullet, rest = re.match(r"(\s*(?:\* )?)(.*)", line).groups()
    parts = re.split(r"(`[^`]*`)", rest)
    return bullet + "".join(part if part.startswith("`") else re.sub(r"([|*]|_\b)", r"\\\1", part) for part in parts)


def setup(app):
    pages.write_generated_pages()
    app.set_translator("html", cards.translator(HTML5Translator))
    app.connect("source-read", render)
    app.connect("autodoc-process-docstring", plain_text)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
