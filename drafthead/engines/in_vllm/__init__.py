"""Modules that run inside vLLM. With this folder on ``PYTHONPATH``, vLLM imports them by their bare names."""
