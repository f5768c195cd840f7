"""Draft heads, one file per head; `head_type` is the name of the file."""
