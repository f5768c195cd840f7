"""The base's own answers on disk: the store, server generation, cached hidden states, the draft vocabulary."""
