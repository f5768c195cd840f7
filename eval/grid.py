"""Compare heads, chain lengths and confidence thresholds in one run; the fastest setting becomes its head's default.
Made for Kangaroo, whose exit layer and threshold trade acceptance for cheaper drafts. A grid can compare any heads of
one base."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from drafthead.errors import UserError
from drafthead.eval.config import METHOD, EvalConfig, EvalRunConfig, GridConfig
from drafthead.eval.metrics.summary import speedup_of
from drafthead.eval.report.plots import save_png, speedup
from drafthead.files.local import same_base, write_json
from drafthead.models.base.base_model import BaseModel
from drafthead.models.decoding.drafter import DraftConfig
from drafthead.models.heads.parts.draft_head import DraftHead
from drafthead.models.heads.parts.head_folder import read_head_config
from drafthead.models.heads.parts.loading import load_head
from drafthead.models.token_tree import TokenTree


@dataclass(frozen=True)
class Candidate:
    """A head with the tree and threshold that it drafts with."""

    name: str  # of the method in the evaluation
    folder: str
    head: DraftHead
    draft_config: DraftConfig
    default: bool = False  # True for the head's own tree and threshold


def check_folders(folders: Sequence[str]) -> None:
    """Check that all ``folders`` hold heads for the same base, before anything is loaded."""
    for folder in folders:
        if not Path(folder).is_dir():
            raise UserError(f"no head folder at {folder}; a grid writes defaults into head folders, so give folders")
    bases = {folder: str(read_head_config(Path(folder))["base"].get("fingerprint")) for folder in folders}
    if other := [folder for folder in folders if not same_base(bases[folder], bases[folders[0]])]:
        raise UserError(f"{other[0]} was trained for another base than {folders[0]}; compare heads of one base")


def grid_candidates(base: BaseModel, head: DraftHead, config: EvalRunConfig) -> list[Candidate]:
    """Return each head's default, and every other pair of the grid's lengths and thresholds that the head can draft."""
    folders = [config.head, *(folder for folder in config.grid.heads if folder != config.head)]
    heads = {folder: head if folder == config.head else load_head(folder, base) for folder in folders}
    deepest = max(each.depth for each in heads.values())
    if max(config.grid.drafts, default=0) > deepest:
        raise UserError(
            f"grid.drafts={config.grid.drafts}: the heads draft {deepest} positions; give at most {deepest}"
        )
    paths = {folder: Path(folder) for folder in heads}
    labels = {folder: path.parent.name if path.name == "head" else path.name for folder, path in paths.items()}
    if len(set(labels.values())) < len(labels):
        labels = {folder: folder for folder in heads}
    candidates = []
    for folder, each in heads.items():
        default = config.draft_config(each)
        name = METHOD if folder == config.head else f"{labels[folder]}, default"
        candidates.append(Candidate(name, folder, each, default, default=True))
        thresholds = config.grid.confidence_threshold or [each.confidence_threshold]
        for drafts, threshold in product(config.grid.drafts or [0], thresholds):
            if drafts > each.depth:
                continue
            tree = f"chain:{drafts}" if drafts else "head"
            combination = replace(config, tree=tree, confidence_threshold=threshold, grid=GridConfig())
            draft_config = combination.draft_config(each)
            if draft_config != default:
                label = f"chain:{drafts}" if drafts else "tree"
                candidates.append(Candidate(f"{labels[folder]}, {label}, {threshold:g}", folder, each, draft_config))
    return candidates


def keep_fastest(evaluation: dict[str, Any], candidates: Sequence[Candidate], config: EvalConfig, dry: bool) -> str:
    """Make the fastest candidate its head's default and write ``grid.json`` and ``grid.png``; return a console line. A
    smaller gain is noise: the default changes only if the whole interval of the candidate's speedup is above the
    default's speedup. With ``dry`` nothing is written or changed."""
    methods = evaluation["overall"]["methods"]
    rows: list[dict[str, Any]] = [
        {
            "name": candidate.name,
            "head": candidate.folder,
            "drafts": candidate.draft_config.depth,
            "nodes": candidate.draft_config.nodes,
            "confidence_threshold": candidate.draft_config.confidence_threshold,
            "default": candidate.default,
            "speedup": speedup_of(evaluation["overall"], candidate.name) or 0.0,
            "interval": methods[candidate.name]["speedup"]["interval_95"],
            "mean_accepted_length": methods[candidate.name]["mean_accepted_length"],
        }
        for candidate in candidates
    ]
    best, winner = max(zip(rows, candidates, strict=True), key=lambda pair: pair[0]["speedup"])
    fastest = f"fastest of {len(rows)}: {best['name']}, {best['speedup']:.2f}x"
    if dry:
        return f"{fastest}; nothing was changed (dry=true)"
    head, folder = winner.head, Path(winner.folder)
    record = {key: getattr(config, key) for key in ("suite", "limit", "max_new_tokens")} | {"best": best["name"]}
    record["default_before"] = {
        "choices": None if head.tree is None else [list(path) for path in head.tree.paths[1:]],
        "confidence_threshold": head.confidence_threshold,
        "by_cost": head.prefers_cost,
    }
    default = next(row for row in rows if row["head"] == best["head"] and row["default"])
    changed = best["interval"][0] is not None and best["interval"][0] > default["speedup"]
    if changed:
        assert isinstance(winner.draft_config.tree, TokenTree)
        head.tree, head.confidence_threshold = winner.draft_config.tree, winner.draft_config.confidence_threshold
        head.prefers_cost = False
        head.save_pretrained(folder)
    machine = {key: evaluation["overall"][key] for key in ("hardware", "versions")}
    write_json(folder / "grid.json", record | {"changed": changed, "rows": rows} | machine)
    bars = sorted(((row["name"], row["speedup"], *row["interval"]) for row in rows), key=lambda bar: bar[1])
    save_png(speedup(bars), folder / "grid.png")
    result = "now the default" if changed else "within the noise, so it does not become the default"
    if best["default"]:
        result = "already the default"
    return (
        f"{fastest}; {result} of {folder} (grid.json, grid.png). It was chosen on these prompts: evaluate on others to "
        "report its speedup"
    )
