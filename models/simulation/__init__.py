"""Metrics of a head on finished answers: the drafts that decoding would accept, computed without decoding."""
