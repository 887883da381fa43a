"""The documentation site: the repository's own pages, and a reference made from the docstrings."""

import re
from pathlib import Path

from sphinx.application import Sphinx

from st_colbert_losses import __version__

project = "st_colbert_losses"
release = __version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]

# The pages stay where they are read on GitHub, so the source is the whole repository and README.md the home page.
root_doc = "README"
include_patterns = ["*.md", "docs/**.md", "training_recipes/**.md", "model_cards/**.md"]
exclude_patterns = [".*", "output", "site", "trained_models"]
myst_heading_anchors = 3

# Pages by name, the benchmarks last.
CONTENTS = """
```{toctree}
:hidden:
:glob:
:caption: Use

docs/[!b]*
docs/benchmarks
training_recipes/README
model_cards/README
A card <model_cards/stdlib-docstrings-colbert/README>
```
```{toctree}
:hidden:
:caption: Reference

docs/reference/losses
docs/reference/pipeline
docs/reference/memory
docs/reference/scores
```
```{toctree}
:hidden:
:caption: Project

CONTRIBUTING
CHANGELOG
```
"""

# Documented on other sites; to link them takes the network.
nitpick_ignore_regex = [("py:class", r"(torch|nn|collections)\..+|Tensor")]
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
napoleon_custom_sections = ["Inputs"]
napoleon_use_ivar = True
maximum_signature_line_length = 90
html_theme = "furo"
html_title = f"{project} {release}"
html_copy_source = False
html_show_copyright = False
html_static_path = ["_static"]
html_css_files = ["numbers.css"]


def adapt(app: Sphinx, docname: str, source: list[str]) -> None:
    """Give the home page its contents, which GitHub would show as code, and links to a folder its README.md."""
    source[0] = re.sub(r"\]\(([^):]+/)\)", r"](\1README.md)", source[0])
    if docname == root_doc:
        source[0] += CONTENTS


def add_index(app: Sphinx, exception: Exception | None) -> None:
    """Lead from index.html, where a server looks, to the home page."""
    refresh = f'<!doctype html><meta http-equiv="refresh" content="0; url={root_doc}.html">\n'
    Path(app.outdir, "index.html").write_text(refresh, encoding="utf-8")


def setup(app: Sphinx) -> None:
    """Connect the two."""
    app.connect("source-read", adapt)
    app.connect("build-finished", add_index)
