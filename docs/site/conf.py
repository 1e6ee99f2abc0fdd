"""Configuration of Sphinx, which makes a site of docs/: ``make docs``."""

from __future__ import annotations

import re
from pathlib import Path

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.application import Sphinx
from sphinx.writers.html5 import HTML5Translator

from tfscale.support.version import __version__

project = "tfscale"
author = "the authors of tfscale"
copyright = f"{author}. Apache License 2.0"
version = release = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
exclude_patterns = ["site", "images"]

myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 4  # the anchors that a git host gives to headings

autodoc_member_order = "bysource"
autodoc_typehints = "none"  # docstrings say in words what arguments are
python_maximum_signature_line_length = 88
autodoc_inherit_docstrings = False  # Keras's docstrings are not written for Sphinx

html_theme = "furo"  # it has a dark mode, and asks no other server for fonts or scripts
html_title = f"tfscale {release}"
html_static_path = ["style.css"]
html_css_files = ["style.css"]
html_copy_source = False
html_theme_options = {"top_of_page_buttons": []}
html_math_renderer = "mathml"  # browsers draw it by themselves; MathJax would be downloaded

LINK_OUTSIDE = re.compile(r"\[([^\]]+)\]\((\.\./[^)#]+)\)")
LISTED = re.compile(r"^- \[([^\]]+)\]\(([\w/.-]+)\.(?:md|rst)\)", re.MULTILINE)


def list_contents(app: Sphinx, page: str, source: list[str]) -> None:
    """Make the site's contents from two pages, which list all others under headings."""
    if page not in ("index", "benchmarks"):
        return
    for section in source[0].split("\n## ")[1:]:
        heading = section.split("\n", 1)[0]
        pages = "\n".join(f"{title} <{path}>" for title, path in LISTED.findall(section))
        if not pages:
            continue
        source[0] += f"\n```{{toctree}}\n:hidden:\n:caption: {heading}\n\n{pages}\n```\n"


def unlink_folders(app: Sphinx, page: str, source: list[str]) -> None:
    """Show folders of the repository by name alone: the site has copies of files only."""

    def linked(link: re.Match[str]) -> str:
        return link[1] if (Path(app.srcdir, page).parent / link[2]).is_dir() else link[0]

    source[0] = LINK_OUTSIDE.sub(linked, source[0])


def skip_foreign(
    app: Sphinx, what: str, name: str, found: object, skip: bool, options: object
) -> bool | None:
    """Leave out functions of others that are defaults, and fields of named tuples."""
    ours = (getattr(found, "__module__", None) or "tfscale").startswith("tfscale")
    generated = (getattr(found, "__doc__", None) or "").startswith("Alias for field number")
    return True if generated or not ours else None


def formula(html: HTML5Translator, node: nodes.math) -> None:
    """Write a formula within a line as MathML."""
    html.body.append(tex2mathml(node.astext()))
    raise nodes.SkipNode


def formula_block(html: HTML5Translator, node: nodes.math_block) -> None:
    """Write a formula that stands by itself as MathML."""
    html.body.append(f'<div class="formula">{tex2mathml(node.astext(), as_block=True)}</div>')
    raise nodes.SkipNode


def setup(app: Sphinx) -> None:
    """Connect this file to Sphinx."""
    app.connect("source-read", list_contents)
    app.connect("source-read", unlink_folders)
    app.connect("autodoc-skip-member", skip_foreign)
    app.add_html_math_renderer("mathml", (formula, None), (formula_block, None))
