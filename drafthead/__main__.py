"""``python -m drafthead`` does what the command ``drafthead`` does."""

from drafthead.cli import main

main()
