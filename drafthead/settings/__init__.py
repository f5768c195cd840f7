"""Settings of commands and recipes: checked dataclasses, composed from files and the command line, with their help."""
