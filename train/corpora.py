"""The corpora of a run: packed text for pretraining, the base's own answers for distillation, and their features.

Everything made here stays on disk under ``data.folder`` with a manifest and is reused by the next run; what was
interrupted continues where it stopped.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
from torch import Tensor

from drafthead.data.chat import Document, Message, prompt_ids
from drafthead.data.contracts import FeatureSpec
from drafthead.data.errors import UserError
from drafthead.data.feature_cache import FORMAT, FeatureCache
from drafthead.data.files import file_digest, read_json, read_sealed_json, require_space, write_sealed_json
from drafthead.data.generations import GenerationStore, SamplerConfig, as_documents
from drafthead.data.locks import exclusive
from drafthead.data.manifest import check_manifest, write_manifest
from drafthead.data.packing import collate, digest_rows, open_packed, pack, text_documents
from drafthead.data.sources import SourceConfig, load_documents, load_prompts
from drafthead.data.vocab import draft_vocabulary
from drafthead.models.base import BaseModel
from drafthead.models.batched_generation import generate
from drafthead.models.layer_views import first_layers
from drafthead.models.synthesis import synthesise_prompts

Progress = Callable[[str, int, int], None]
"""(what is being made, done, total)."""

Prompt = tuple[int, list[int]]
"""Number, and token ids."""
BLOCK = 2
"""Prompts a block, in slots. Each block is answered from an empty batch and is one shard: rounding depends on what is
computed side by side, so hidden states too are the same to the bit whatever was killed. A kill loses a block."""
HELD_OUT_EVERY = 20
"""Each 20th answer is held out: it measures acceptance and calibrates the tree, and is never trained on."""
HELD_OUT_MOST = 512
"""Answers held out at most: more would measure no better and cost features and time."""
_CHARACTERS_A_TOKEN = 6
"""More than text has: so many characters of a source are enough for the tokens wanted."""


@dataclass(kw_only=True)
class TextConfig:
    """Text of the pretraining phase."""

    sources: list[SourceConfig] = field(default_factory=list)
    max_tokens: int = 100_000

    def __post_init__(self) -> None:
        if self.max_tokens < 64:
            raise ValueError(f"data.text.max_tokens must be at least 64, got {self.max_tokens}")


@dataclass(kw_only=True)
class GenerationsConfig:
    """The base's own answers, for the distillation phase."""

    sources: list[SourceConfig] = field(default_factory=list)
    """Prompts."""
    prompts: int = 1000
    """Prompts taken from the sources."""
    synthesised: int = 0
    """Prompts that the base writes itself, besides (it continues its chat template up to the user's turn)."""
    max_prompt_tokens: int = 128
    """Longer prompts are left out."""
    sampler: SamplerConfig = field(default_factory=SamplerConfig)
    slots: int = 64
    """Answers generated at a time."""
    keep_features: bool = True
    """Keep the hidden states that generation computes anyway; the distillation phase then needs no pass of the base."""

    def __post_init__(self) -> None:
        for key, least in (("prompts", 0), ("synthesised", 0), ("max_prompt_tokens", 8), ("slots", 1)):
            if getattr(self, key) < least:
                raise ValueError(f"data.generations.{key} must be at least {least}, got {getattr(self, key)}")


@dataclass(kw_only=True)
class DataConfig:
    """Corpora of a run."""

    folder: str = "outputs/corpora"
    """Where corpora are kept; runs with equal settings share them."""
    text: TextConfig = field(default_factory=TextConfig)
    generations: GenerationsConfig = field(default_factory=GenerationsConfig)


class Corpora:
    """Builds and opens the corpora of one run; every method is idempotent."""

    def __init__(self, base: BaseModel, config: DataConfig, seed: int, progress: Progress) -> None:
        self.base, self.config, self.seed, self.progress = base, config, seed, progress
        self.folder = Path(config.folder)
        self._store: GenerationStore | None = None
        self.manifests: dict[str, Any] = {}
        """What made the corpora that were opened, by name: what a checkpoint remembers of its data."""

    def _waiting(self) -> None:
        self.progress("waiting for another process that writes this corpus", 0, 1)

    # Text ----------------------------------------------------------------------------------------------------

    def text_rows(self, row_length: int) -> datasets.Dataset:
        """The pretraining text, packed into rows of ``row_length``.

        Rows that are on disk are used even when a source has changed since: a run must go on with what it began with.
        """
        config = self.config.text
        if not config.sources:
            raise UserError("a phase trains on text, but data.text.sources is empty; name a source")
        manifest = {"base": self.base.identity(), "seed": self.seed, "row_length": row_length, **asdict(config)}
        folder = self.folder / "text" / _digest_json(manifest)
        with exclusive(folder, self._waiting):
            if not check_manifest(folder, manifest, "remove the folder"):
                self.progress("packing text", 0, config.max_tokens)
                texts = load_documents(config.sources, self.seed, config.max_tokens * _CHARACTERS_A_TOKEN)
                documents = text_documents(self.base.tokenizer, texts, config.max_tokens)
                pack(self._watched(documents, config.max_tokens), row_length, split=True, folder=folder)
                write_manifest(folder, manifest)  # last: it says that the rows are complete
        rows = open_packed(folder)
        self.manifests[f"text in rows of {row_length}"] = {**manifest, "rows": len(rows)}
        return rows

    def _watched(self, documents: Iterable[Document], total: int) -> Iterator[Document]:
        done = 0
        for document in documents:
            yield document
            done += len(document)
            self.progress("packing text", done, total)
        self.progress("packing text", done, done)

    # Generations ---------------------------------------------------------------------------------------------

    def generations(self) -> GenerationStore:
        """The corpus of answers, complete."""
        if self._store is None:
            folder = self.folder / "generations"
            with exclusive(folder, self._waiting):
                store = GenerationStore(folder, self._generation_manifest())
                prompts, done = self._prompts(folder / "prompts.json"), store.done
                missing = [(n, ids) for n, ids in prompts if n not in done]
                if missing:
                    self._answer(store, prompts, missing)
            if not store.done:
                for name in ("prompts.json", "manifest.json"):  # nothing was made, so nothing binds the next try
                    (folder / name).unlink(missing_ok=True)
                raise UserError(
                    f"no answers were generated: none of the prompts fits data.generations.max_prompt_tokens="
                    f"{self.config.generations.max_prompt_tokens}; raise it or add sources"
                )
            self._store = store
            kept = {"prompts.json": file_digest(folder / "prompts.json"), "answers": len(store.done)}
            self.manifests["generations"] = {**self._generation_manifest(), **kept}
        return self._store

    def generation_rows(self, row_length: int, held_out: bool) -> tuple[datasets.Dataset, list[int]]:
        """The trained or the held-out answers packed into rows, and the prompt number of each packed document."""
        answers = self.generations().read(with_features=False)
        chosen = [g for g in answers if is_held_out(g.prompt_number) == held_out]
        if not chosen:
            raise UserError(
                f"{len(self.generations().done)} answers are too few to {'hold some out' if held_out else 'train on'}; "
                f"ask for more (data.generations.prompts or .synthesised)"
            )
        return pack(as_documents(chosen), row_length, split=False), [g.prompt_number for g in chosen]

    def draft_vocabulary(self, size: int) -> Tensor:
        """[W] int64: the ``size`` ids most frequent in the answers, and those that end one."""
        counts = self.generations().token_counts(self.base.vocab_size)
        return torch.from_numpy(draft_vocabulary(counts, size, self.base.eos_ids))

    def _answer(self, store: GenerationStore, prompts: list[Prompt], missing: list[Prompt]) -> None:
        config, total = self.config.generations, len(prompts)
        token_bytes = 4 + (2 * self.base.hidden_size if config.keep_features else 0)
        tokens = sum(len(ids) + config.sampler.max_new_tokens for _, ids in missing)
        purpose = "the answers with their features (keep_features)" if config.keep_features else "the answers"
        require_space(store.folder, tokens * token_bytes, purpose)
        limits = {k: getattr(config, k) for k in ("slots", "max_prompt_tokens", "keep_features")}
        answered, size = total - len(missing), BLOCK * config.slots
        self.progress("generating answers", answered, total)
        for start in range(0, len(prompts), size):
            block = [prompt for prompt in prompts[start : start + size] if prompt[0] not in store.done]
            shard = []
            for generation in generate(self.base, block, config.sampler, **limits):
                shard.append(generation)
                self.progress("generating answers", answered := answered + 1, total)
            store.append_shard(shard)

    def _prompts(self, path: Path) -> list[Prompt]:
        """Numbered prompts as token ids, within the length limit; kept on disk so that a later run has the same."""
        config = self.config.generations
        if path.exists():
            found = read_json(path)  # a plain list in earlier versions
            messages: list[list[Message]] = found if isinstance(found, list) else read_sealed_json(path)
        else:
            messages = (
                load_prompts(config.sources, self.seed, config.prompts) if config.sources and config.prompts else []
            )
            if config.synthesised:
                written = synthesise_prompts(
                    self.base, config.synthesised, self.seed, config.slots, self.progress, config.max_prompt_tokens
                )
                messages = _interleave(messages, [[{"role": "user", "content": text}] for text in written])
            if not messages:
                raise UserError("data.generations names no prompts; set sources, or synthesised to a number")
            write_sealed_json(path, messages)
        numbered = enumerate(prompt_ids(self.base.tokenizer, m) for m in messages)
        return [(n, ids) for n, ids in numbered if len(ids) <= config.max_prompt_tokens]

    def _generation_manifest(self) -> dict[str, Any]:
        config = asdict(self.config.generations)
        del config["slots"]  # how many at a time does not change what is said
        return {"base": self.base.identity(), "dtype": str(self.base.dtype), "seed": self.seed, **config}

    # Features ------------------------------------------------------------------------------------------------

    def cached_features(
        self, rows: datasets.Dataset, name: str, spec: FeatureSpec, prompts: list[int] | None
    ) -> FeatureCache:
        """The base's hidden states of every row, on disk; taken from generation where it kept them.

        Args:
            rows: packed rows.
            name: what the rows are; names the cache's folder together with a hash of all that makes it.
            spec: what the head reads; a head that reads more than the final state has its layers behind it.
            prompts: for answers, the prompt number of each packed document.
        """
        row_length = len(rows[0]["input_ids"])
        width = self.base.hidden_size * (1 + len(spec.layers))
        made_by = {"base": self.base.identity(), "layers": list(spec.layers), "rows": digest_rows(rows)}
        manifest = {**made_by, "format": FORMAT}
        dtype = "bfloat16" if self.base.dtype == torch.bfloat16 else "float16"
        folder = self.folder / "features" / f"{name}-{_digest_json(manifest)}"
        cache = FeatureCache.create(folder, len(rows), row_length, width, dtype, manifest)
        missing = cache.missing_rows()
        if not missing:
            return cache
        label = f"features of {name}"
        kept = prompts is not None and self.config.generations.keep_features
        final = self._kept_features(rows, prompts or []) if kept else None
        # Where generation kept the final states, the base only has to run as far as the last layer that is read.
        reader = first_layers(self.base, max(spec.layers)) if kept and spec.layers else self.base
        for done, row in enumerate(missing):
            self.progress(label, len(rows) - len(missing) + done, len(rows))
            parts = [] if final is None else [final(row, row_length, self.base.hidden_size)]
            if final is None or spec.layers:
                found = reader.features(collate(rows, [row]), spec)
                wanted = (found.final if final is None else None, found.layers)
                parts += [part.cpu() for part in wanted if part is not None]
            cache.write([row], torch.cat([part.float() for part in parts], -1))
        self.progress(label, len(rows), len(rows))
        return cache

    def _kept_features(self, rows: datasets.Dataset, prompts: list[int]) -> Callable[[int, int, int], Tensor]:
        """Reads rows' features out of the generation store; positions that nobody read stay NaN."""
        store = self.generations()

        def fill(row: int, row_length: int, width: int) -> Tensor:
            values = np.full((1, row_length, width), np.nan, dtype=np.float16)
            for document, start, length, offset in rows[row]["pieces"]:
                features = store.features(prompts[document])
                assert features is not None
                part = features[start : start + length]
                values[0, offset : offset + len(part)] = part
            return torch.from_numpy(values)

        return fill


def is_held_out(prompt_number: int) -> bool:
    """Whether an answer is held out from training."""
    place, last = divmod(prompt_number, HELD_OUT_EVERY)
    return last == HELD_OUT_EVERY - 1 and place < HELD_OUT_MOST


def _interleave(first: list[Any], second: list[Any]) -> list[Any]:
    """Both lists spread evenly, so that any prefix has the same mixture."""
    keyed = [
        (i / max(1, len(part)), which, item)
        for which, part in enumerate((first, second))
        for i, item in enumerate(part)
    ]
    return [item for _, _, item in sorted(keyed, key=lambda entry: entry[:2])]


def _digest_json(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:8]
