"""The corpora of a run: packed text and the base's own answers."""
