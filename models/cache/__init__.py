"""Keys and values: preallocated caches for one row, for ragged batches and for CUDA graphs."""
