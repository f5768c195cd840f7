"""The base's own answers on disk: the store, answers by a server, stored hidden states, the draft vocabulary."""
