"""Limits of settings, and what is said where one is outside."""

from dataclasses import dataclass
from typing import Any

import pytest

from drafthead.data.utils.errors import check_limits


@dataclass
class Settings:
    number: float = 1.0
    optional: int | None = None
    several: list[int] | None = None
    word: str | None = None
    even: int = 2


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (Settings(number=0.0), "x.number must be above 0 and finite, got 0.0"),
        (Settings(number=float("nan")), "x.number must be above 0 and finite, got nan"),
        (Settings(number=float("inf")), "x.number must be above 0 and finite, got inf"),
        (Settings(optional=9), "x.optional must be in [2, 8] or null, got 9"),
        (Settings(several=[1, 0]), "x.several must be at least 1 or null, got [1, 0]"),
        (Settings(several=[]), "x.several must be at least 1 or null, got []"),
        (Settings(word="three"), "x.word must be one of short, long or null, got 'three'"),
        (Settings(even=3), "x.even must be even, got 3"),
        (Settings(number=1e-9, optional=2, several=[1, 2], word="long"), None),
        (Settings(optional=8), None),
    ],
)
def test_what_lies_outside_is_refused(settings: Settings, says: str | None) -> None:
    limits: dict[str, Any] = {
        "number": "(0, inf)",
        "optional": "[2, 8]",
        "several": "[1, inf)",
        "word": ("short", "long"),
    }
    limits |= {"even": (settings.even % 2 == 0, "even")}
    try:
        check_limits(settings, "x.", **limits)
        found = None
    except ValueError as error:
        found = str(error)
    assert found == says
