"""Step logs to numbers: acceptance, speedup, and what explains it."""
