"""Checks that the output is the base's: enumeration of all outcomes, equality of answers, the check of an export."""
