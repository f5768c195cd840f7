"""Serving engines as methods of an evaluation: started, queried over HTTP, compared with our own chain, and stopped."""
