"""Models and data that arrive inside pinned packages, and tiny ones for tests."""
