"""Published drafters that were slower than those of ``drafters/`` everywhere (docs/explanation/experimental.md)."""
