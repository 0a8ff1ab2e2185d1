"""Sphinx configuration; `make docs` builds."""

import os
import sys
from pathlib import Path

import scforge

sys.path.insert(0, str(Path(__file__).parent / "_ext"))

project = "scforge"
author = "scforge developers"
copyright = author
version = release = scforge.__version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.intersphinx",
    "sphinx.ext.mathjax",
    "sphinx.ext.napoleon",
    "sphinxcontrib.bibtex",
    "sphinx_autodoc_typehints",  # after napoleon
    "sphinx_copybutton",
    "scforge_docs",  # in _ext: references and notebooks
]
exclude_patterns = ["_build", "_ext", "_static", "example_plugin", "**.ipynb_checkpoints"]
templates_path = ["_templates"]
suppress_warnings = [
    # Types imported for checkers only stay as they are written.
    "sphinx_autodoc_typehints.forward_reference",
    "sphinx_autodoc_typehints.guarded_import",
]

# Builds work without the internet; with it, names of other packages become links.
intersphinx_mapping = {}
if os.environ.get("SCFORGE_DOCS_ONLINE"):
    intersphinx_mapping = {
        "anndata": ("https://anndata.readthedocs.io/en/stable/", None),
        "lightning": ("https://lightning.ai/docs/pytorch/stable/", None),
        "numpy": ("https://numpy.org/doc/stable/", None),
        "pandas": ("https://pandas.pydata.org/docs/", None),
        "python": ("https://docs.python.org/3/", None),
        "scanpy": ("https://scanpy.readthedocs.io/en/stable/", None),
        "scipy": ("https://docs.scipy.org/doc/scipy/", None),
        "scvi-tools": ("https://docs.scvi-tools.org/en/stable/", None),
        "torch": ("https://docs.pytorch.org/docs/stable/", None),
    }

autodoc_member_order = "bysource"
autosummary_generate = True
toc_object_entries_show_parents = "hide"  # methods without the name of their class, beside a page
napoleon_google_docstring = False
napoleon_numpy_docstring = True
napoleon_custom_sections = ["Cause", "Fix"]  # of errors
napoleon_use_rtype = True  # typehints adds return types where it is on
typehints_defaults = "braces"
always_use_bars_union = True

myst_enable_extensions = ["amsmath", "colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3
bibtex_bibfiles = ["references.bib"]
bibtex_reference_style = "author_year"
# Notebooks are run by `make notebooks`; their outputs are taken from there, if it was run.
nb_execution_mode = "off"

html_theme = "sphinx_book_theme"
html_title = "scforge"
html_static_path = ["_static"]
html_css_files = ["custom.css"]
html_favicon = "_static/favicon.svg"
html_theme_options = {
    "logo": {
        "image_light": "_static/logo.svg",
        "image_dark": "_static/logo_dark.svg",
        "text": "scforge",
        "alt_text": "scforge",
    },
    "path_to_docs": "docs",
    "repository_url": "https://github.com/scforge/scforge",
    "use_repository_button": True,
}
