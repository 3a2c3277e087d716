"""Build the documentation: `make docs`. Offline; every warning is an error."""

project = "dbo"
author = "the dbo authors"
copyright = "the dbo authors"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.viewcode"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = "dbo"
myst_heading_anchors = 4
autodoc_typehints = "signature"
autodoc_member_order = "bysource"
