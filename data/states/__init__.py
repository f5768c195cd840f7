"""Hidden states of documents: one interface for those that are stored, computed or made by decoding."""
