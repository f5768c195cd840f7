"""Write golden loss curves: ``python tests/golden/regenerate.py [recipe...]``; give the reason in the changelog."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
RECIPES = ["medusa_smollm2", "eagle3_smollm2", "hydra_smollm2", "hydra_pp_smollm2", "mlp_speculator_smollm2"]


def regenerate(recipe: str) -> None:
    """Run the tiny recipe and store its losses."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(ROOT / "train" / "run.py"), f"recipe={recipe}", "debug=tiny", "log_every=1"]
        command.append("head.induction_rank=0")  # as the published heads
        command += ["head.layers=null"] * recipe.startswith("eagle3")  # debug=tiny chooses other layers for exports
        command += ["head.layers=null"] if recipe.startswith("eagle3") else []
        command.append(f"data.text.sources=[{{kind: text, name: {ROOT / 'LICENSE'}}}]")
        subprocess.run([*command, f"out={folder}/run", f"data.folder={folder}/corpora"], check=True)
        rows = [json.loads(line) for line in Path(folder, "run", "metrics.jsonl").read_text().splitlines()]
    losses = [row["loss"] for row in rows if "loss" in row]
    name = recipe.removesuffix("_smollm2")
    Path(__file__).with_name(f"{name}_tiny_losses.json").write_text(json.dumps(losses, indent=1) + "\n")


if __name__ == "__main__":
    for name in sys.argv[1:] or RECIPES:
        regenerate(name)
