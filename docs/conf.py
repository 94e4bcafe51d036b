"""Sphinx configuration: Markdown pages, and the API reference from the docstrings."""

import autosplit

project = "autosplit"
author = "the autosplit authors"
release = autosplit.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
html_title = "autosplit"
myst_heading_anchors = 3
autodoc_typehints = "none"  # signatures have them
autodoc_member_order = "bysource"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True  # attributes as one list
napoleon_attr_annotations = False
