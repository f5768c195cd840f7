"""GGUF files for llama.cpp: the base, and the heads that it loads."""
