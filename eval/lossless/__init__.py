"""Is the output distribution the base's? The certificate, equality of answers, the check of an export."""
