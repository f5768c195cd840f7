"""The version: the only place to change it. This module has no imports, so that ``--version`` is quick."""

__version__ = "0.3.0"
