"""Interleaved, resumable timing of several methods."""
