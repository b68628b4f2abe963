"""The site: sphinx-build -W docs site. Pages are Markdown that also reads on GitHub; docstrings are
plain text."""

import re
import sys
from pathlib import Path

from docutils import nodes

sys.path.insert(0, str(Path(__file__).parents[1]))

from g2d_jax import __version__

project = "g2d_jax"
release = __version__
extensions = ["myst_parser", "sphinx.ext.autodoc"]
html_theme = "furo"
html_title = f"g2d_jax {release}"
html_show_copyright = False
html_static_path = ["_static"]
html_css_files = ["site.css"]
myst_heading_anchors = 4  # links to headings are GitHub's
smartquotes = False
autodoc_default_options = {"members": True}
autodoc_member_order = "bysource"
add_module_names = False
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 100


def plain(app, what, name, obj, options, lines):
    """Turn a docstring, plain text, into reStructuredText: between backticks is code, an indented
    paragraph a block."""
    paragraphs = re.split(r"\n{2,}", "\n".join(lines).strip("\n"))
    for i, paragraph in enumerate(paragraphs):
        if paragraph.startswith(" ") or "\n " in paragraph or "─►" in paragraph:
            paragraphs[i] = "::\n\n" + re.sub(r"^", "    ", paragraph, flags=re.MULTILINE)
        else:
            pieces = paragraph.split("`")  # every second one is code
            pieces[::2] = [re.sub(r"([\\*_|<>:])", r"\\\1", piece) for piece in pieces[::2]]
            paragraphs[i] = "``".join(pieces)
    lines[:] = "\n\n".join(paragraphs).split("\n")


def short(app, what, name, obj, options, signature, returns):
    """Leave the bounds of numbers out of signatures: Annotated[int, Bounds(…)] is int."""
    if signature:
        return re.sub(
            r"[\w.~]*Annotated\[(\w+), [\w.~]*Bounds\([^)]*\)\]", r"\1", signature
        ), returns


def settings(app, doctree):
    """Tell the site of the places that pages name as <a id="…">: links to them are checked then as
    those to headings are."""
    labels = app.env.domaindata["std"]["anonlabels"]
    for node in doctree.findall(nodes.raw):
        for anchor in re.findall(r'<a id="([^"]+)">', node.astext()):
            labels[f"{app.env.docname}#{anchor}"] = (app.env.docname, anchor)


def setup(app):
    """Register what reads docstrings, signatures and anchors."""
    app.connect("doctree-read", settings)
    app.connect("autodoc-process-docstring", plain)
    app.connect("autodoc-process-signature", short)
