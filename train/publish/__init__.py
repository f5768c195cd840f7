"""The model card of a trained head."""
