"""Evaluation suites: packaged ones, the user's own files and datasets."""
