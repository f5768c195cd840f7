"""Serving engines as methods of an evaluation: started, asked over HTTP, compared with our own chain, and ended."""
