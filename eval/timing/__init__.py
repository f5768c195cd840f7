"""Methods in one interleaved, resumable timing."""
