"""Evaluation suites: packaged prompts, and the user's own files and datasets."""
