"""Costs of a run before it starts: memory, disk and tokens, and the duration of every stage."""
