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
        raise UserError(f"grid.drafts={config.grid.drafts}: the heads draft {deepest} positions; give no more")
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
    """Make the fastest candidate its head's default; return a console line. A smaller gain is noise: the default
    changes only if the whole interval of the candidate's speedup is above the default's speedup. ``grid.json`` then
    keeps the previous default. With ``dry`` nothing is changed."""
    overall = evaluation["overall"]
    speedups = {candidate.name: speedup_of(overall, candidate.name) or 0.0 for candidate in candidates}
    best = max(candidates, key=lambda candidate: speedups[candidate.name])
    fastest = f"fastest of {len(candidates)}: {best.name}, {speedups[best.name]:.2f}x"
    if dry:
        return f"{fastest}; nothing was changed (dry=true)"
    head, tree, folder = best.head, best.draft_config.tree, Path(best.folder)
    default = next(candidate for candidate in candidates if candidate.folder == best.folder and candidate.default)
    low = overall["methods"][best.name]["speedup"]["interval_95"][0]
    if best.default:
        result = "already the default"
    elif low is None or low <= speedups[default.name]:
        result = "within the noise, so it does not become the default"
    else:
        record = {key: getattr(config, key) for key in ("suite", "limit", "max_new_tokens")} | {"best": best.name}
        record["default_before"] = {
            "choices": None if head.tree is None else [list(path) for path in head.tree.paths[1:]],
            "confidence_threshold": head.confidence_threshold,
        }
        write_json(folder / "grid.json", record)
        assert isinstance(tree, TokenTree)
        head.tree, head.confidence_threshold = tree, best.draft_config.confidence_threshold
        head.save_pretrained(folder)
        result = "now the default"
    chosen = "It was chosen on these prompts: evaluate on others to report its speedup"
    return f"{fastest}; {result} of {folder}. {chosen}"
