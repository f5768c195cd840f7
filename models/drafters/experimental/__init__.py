"""Drafters of published systems that were slower than the others on every machine measured (docs/experimental.md)."""
