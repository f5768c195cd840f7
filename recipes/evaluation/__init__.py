"""The recipe of `drafthead eval`, apart from the groups of training: `head=DIR` must be a value here, not a group."""
