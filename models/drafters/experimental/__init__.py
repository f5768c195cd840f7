"""Drafters of published systems, slower than the others on every machine so far (docs/explanation/experimental.md)."""
