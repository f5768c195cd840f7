"""Convert a published head to a head folder of drafthead, for the base for which it drafts.

usage: drafthead import from=DIR base=NAME out=DIR [key=value ...]

drafthead import from=user/medusa-vicuna-7b base=lmsys/vicuna-7b-v1.3 out=outputs/medusa_vicuna/head
drafthead import from=user/eagle3-llama base=user/llama out=outputs/eagle3_llama/head 'config.layers=[2,16,29]'
drafthead import from=/models/glm base=/models/glm out=outputs/glm_mtp/head  # the MTP layer in its checkpoint
drafthead import from=outputs/medusa_smollm2/head base=/models/tuned out=outputs/tuned/head  # for a fine-tune
drafthead eval head=outputs/medusa_vicuna/head suite=mt_bench

formats: {formats}

It prints what was read, and notes what was assumed or ignored (docs/guides/check_head.md).
"""

import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import field, fields
from pathlib import Path
from typing import Any

from drafthead.commands.command import command, new_folder
from drafthead.errors import UserError
from drafthead.eval.config import SuiteConfig
from drafthead.eval.trees.finished_answers import base_answers
from drafthead.eval.trees.simulate import simulate_texts
from drafthead.files.local import same_base, write_json
from drafthead.models.base.base_config import BaseConfig
from drafthead.models.base.base_model import BaseModel
from drafthead.models.base.parts import BaseParts
from drafthead.models.decoding.drafter import DraftConfig
from drafthead.models.decoding.sampling import Sampler
from drafthead.models.formats import all_formats, format_named, recognise
from drafthead.models.formats.checkpoint import CONFIG, contents, read_config
from drafthead.models.formats.format import BASE_NAME, published_name
from drafthead.models.formats.llama_layer import ROPE_SECTIONS, layer_config
from drafthead.models.heads.parts.draft_head import DraftHead, DraftHeadConfig
from drafthead.models.heads.parts.head_folder import adapter_of, described, read_head_config, read_trees, resolve_folder
from drafthead.models.heads.parts.loading import load_head, saved_head_config
from drafthead.models.token_tree import TokenTree
from drafthead.settings.schema import settings
from drafthead.system.display import Display

MEASURED = "import.json"  # file of the measurements that chose among the ways in which a head may read states
MEASURED_PROMPTS, MEASURED_TOKENS = 8, 48
OURS = ("format", "settings", "base", "draft_vocab")  # keys of drafthead's own config.json


@settings(kw_only=True)
class ImportConfig:
    """Settings of ``drafthead import``."""

    from_: str
    """Published head: a folder or Hub repository (``user/name``) with safetensors. Pickle files are never loaded. Or a
    drafthead head of another base of equal sizes, such as the model that ``base`` was fine-tuned from."""
    out: str
    """Folder to write; it must be empty or not exist yet."""
    base: BaseConfig = field(default_factory=BaseConfig)
    format: str = "auto"
    """Format of the published head; ``drafthead import --help`` lists all formats. ``auto`` recognises it from
    config.json."""
    config: dict[str, Any] = field(default_factory=dict)
    """Values for keys that are missing or wrong in the published config.json. For example ``config.exit_layer=2`` for
    Kangaroo."""
    revision: str | None = None
    """Commit, tag or branch of the Hub repository. With null, the newest commit of its main branch."""

    def __post_init__(self) -> None:
        if self.format != "auto":
            format_named(self.format)

    def check_base(self, published: str | None) -> None:
        """Reject settings without a base; name the one that the head was ``published`` for."""
        if not self.base.name and not self.base.random:
            given = f"base={published} (the name in its config.json) or a folder of it" if published else "base=NAME"
            raise UserError(f"base is missing: name the base model that the head drafts for, {given}")


@command(
    "import",
    ImportConfig,
    __doc__.format(formats=textwrap.fill(", ".join(all_formats()), 111, subsequent_indent=" " * 9)),
)
def main(config: ImportConfig) -> None:
    folder, published_config = _open_published(config.from_, config.revision)
    if set(OURS) <= set(published_config):
        config.check_base(read_head_config(folder)["base"].get("name"))
        _attach_own(config, folder, Display())
        return
    content = {**published_config, **config.config}
    file_format = recognise(content, str(folder)) if config.format == "auto" else format_named(config.format)
    checkpoint = file_format.read(folder, config.config)
    config.check_base(checkpoint.config.get(BASE_NAME))
    display = Display()
    with new_folder(Path(config.out)) as tmp_path:
        with display.stage(f"base {config.base.name or 'random'}"):
            # Only heads that run layers of a base need them.
            load = BaseModel.load if file_format.head_config.needs_layers else BaseParts.of_checkpoint
            base = load(config.base, progress=display.line)
        with display.stage(f"{file_format.title} from {config.from_}"):
            head = file_format.attach(checkpoint, base)
        lengths: dict[str, float] = {}
        if variants := file_format.variants(head):
            with display.stage("measure how it reads states"):
                lengths = _mean_accepted_lengths(variants)
            head = variants[max(lengths, key=lambda reading: lengths[reading])]
            write_json(tmp_path / MEASURED, {"mean_accepted_length": lengths})
        read_trees(folder, head)
        head.save_pretrained(tmp_path)
    for label, text in [("format", file_format.title), *_summary(head)]:
        display.line(f"   {label:<18}{text}")
    for engine in file_format.engines_for(head):
        display.line(f"   {engine.name:<18}{engine.support}")
    for reading, length in lengths.items():
        display.line(f"   mean accepted length {length:.3f} if {reading}")
    for note in [*checkpoint.notes, *_base_notes(checkpoint.config, head)]:
        display.line(f"   note: {note}")
    display.line(f"written: {config.out}")


def _attach_own(config: ImportConfig, folder: Path, display: Display) -> None:
    """Write a drafthead head again, for another base of equal sizes. Its tree is kept."""
    content = read_head_config(folder)
    if config.config or config.format != "auto":
        raise UserError(f"{folder} is a drafthead head, whose config is complete; leave out config.* and format")
    needs_layers = saved_head_config(folder, content).needs_layers
    with new_folder(Path(config.out)) as tmp_path:
        with display.stage(f"base {config.base.name or 'random'}"):
            load = BaseModel.load if needs_layers else BaseParts.of_checkpoint
            base = load(config.base, progress=display.line)
        if same_base(str(content["base"].get("fingerprint")), base.fingerprint):
            what = f"{folder} is a drafthead head of this base already"
            raise UserError(f"{what}; use it directly, as in `drafthead eval head={folder}`")
        head = load_head(folder, base, any_base=True)
        head.save_pretrained(tmp_path)
    for label, text in _summary(head):
        display.line(f"   {label:<18}{text}")
    display.line(f"   note: it was trained for {described(content['base'])}; measure its acceptance on this base:")
    original = "" if adapter_of(content["base"]) else f" original_base={content['base'].get('name')}"
    display.line(f"   drafthead replay head={config.out} suite=FILE costs=false{original}")
    display.line(f"written: {config.out}")


def _mean_accepted_lengths(variants: Mapping[str, DraftHead]) -> dict[str, float]:
    """Return the mean accepted length of each head along a few greedy answers of their base."""
    base = next(iter(variants.values())).base_model
    length = min(MEASURED_TOKENS, base.max_context // 2)
    answers = base_answers(base, SuiteConfig(suite="builtin", limit=MEASURED_PROMPTS, max_new_tokens=length))
    greedy = Sampler(temperature=0.0)

    def simulated(head: DraftHead) -> float:
        chain = DraftConfig(tree=TokenTree.chain(head.depth))
        return simulate_texts(base, head, answers, chain, greedy).mean_accepted_length

    return {reading: simulated(head) for reading, head in variants.items()}


def _summary(head: DraftHead) -> Iterator[tuple[str, str]]:
    layers, ids, common = head.spec.layers, len(head.d2t), {entry.name for entry in fields(DraftHeadConfig)}
    settings = {key: value for key, value in vars(head.config).items() if key not in common}
    read = f"{', '.join(map(str, layers))} of {head.base.num_layers}" + " (0 are the embeddings)" * (0 in layers)
    yield "layers read", read if layers else "the final state"
    yield "draft vocabulary", "the whole" if ids == head.base.vocab_size else f"{ids} of {head.base.vocab_size} ids"
    trained = head.config.trained_positions
    yield "draft positions", f"{head.depth}" + f", of which {trained} are trained" * (trained < head.depth)
    for label, value in (("on", True), ("off", False)):
        yield label, ", ".join(key for key, given in settings.items() if given is value) or "nothing"
    numbers = {key: given for key, given in settings.items() if type(given) in (int, float, str)}
    numbers |= {"full_layers": full} if (full := settings.get("full_layers")) else {}
    ours = {key: getattr(head.config, key) for key in ("induction_rank", "markov_rank")}  # published heads have none
    numbers |= {key: rank for key, rank in ours.items() if rank}
    drafts_for = described(head.base_identity) if adapter_of(head.base_identity) else head.base.name
    yield "settings", ", ".join(f"{key} {given}" for key, given in numbers.items())
    yield "parameters", f"{sum(p.numel() for p in head.parameters()) / 1e6:.2f} M, drafting for {drafts_for}"


def _base_notes(content: dict[str, Any], head: DraftHead) -> Iterator[str]:
    base, named, limit = head.base, content.get(BASE_NAME), content.get("max_position_embeddings")
    if named and named == published_name(base) and base.config.adapter is not None:
        yield f"it was published for {named} and is attached to a fine-tune of it, which may lower acceptance"
    elif named and named not in (base.name, published_name(base)):
        yield f"it was published for {named} and is attached to {base.name}; if these differ, acceptance will be low"
    own = base.model_config.max_position_embeddings
    if isinstance(limit, int) and limit < own:
        yield f"its config.json ends at {limit} positions and the base at {own}: some engines stop drafting there"
    if (theta := getattr(head.config, "rope_theta", None)) is not None:  # the layer rotates unlike the base
        of_base = f"without scaling; the base's rope_theta is {layer_config(base)['rope_theta']:g}"
        sections = [content, *(content.get(key) or {} for key in ROPE_SECTIONS)]
        if any(section.get("rope_theta") for section in sections):
            yield f"its layer rotates by rope_theta {theta:g} {of_base}"
        else:
            yield f"its config.json has no rope_theta, so {theta:g} is assumed {of_base} (or set config.rope_theta)"


def _open_published(source: str, revision: str | None) -> tuple[Path, dict[str, Any]]:
    """Return a head's folder (downloaded if it is on the Hub) and its config."""
    path = Path(source)
    if not path.is_dir() and (path.exists() or path.is_absolute() or source.count("/") != 1):
        what = "that is a file" if path.exists() else "there is no such folder"
        raise UserError(f"no published head at {source}: {what}; from= takes a folder or a Hub repository (user/name)")
    folder = resolve_folder(source, revision)
    if not (folder / CONFIG).is_file():
        raise UserError(
            f"{folder} holds no published head: it has no {CONFIG} ({contents(folder)}); name the folder that has it"
        )
    return folder, read_config(folder)
