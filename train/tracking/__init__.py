"""Records of a run: metrics.jsonl, console lines, experiment trackers, provenance."""
