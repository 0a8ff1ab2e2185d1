"""Sphinx configuration; `make docs` builds."""

import os
import shutil
from pathlib import Path

import scforge

HERE = Path(__file__).parent

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
    "sphinx_autodoc_typehints",  # after napoleon
    "sphinx_copybutton",
]
exclude_patterns = ["_build", "_static", "example_plugin", "reports", "**.ipynb_checkpoints"]
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
napoleon_google_docstring = False
napoleon_numpy_docstring = True
napoleon_use_rtype = True  # typehints adds return types where it is on
typehints_defaults = "braces"
always_use_bars_union = True

myst_enable_extensions = ["amsmath", "colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3
# Notebooks are run by the tests and shown as they were saved.
nb_execution_mode = "off"

html_theme = "sphinx_book_theme"
html_title = "scforge"
html_theme_options = {
    "path_to_docs": "docs",
    "repository_url": "https://github.com/scforge/scforge",
    "use_repository_button": True,
}


def copy_notebooks(app):
    """Bring notebooks/ into the source folder, because Sphinx reads nothing outside it."""
    target = HERE / "notebooks"
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    for notebook in sorted((HERE.parent / "notebooks").glob("*.ipynb")):
        shutil.copy2(notebook, target)


def setup(app):
    app.connect("builder-inited", copy_notebooks, priority=0)
