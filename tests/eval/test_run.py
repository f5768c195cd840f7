"""``drafthead eval`` as a user types it, on a tiny head."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from support import TinyBase, call, small_head


def test_evaluates_a_saved_head(tiny_base: TinyBase, tmp_path: Path) -> None:
    settings = [f"head={small_head(tiny_base(), tmp_path / 'head')}", "suite=builtin", "limit=2", "max_new_tokens=8"]
    subprocess.run([sys.executable, "-m", "drafthead.cli", "eval", *settings], cwd=tmp_path, check=True)
    evaluation = json.loads((tmp_path / "eval-builtin" / "eval.json").read_text())
    assert evaluation["overall"]["identical_outputs"]["same"] == 2
    for path in ("report.html", "plots/ctar.png"):
        assert (tmp_path / "eval-builtin" / path).stat().st_size > 1000


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (["head=/nowhere/head"], r"no draft head at /nowhere/head: give a run's head folder .*or a Hub repository"),
        ([], "name a head: head=outputs/NAME/head or head=user/repo"),
        (["head=x", "max_new_tokens=1"], "max_new_tokens must be"),
        (["head=x", "limit=0"], "limit must be"),
        (["head=x", "suit=builtin"], "suit is not a setting; did you mean suite"),
    ],
)
def test_bad_settings(settings: list[str], says: str) -> None:
    with pytest.raises(SystemExit, match=f"^error: .*{says}"):
        call("eval", *settings)
