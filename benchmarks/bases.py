"""Which families of bases load, read and verify as transformers does, and which heads work on them.

    python benchmarks/bases.py                     # all of them, with a line for each
    python benchmarks/bases.py --only gemma3,llama4
    python benchmarks/bases.py --write             # and the tables of docs/bases.md
    python benchmarks/bases.py --base NAME         # a real checkpoint, in float32: a folder, a Hub id, embedded:smollm2

Every configuration of ``base_shapes.py`` is built tiny with random weights, saved, loaded as a user would, and compared
with the same folder through stock transformers at its own default attention, read whole and without a cache:

  logits   a prompt of 60 tokens read whole and in chunks of 30, 29 and 1; a tree of 7 nodes after 52 tokens, each node
           against its path read alone; three packed documents. Differences are over the largest logit.
  decode   12 greedy tokens after prompts of 7, 24 and 60: plain, by prompt lookup, by a Medusa head with random
           weights, and by an oracle whose tree of 8 nodes has the true path between wrong ones; also in a batch. Equal
           means equal to stock argmax without a cache and to stock ``generate``.
  count    the parameters that ``mode=estimate`` counts without weights are those of the model.
  heads    kangaroo, eagle3 and hydra_pp with random weights: they decode the same text, and compute a loss.

Tiny random models show wrong layouts and masks, not numerics at scale.
"""

import gc
import tempfile
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from base_shapes import AFTER, SHAPES, SIZES
from common import entry_point, listed, parser, save_record
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.utils import logging as transformers_logging

from drafthead.data.batch import HiddenStatesSpec, TrainBatch
from drafthead.data.utils.errors import UserError, one_line
from drafthead.models.base.base_config import BaseConfig
from drafthead.models.base.base_model import BaseModel
from drafthead.models.base.shape import ModelShape
from drafthead.models.decoding.draft_cache import TokenBuffer
from drafthead.models.decoding.drafter import DraftConfig, DraftSampling, Proposal
from drafthead.models.decoding.loop import decode, decode_batch
from drafthead.models.decoding.random_source import RandomSource
from drafthead.models.drafters.prompt_lookup import PromptLookup
from drafthead.models.heads.eagle3 import Eagle3Config
from drafthead.models.heads.hydra import HydraConfig
from drafthead.models.heads.kangaroo import KangarooConfig
from drafthead.models.heads.medusa import MedusaConfig
from drafthead.models.heads.parts.draft_head import DraftHead
from drafthead.models.heads.parts.losses import LossConfig
from drafthead.models.token_tree import TokenTree

PROMPTS, NEW = (7, 24, 60), 12
TOLERANCE = 1e-4
TREE = TokenTree.from_paths([(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)])
ORACLE_TREE = TokenTree.from_paths([(0,), (1,), (1, 0), (1, 1), (1, 1, 0), (1, 1, 1), (1, 1, 1, 0)])
"""The true path is the second child of each node, and then the first."""
TRUE_NODES = (2, 4, 6, 7)
HEADS = {
    "kangaroo": lambda: KangarooConfig(exit_layer=1, num_draft_tokens=3, confidence_threshold=0.0),
    "eagle3": lambda: Eagle3Config(num_draft_tokens=3, ttt_steps=3, layers=[0, 1, 2]),
    "hydra_pp": lambda: HydraConfig(num_draft_tokens=3, prefix_layer=True),
}
PAGE = Path(__file__).parent.parent / "docs" / "bases.md"
MARKS = "<!-- made by python benchmarks/bases.py --write -->", "<!-- end -->"


@dataclass
class Outcome:
    """What was found for one configuration."""

    family: str
    loads: bool = False
    refused: str = ""
    """The message of a refusal."""
    raised: str = ""
    """Any other exception: a fault of ours."""
    unbuilt: str = ""
    """Why transformers itself could not build or run it here."""
    context: int = 0
    errors: dict[str, float] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    """What decoded another text."""
    heads: dict[str, str] = field(default_factory=dict)
    """By head: empty where it works, or why it does not."""

    @property
    def passes(self) -> bool:
        """Everything was equal."""
        return self.loads and not self.raised and not self.wrong and max(self.errors.values(), default=1) < TOLERANCE

    def line(self, name: str) -> str:
        """For the console."""
        if self.unbuilt:
            return f"{name:28} not built: {self.unbuilt}"
        if self.raised:
            return f"{name:28} RAISED {self.raised}"
        if not self.loads:
            return f"{name:28} refused: {self.refused}"
        worst = max(self.errors, key=self.errors.__getitem__)
        said = "passes" if self.passes else f"WRONG {', '.join(self.wrong)}"
        heads = "; ".join(f"{head}: {why}" for head, why in self.heads.items() if why) or "all heads"
        return f"{name:28} {said} (context {self.context}; worst {worst} {self.errors[worst]:.0e}) {heads}"


class Oracle(PromptLookup):
    """Drafts the true continuation between wrong tokens, so that paths of a tree are accepted."""

    def __init__(self, text: list[int], vocab_size: int) -> None:
        super().__init__(ORACLE_TREE.depth)
        self._text, self._vocab = text, vocab_size

    def draft(
        self, state: TokenBuffer, last_token: Tensor, draft_config: DraftConfig, rng: RandomSource | None = None
    ) -> Proposal:
        start = state.longest + 1
        tree = ORACLE_TREE.truncate(draft_config.depth)
        tokens = [int(last_token)]
        for node in range(1, len(tree)):
            place = start + len(tree.paths[node]) - 1
            true = self._text[place] if place < len(self._text) else 5
            tokens.append(true if node in TRUE_NODES else (true + node) % self._vocab)
        return Proposal(tokens=torch.tensor([tokens]), shape=tree.shape, draft_sampling=DraftSampling.TOP_K)


def stored(shape: dict[str, Any], folder: Path) -> Any:
    """Build, perturb and save a model of this shape; returns the stock one, loaded again."""
    settings = dict(shape)
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    composite = type(config) not in AutoModelForCausalLM._model_mapping or config.get_text_config() is not config
    loader = AutoModelForImageTextToText if composite else AutoModelForCausalLM
    torch.manual_seed(0)
    model = loader.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "sink" in name:
                weight.copy_(1.0 + 0.3 * torch.randn(weight.shape, generator=generator))
            elif weight.ndim == 1:
                weight.add_(0.1 * torch.randn(weight.shape, generator=generator))
    model.save_pretrained(folder)
    return loader.from_pretrained(folder, dtype=torch.float32).eval()


def randomised(head: Any, size: float = 0.2) -> Any:
    """Away from its start; the same every time."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in head.parameters():
            weight += size * torch.randn(weight.shape, generator=generator)
    return head.eval()


class Comparison:
    """One base beside the stock model of the same folder."""

    def __init__(self, stock: Any, base: BaseModel, prompts: tuple[int, ...]) -> None:
        """``prompts``: their lengths."""
        self.stock, self.base = stock, base
        self.ids = torch.randint(3, 300, (max(PROMPTS) + NEW,), generator=torch.Generator().manual_seed(3)).tolist()
        room = min(max(PROMPTS), base.max_context - NEW - 8)
        self.prompts = [self.ids[: min(length, room)] for length in prompts]

    @torch.inference_mode()
    def wanted(self, ids: list[int]) -> Tensor:
        """Stock logits [T, V], whole and without a cache."""
        logits: Tensor = self.stock(input_ids=torch.tensor([ids]), use_cache=False).logits[0].float()
        return logits

    @torch.inference_mode()
    def logit_errors(self) -> dict[str, float]:
        """The largest difference over the largest logit, by way of reading."""
        base, prompt = self.base, self.prompts[-1]
        ids, whole = torch.tensor([prompt]), self.wanted(prompt)
        found = {"whole": _error(base.logits(base.forward(ids, base.new_cache(100)).final)[0], whole)}
        cache, cuts = base.new_cache(100), [0, len(prompt) // 2, len(prompt) - 1, len(prompt)]
        parts = [base.forward(ids[:, a:b], cache).final for a, b in zip(cuts, cuts[1:], strict=False)]
        found["chunks"] = _error(base.logits(torch.cat(parts, 1))[0], whole)

        prefix, nodes = prompt[:-8], prompt[-8:-1]
        cache = base.new_cache(100)
        base.forward(torch.tensor([prefix]), cache)
        tree = base.verify_logits(torch.tensor([nodes]), TREE.shape, cache)[1][0]
        paths = [[nodes[n] for n in path.nonzero()[:, 0].tolist()] for path in TREE.shape.ancestors[0]]
        found["tree"] = max(
            _error(tree[n], logits) for n, logits in enumerate(self.wanted(prefix + path)[-1] for path in paths)
        )

        documents = [prompt[:6], prompt[6:20], prompt[20 : min(60, len(prompt))]]
        hidden = base.hidden_states(TrainBatch.of(documents), HiddenStatesSpec()).final
        packed = torch.cat([self.wanted(document) for document in documents])
        found["packed"] = _error(base.logits(hidden)[0], packed)
        return found

    def wrong_texts(self) -> list[str]:
        """What does not decode as the stock model does."""
        base, texts, wrong = self.base, [self._stock_text(prompt) for prompt in self.prompts], []
        medusa = randomised(MedusaConfig(num_draft_tokens=3).build(base))
        medusa_tree = DraftConfig(tree=TokenTree.expansion([3, 1, 1]))
        lookup = PromptLookup(num_tokens=4, max_ngram=2, matches=3)
        for prompt, text in zip(self.prompts, texts, strict=True):
            oracle = Oracle(prompt + text, base.vocab_size)
            drafters: dict[str, tuple[Any, DraftConfig | None]] = {
                "plain": (None, None),
                "prompt lookup": (lookup, None),
                "medusa": (medusa, medusa_tree),
                "oracle": (oracle, DraftConfig(tree=ORACLE_TREE)),
            }
            for name, (drafter, draft_config) in drafters.items():
                if self._decoded(drafter, prompt, draft_config) != text:
                    wrong.append(f"{name} after {len(prompt)}")
        batch = decode_batch(base, lookup, self.prompts, max_new_tokens=NEW, ignore_eos=True)
        wrong += [f"batch after {len(p)}" for p, t, r in zip(self.prompts, texts, batch, strict=True) if r.tokens != t]
        return wrong

    def wrong_counts(self) -> list[str]:
        """Whether ``mode=estimate``, which builds no weights, counts other parameters than the text model has."""
        counted = ModelShape.from_config(self.base.model.config).base_parameters
        held = sum(parameter.numel() for parameter in self.base.stock().parameters())
        return [] if counted == held else [f"{counted} parameters estimated of {held}"]

    def heads(self) -> dict[str, str]:
        """Why a head does not work, by head; empty where it does."""
        prompt, found = self.prompts[-1], {}
        text = self._decoded(None, prompt, None)
        for name, config in HEADS.items():
            try:
                head = randomised(config().build(self.base), 0.02)
                tree = DraftConfig(tree=TokenTree.expansion([2, 1, 1]))
                if self._decoded(head, prompt, tree) != text:
                    raise AssertionError("decodes another text")
                _loss(head, prompt)
                found[name] = ""
            except UserError as error:
                found[name] = str(error)
            except Exception as error:
                found[name] = f"RAISED {_said(error)}"
        return found

    def _decoded(self, drafter: Any, prompt: list[int], draft_config: DraftConfig | None) -> list[int]:
        how: dict[str, Any] = {} if draft_config is None else {"draft_config": draft_config}
        return decode(self.base, drafter, prompt, max_new_tokens=NEW, ignore_eos=True, **how).tokens

    def _stock_text(self, prompt: list[int]) -> list[int]:
        text = list(prompt)
        for _ in range(NEW):
            text.append(int(self.wanted(text)[-1].argmax()))
        self.stock.generation_config.eos_token_id = None
        with torch.inference_mode():
            ids = torch.tensor([prompt])
            out = self.stock.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False, pad_token_id=0
            )
        if out[0].tolist() != text:
            raise RuntimeError("stock generate differs from stock argmax without a cache")
        return text[len(prompt) :]


def _loss(head: DraftHead, prompt: list[int]) -> None:
    """One step's loss and gradients on two packed documents."""
    half = len(prompt) // 2
    row = TrainBatch.of([prompt[:half], prompt[half:]])
    out = head.train().loss(row, head.base.hidden_states(row, head.spec), LossConfig())
    torch.autograd.backward(out.loss_sum / out.tokens)
    if not bool(out.loss_sum.isfinite()):
        raise AssertionError("its loss is not finite")


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {one_line(error)}"


def _error(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).abs().max() / wanted.abs().max())


def outcome(shape: dict[str, Any], prompts: tuple[int, ...] = PROMPTS, heads: bool = True) -> Outcome:
    """Build, load and compare one configuration."""
    found = Outcome(family=str(shape["model_type"]))
    with tempfile.TemporaryDirectory() as folder:
        try:
            stock = stored(shape, Path(folder))
            with torch.inference_mode():
                stock(input_ids=torch.tensor([[3, 4, 5]]), use_cache=False)
        except Exception as error:
            found.unbuilt = _said(error)
            stock = None
        try:
            base = BaseModel.load(BaseConfig(name=folder, tokenizer="builtin:tiny", dtype="float32", kernels="packed"))
        except UserError as error:
            found.refused = str(error).replace(folder, "FOLDER")
            return found
        except Exception as error:
            found.raised = _said(error)
            return found
        if stock is None:
            return found
        compare(found, Comparison(stock, base, prompts), heads)
    gc.collect()
    return found


def compare(found: Outcome, comparison: "Comparison", heads: bool) -> None:
    """Fill in what a base that loads computes."""
    try:
        found.loads, found.context = True, comparison.base.max_context
        found.errors = comparison.logit_errors()
        found.wrong = [way for way, error in found.errors.items() if error >= TOLERANCE]
        found.wrong += comparison.wrong_texts() + comparison.wrong_counts()
        if heads:
            found.heads = comparison.heads()
    except Exception as error:
        found.raised = _said(error)


def real(name: str) -> Outcome:
    """Compare a real checkpoint with its own stock model."""
    base = BaseModel.load(BaseConfig(name=name, dtype="float32"))
    found = Outcome(family=base.model.config.model_type)
    compare(found, Comparison(base.stock(), base, PROMPTS), heads=True)
    return found


def main() -> None:
    """Try the configurations and say what was found."""
    arguments = parser(__doc__)
    arguments.add_argument("--only", default=",".join(SHAPES), metavar="A,B", help="names of base_shapes.py")
    arguments.add_argument("--write", action="store_true", help="write the tables of docs/bases.md")
    arguments.add_argument("--base", metavar="NAME", help="compare this checkpoint instead")
    options = arguments.parse_args()
    names = listed("only", options.only, list(SHAPES))
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    warnings.simplefilter("ignore")
    if options.base is not None:
        print(real(options.base).line(options.base))
        return
    found = {}
    for name in names:
        found[name] = outcome(SHAPES[name])
        print(found[name].line(name), flush=True)
    print(summary(found))
    if options.write:
        before, _, rest = PAGE.read_text().partition(MARKS[0])
        PAGE.write_text(f"{before}{MARKS[0]}\n{tables(found)}\n{MARKS[1]}{rest.partition(MARKS[1])[2]}")
    save_record(options, "bases", {"bases": {name: vars(o) | {"passes": o.passes} for name, o in found.items()}})


def tables(found: dict[str, Outcome]) -> str:
    """The part of docs/bases.md that is made here."""
    lines = [
        f"{summary(found)}.",
        "",
        "| configuration | model type | windows | heads | shaped after |",
        "|---|---|---|---|---|",
    ]
    for name, o in sorted(found.items()):
        if o.loads:
            text = SHAPES[name].get("text_config", SHAPES[name])
            whole = SIZES["max_position_embeddings"]
            windows = [text.get(key) or whole for key in ("sliding_window", "attention_chunk_size")]
            bound = f"context bound to {o.context}" if o.context < text["max_position_embeddings"] else ""
            said = "yes" if min(windows) < whole else bound
            missing = ", ".join(head for head, why in o.heads.items() if why)
            heads = f"all but {missing}" if missing else "all"
            wrong = "" if o.passes else f" **wrong** {o.raised or ', '.join(o.wrong)}"
            lines.append(f"| {name}{wrong} | `{o.family}` | {said} | {heads} | {AFTER.get(name, '')} |")
    lines += ["", "| refused | message |", "|---|---|"]
    lines += [f"| {name} | {o.refused} |" for name, o in sorted(found.items()) if o.refused]
    unbuilt = [name for name, o in sorted(found.items()) if o.unbuilt]
    return "\n".join([*lines, "", f"Not built by transformers from these sizes: {', '.join(unbuilt) or 'none'}."])


def summary(found: dict[str, Outcome]) -> str:
    """How many configurations passed, were refused, and so on."""
    tried = {name: o for name, o in found.items() if not o.unbuilt}
    passed = [o for o in tried.values() if o.passes]
    return (
        f"{len(tried)} configurations of {len({o.family for o in tried.values()})} model types: {len(passed)} pass "
        f"everything ({len({o.family for o in passed})} model types), "
        f"{sum(bool(o.refused) for o in tried.values())} are refused by name, "
        f"{sum(o.loads and not o.passes and not o.raised for o in tried.values())} are wrong, "
        f"{sum(bool(o.raised) for o in tried.values())} raise; {len(found) - len(tried)} could not be built here"
    )


if __name__ == "__main__":
    entry_point(main)
