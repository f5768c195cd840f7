"""The examples run as their headers say, on a tiny base or on the packaged one."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from head_cases import EXAMPLE, example_blocks

from support import TinyBase, small_head

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"


def run(command: list[str], folder: Path, **environment: str) -> str:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    python_path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    given = {**os.environ, "PATH": path, "PYTHONPATH": python_path, **environment}
    done = subprocess.run(command, cwd=folder, env=given, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_every_example_is_listed_and_has_time_and_result() -> None:
    listed = (EXAMPLES / "README.md").read_text()
    files = [path for path in EXAMPLES.iterdir() if path.suffix in (".sh", ".py", ".ipynb")]
    assert len(files) == 6
    for path in files:
        assert f"]({path.name})" in listed
        assert "November 2026" in path.read_text()[:1500], f"{path.name} does not say when and where it was measured"


def test_the_custom_head_is_the_one_of_the_tutorial() -> None:
    header, _, code = (EXAMPLES / "custom_head.py").read_text().partition("\n\n")
    assert header.startswith("# ")
    assert code == example_blocks()[f"models/heads/{EXAMPLE}.py"], "copy the code of docs/tutorials/new_head.md"
    assert len(code.splitlines()) <= 45


@pytest.mark.slow
def test_training_medusa(tmp_path: Path) -> None:
    printed = run(["bash", str(EXAMPLES / "train_medusa_cpu.sh"), "debug=tiny"], tmp_path)
    assert "report.html" in printed and list(tmp_path.glob("outputs/*/report.html"))


@pytest.mark.slow
def test_serving_in_vllm(tmp_path: Path) -> None:
    printed = run(["bash", str(EXAMPLES / "serve_in_vllm.sh"), "debug=tiny"], tmp_path, SERVE="echo")
    assert printed.splitlines()[-1] == "vllm serve outputs/served/published"
    assert (tmp_path / "outputs" / "served" / "published" / "config.json").exists()


@pytest.mark.slow
def test_the_bias_of_assistants(tmp_path: Path) -> None:
    """A failure after an upgrade of transformers may be good news: update docs/explanation/assistant_bias.md."""
    printed = run([sys.executable, str(EXAMPLES / "assistant_bias.py"), "--samples", "300"], tmp_path)
    without, biased, repaired = (float(value) for value in re.findall(r"p = (\S+)", printed))
    assert "answers of 40 tokens are equal: True" in printed
    assert min(without, repaired) > 1e-3 and biased < 1e-6


@pytest.mark.slow
def test_generating(tiny_base: TinyBase, tmp_path: Path) -> None:
    head = small_head(tiny_base(), tmp_path / "head")
    printed = run([sys.executable, str(EXAMPLES / "generate.py"), str(head), "Why is the sky blue?"], tmp_path)
    assert "the same text without the head: True" in printed
    assert "transformers' generate gives the same tokens: True" in printed


@pytest.mark.slow
def test_the_notebook_runs_from_top_to_bottom(monkeypatch: pytest.MonkeyPatch) -> None:
    notebook = json.loads((EXAMPLES / "trees.ipynb").read_text())
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    monkeypatch.chdir(EXAMPLES)
    names: dict[str, object] = {}
    for source in cells:
        exec(compile(source, "trees.ipynb", "exec"), names)
    assert len(cells) >= 4 and all(cell.get("outputs") for cell in notebook["cells"] if cell["cell_type"] == "code")
