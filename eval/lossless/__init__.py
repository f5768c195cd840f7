"""Is the output distribution the base's? The enumeration of outcomes, equality of answers, the check of an export."""
