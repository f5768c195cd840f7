"""The packages of a wheel: ``drafthead``, and the top-level folders below it (``data/`` is ``drafthead.data``)."""

from setuptools import find_packages, setup

FOLDERS = ("data", "eval", "models", "recipes", "train")

setup(
    packages=[
        *find_packages(include=["drafthead", "drafthead.*"]),
        *(f"drafthead.{name}" for name in find_packages(include=[*FOLDERS, *(f"{folder}.*" for folder in FOLDERS)])),
    ],
    package_dir={f"drafthead.{folder}": folder for folder in FOLDERS},
)
