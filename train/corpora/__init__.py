"""What a run trains on: packed text, and the answers that the base gives."""
