"""The commands of the `drafthead` command line, one file each."""
