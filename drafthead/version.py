"""The version of drafthead; change it only here. This module has no imports, so that ``--version`` is quick."""

__version__ = "0.4.0"
