"""Where a run's numbers go: metrics.jsonl, the console, experiment trackers, provenance."""
