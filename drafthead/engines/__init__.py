"""Serving engines as methods of an evaluation: started, queried over HTTP, compared with our decoder, and stopped."""
