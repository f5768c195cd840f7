"""Whoever comes second waits, and says so."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

from drafthead.data.utils.files import exclusive


def test_second_waits_for_first(tmp_path: Path) -> None:
    waiting, order = Event(), []

    def second() -> None:
        with exclusive(tmp_path / "new", waiting.set):
            order.append("second")

    with ThreadPoolExecutor(1) as pool:
        with exclusive(tmp_path / "new"):
            done = pool.submit(second)
            assert waiting.wait(10)
            order.append("first")
        done.result(10)
    assert order == ["first", "second"]
