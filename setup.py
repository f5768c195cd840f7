"""Refuse to build from a copy that lost its links; pyproject.toml describes the package."""

from pathlib import Path

from setuptools import setup

if not (Path(__file__).parent / "drafthead" / "train").is_dir():
    raise SystemExit(
        "drafthead/train is not a link to a folder: ZIP files lose links, and so does git on Windows; install from the "
        "sdist, or from a clone made with git clone -c core.symlinks=true"
    )
setup()
