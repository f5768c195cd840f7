"""Drafters without training: prompt lookup, another model, early exit, combined and nested."""
