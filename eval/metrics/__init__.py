"""Metrics from step logs: acceptance, speedup, and the causes of the speedup."""
