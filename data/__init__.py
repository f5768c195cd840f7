"""Training data, and the types that cross folder boundaries."""
