"""Compare families of bases with stock transformers: which ones load, and which heads work on them.

    python benchmarks/bases.py                     # all families, one line each
    python benchmarks/bases.py --only gemma3,llama4
    python benchmarks/bases.py --write             # also write the tables of docs/explanation/bases.md
    python benchmarks/bases.py --base NAME         # a real checkpoint in float32: a folder, a Hub id, embedded:smollm2

Every configuration of ``base_shapes.py`` is built tiny with random weights, saved, and loaded as a user would load it.
The reference is the same folder in stock transformers, with its default attention, without a cache:

  logits   of a prompt of 60 tokens, read whole and in chunks of 30, 29 and 1; of a tree of 7 nodes after 52 tokens,
           each node against its path read alone; of three packed documents. Errors are relative to the largest logit.
  decode   12 greedy tokens after prompts of 7, 24 and 60 tokens: autoregressive, with prompt lookup, with a random
           Medusa head, and with an oracle whose tree of 8 nodes mixes the true path with wrong ones; also in a batch.
           The output must equal stock argmax without a cache and stock ``generate``.
  count    ``mode=estimate``, which builds no weights, must count the model's parameters.
  heads    random kangaroo, eagle3 and hydra_pp heads must decode the same tokens and compute a finite loss.

Tiny random models reveal wrong layouts and masks, not numerical problems at scale.
"""

import gc
import tempfile
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from base_shapes import AFTER, SHAPES, SIZES
from common import entry_point, generated, listed, parser, save_record
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.utils import logging as transformers_logging

from drafthead.data.batch import HiddenStatesSpec, TrainBatch
from drafthead.data.utils.errors import UserError, one_line
from drafthead.models.base.base_config import BaseConfig
from drafthead.models.base.base_model import BaseModel
from drafthead.models.base.meta import meta_base
from drafthead.models.cache.kv_cache import TreeCache
from drafthead.models.decoding.drafter import DraftConfig, DraftSampling, Proposal
from drafthead.models.decoding.loop import decode, decode_batch
from drafthead.models.decoding.random_source import RandomSource
from drafthead.models.drafters.prompt_lookup import LookupSession, PromptLookup
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
"""The true path takes the second child three times, then the first child."""
TRUE_NODES = (2, 4, 6, 7)
HEADS = {
    "kangaroo": lambda: KangarooConfig(exit_layer=1, num_draft_tokens=3, confidence_threshold=0.0),
    "eagle3": lambda: Eagle3Config(num_draft_tokens=3, ttt_steps=3, layers=[0, 1, 2]),
    "hydra_pp": lambda: HydraConfig(num_draft_tokens=3, prefix_layer=True),
}
PAGE = Path(__file__).parent.parent / "docs" / "explanation" / "bases.md"
MARKS = "<!-- made by python benchmarks/bases.py --write -->", "<!-- end -->"


@dataclass
class Outcome:
    """Result for one configuration."""

    family: str
    loads: bool = False
    refused: str = ""
    """Our error message, if the configuration is refused by name."""
    raised: str = ""
    """Any other exception: a bug."""
    unbuilt: str = ""
    """Error of transformers itself, if it cannot build or run the model here."""
    context: int = 0
    errors: dict[str, float] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    """Checks that failed."""
    heads: dict[str, str] = field(default_factory=dict)
    """Error by head; empty if the head works."""

    @property
    def passes(self) -> bool:
        """True if every check succeeded."""
        return self.loads and not self.raised and not self.wrong and max(self.errors.values(), default=1) < TOLERANCE

    def line(self, name: str) -> str:
        """Return one line for the console."""
        if self.unbuilt:
            return f"{name:28} not built: {self.unbuilt}"
        if self.raised:
            return f"{name:28} RAISED {self.raised}"
        if not self.loads:
            return f"{name:28} refused: {self.refused}"
        worst = max(self.errors, key=self.errors.__getitem__)
        verdict = "passes" if self.passes else f"WRONG {', '.join(self.wrong)}"
        heads = "; ".join(f"{head}: {why}" for head, why in self.heads.items() if why) or "all heads"
        return f"{name:28} {verdict} (context {self.context}; worst {worst} {self.errors[worst]:.0e}) {heads}"


class Oracle(PromptLookup):
    """Drafter of a known continuation among wrong tokens, so that paths of a tree are accepted."""

    def __init__(self, tokens: list[int], vocab_size: int) -> None:
        super().__init__(ORACLE_TREE.depth)
        self._tokens, self._vocab = tokens, vocab_size

    def open(self, rows: int, cache: TreeCache | None = None) -> "OracleSession":
        return OracleSession(self, rows)

    def proposal(self, last_token: Tensor, length: int, depth: int) -> Proposal:
        """Return the drafts after ``length`` committed tokens and ``last_token``."""
        tree = ORACLE_TREE.truncate(depth)
        tokens = [int(last_token)]
        for node in range(1, len(tree)):
            position = length + len(tree.paths[node])
            true = self._tokens[position] if position < len(self._tokens) else 5
            tokens.append(true if node in TRUE_NODES else (true + node) % self._vocab)
        return Proposal(tokens=torch.tensor([tokens]), shape=tree.shape, draft_sampling=DraftSampling.TOP_K)


class OracleSession(LookupSession):
    """A session that drafts from the oracle's text."""

    def __init__(self, oracle: Oracle, rows: int) -> None:
        super().__init__(oracle, rows)
        self._oracle = oracle

    def draft(self, last_token: Tensor, draft_config: DraftConfig, rng: RandomSource | None = None) -> Proposal:
        return self._oracle.proposal(last_token, self.lengths[0], draft_config.depth)


def stored(shape: dict[str, Any], folder: Path) -> Any:
    """Build and save a random model of this shape, and return the stock model loaded from the folder."""
    settings = dict(shape)
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    composite = type(config) not in AutoModelForCausalLM._model_mapping or config.get_text_config() is not config
    loader = AutoModelForImageTextToText if composite else AutoModelForCausalLM
    torch.manual_seed(0)
    model = loader.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():  # fresh norms and sinks are constant and would hide mistakes
            if "sink" in name:
                weight.copy_(1.0 + 0.3 * torch.randn(weight.shape, generator=generator))
            elif weight.ndim == 1:
                weight.add_(0.1 * torch.randn(weight.shape, generator=generator))
    model.save_pretrained(folder)
    return loader.from_pretrained(folder, dtype=torch.float32).eval()


def randomised(head: Any, size: float = 0.2) -> Any:
    """Add reproducible noise to the weights of ``head``."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in head.parameters():
            weight += size * torch.randn(weight.shape, generator=generator)
    return head.eval()


class Comparison:
    """A base and the stock model of the same folder, with prompts of the given lengths."""

    def __init__(self, stock: Any, base: BaseModel, lengths: tuple[int, ...]) -> None:
        self.stock, self.base = stock, base
        ids = torch.randint(3, 300, (max(PROMPTS) + NEW,), generator=torch.Generator().manual_seed(3)).tolist()
        room = min(max(PROMPTS), base.max_context - NEW - 8)
        self.prompts = [ids[: min(length, room)] for length in lengths]

    @torch.inference_mode()
    def expected(self, ids: list[int]) -> Tensor:
        """Return the stock logits [T, V], computed in one pass without a cache."""
        logits: Tensor = self.stock(input_ids=torch.tensor([ids]), use_cache=False).logits[0].float()
        return logits

    @torch.inference_mode()
    def logit_errors(self) -> dict[str, float]:
        """Return the largest relative error by kind of pass."""
        base, prompt = self.base, self.prompts[-1]
        ids, whole = torch.tensor([prompt]), self.expected(prompt)
        errors = {"whole": _error(base.logits(base.forward(ids, base.new_cache(100)).final)[0], whole)}
        cache, cuts = base.new_cache(100), [0, len(prompt) // 2, len(prompt) - 1, len(prompt)]
        chunks = [base.forward(ids[:, a:b], cache).final for a, b in zip(cuts, cuts[1:], strict=False)]
        errors["chunks"] = _error(base.logits(torch.cat(chunks, 1))[0], whole)

        prefix, nodes = prompt[:-8], prompt[-8:-1]
        cache = base.new_cache(100)
        base.forward(torch.tensor([prefix]), cache)
        tree = base.verify_logits(torch.tensor([nodes]), TREE.shape, cache)[1][0]
        paths = [[nodes[n] for n in path.nonzero()[:, 0].tolist()] for path in TREE.shape.ancestors[0]]
        errors["tree"] = max(_error(tree[n], self.expected(prefix + path)[-1]) for n, path in enumerate(paths))

        documents = [prompt[:6], prompt[6:20], prompt[20 : min(60, len(prompt))]]
        hidden = base.hidden_states(TrainBatch.of(documents), HiddenStatesSpec()).final
        packed = torch.cat([self.expected(document) for document in documents])
        errors["packed"] = _error(base.logits(hidden)[0], packed)
        return errors

    def wrong_answers(self) -> list[str]:
        """Return the names of the decoders whose output differs from the stock model's."""
        base, answers, wrong = self.base, [self._stock_answer(prompt) for prompt in self.prompts], []
        medusa = randomised(MedusaConfig(num_draft_tokens=3).build(base))
        lookup = PromptLookup(num_tokens=4, max_ngram=2, matches=3)
        for prompt, answer in zip(self.prompts, answers, strict=True):
            oracle = Oracle(prompt + answer, base.vocab_size)
            drafters: dict[str, tuple[Any, TokenTree | None]] = {
                "autoregressive": (None, None),
                "prompt lookup": (lookup, None),
                "medusa": (medusa, TokenTree.expansion([3, 1, 1])),
                "oracle": (oracle, ORACLE_TREE),
            }
            for name, (drafter, tree) in drafters.items():
                if self._decoded(drafter, prompt, tree) != answer:
                    wrong.append(f"{name} after {len(prompt)}")
        batch = decode_batch(base, lookup, self.prompts, max_new_tokens=NEW, ignore_eos=True)
        wrong += [
            f"batch after {len(p)}" for p, a, r in zip(self.prompts, answers, batch, strict=True) if r.tokens != a
        ]
        return wrong

    def wrong_counts(self) -> list[str]:
        """Return an error if ``mode=estimate`` does not count the parameters of the text model exactly."""
        counted = meta_base(self.base.model.config).model.num_parameters()
        actual = sum(parameter.numel() for parameter in self.base.stock().parameters())
        return [] if counted == actual else [f"{counted} parameters estimated of {actual}"]

    def heads(self) -> dict[str, str]:
        """Return the error of every head; empty if the head works."""
        prompt, errors = self.prompts[-1], {}
        answer = self._decoded(None, prompt, None)
        for name, config in HEADS.items():
            try:
                head = randomised(config().build(self.base), 0.02)
                if self._decoded(head, prompt, TokenTree.expansion([2, 1, 1])) != answer:
                    raise AssertionError("decodes other tokens")
                _check_loss(head, prompt)
                errors[name] = ""
            except UserError as error:
                errors[name] = str(error)
            except Exception as error:
                errors[name] = f"RAISED {_one_line(error)}"
        return errors

    def _decoded(self, drafter: Any, prompt: list[int], tree: TokenTree | None) -> list[int]:
        options: dict[str, Any] = {} if tree is None else {"draft_config": DraftConfig(tree=tree)}
        return decode(self.base, drafter, prompt, max_new_tokens=NEW, ignore_eos=True, **options).tokens

    def _stock_answer(self, prompt: list[int]) -> list[int]:
        tokens = list(prompt)
        for _ in range(NEW):
            tokens.append(int(self.expected(tokens)[-1].argmax()))
        self.stock.generation_config.eos_token_id = None
        if generated(self.stock, [prompt], NEW)[0] != tokens[len(prompt) :]:
            raise RuntimeError("stock generate differs from stock argmax without a cache")
        return tokens[len(prompt) :]


def _check_loss(head: DraftHead, prompt: list[int]) -> None:
    half = len(prompt) // 2
    row = TrainBatch.of([prompt[:half], prompt[half:]])
    out = head.train().loss(row, head.base.hidden_states(row, head.spec), LossConfig())
    torch.autograd.backward(out.loss_sum / out.tokens)
    if not bool(out.loss_sum.isfinite()):
        raise AssertionError("its loss is not finite")


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {one_line(error)}"


def _error(logits: Tensor, expected: Tensor) -> float:
    return float((logits - expected).abs().max() / expected.abs().max())


def outcome(shape: dict[str, Any], prompts: tuple[int, ...] = PROMPTS, heads: bool = True) -> Outcome:
    """Build, load and compare one configuration."""
    result = Outcome(family=str(shape["model_type"]))
    stock = None
    with tempfile.TemporaryDirectory() as folder:
        try:
            stock = stored(shape, Path(folder))
            with torch.inference_mode():
                stock(input_ids=torch.tensor([[3, 4, 5]]), use_cache=False)
        except Exception as error:
            stock, result.unbuilt = None, _one_line(error)
        try:
            base = BaseModel.load(BaseConfig(name=folder, tokenizer="builtin:tiny", dtype="float32", kernels="packed"))
            if stock is not None:
                compare(result, Comparison(stock, base, prompts), heads)
        except UserError as error:
            result.refused = str(error).replace(folder, "FOLDER")
        except Exception as error:
            result.raised = _one_line(error)
    gc.collect()
    return result


def compare(result: Outcome, comparison: Comparison, heads: bool) -> None:
    """Run all checks of a base that loads, and store their results."""
    try:
        result.loads, result.context = True, comparison.base.max_context
        result.errors = comparison.logit_errors()
        result.wrong = [kind for kind, error in result.errors.items() if error >= TOLERANCE]
        result.wrong += comparison.wrong_answers() + comparison.wrong_counts()
        if heads:
            result.heads = comparison.heads()
    except Exception as error:
        result.raised = _one_line(error)


def real(name: str) -> Outcome:
    """Compare a real checkpoint with its stock model."""
    base = BaseModel.load(BaseConfig(name=name, dtype="float32"))
    result = Outcome(family=base.model.config.model_type)
    compare(result, Comparison(base.stock(), base, PROMPTS), heads=True)
    return result


def main() -> None:
    """Compare the configurations and print the outcomes."""
    options = parser(__doc__)
    options.add_argument("--only", default=",".join(SHAPES), metavar="A,B", help="names in base_shapes.py")
    options.add_argument("--write", action="store_true", help="write the tables of docs/explanation/bases.md")
    options.add_argument("--base", metavar="NAME", help="compare this checkpoint instead")
    arguments = options.parse_args()
    names = listed("only", arguments.only, list(SHAPES))
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    warnings.simplefilter("ignore")
    if arguments.base is not None:
        print(real(arguments.base).line(arguments.base))
        return
    outcomes = {}
    for name in names:
        outcomes[name] = outcome(SHAPES[name])
        print(outcomes[name].line(name), flush=True)
    print(summary(outcomes))
    if arguments.write:
        before, _, rest = PAGE.read_text().partition(MARKS[0])
        PAGE.write_text(f"{before}{MARKS[0]}\n{tables(outcomes)}\n{MARKS[1]}{rest.partition(MARKS[1])[2]}")
    save_record(arguments, "bases", {"bases": {name: vars(o) | {"passes": o.passes} for name, o in outcomes.items()}})


def tables(outcomes: dict[str, Outcome]) -> str:
    """Return the generated part of docs/explanation/bases.md."""
    lines = [
        f"{summary(outcomes)}.",
        "",
        "| configuration | model type | windows | heads | shaped after |",
        "|---|---|---|---|---|",
    ]
    for name, o in sorted(outcomes.items()):
        if o.loads:
            text = SHAPES[name].get("text_config", SHAPES[name])
            whole = SIZES["max_position_embeddings"]
            windows = [text.get(key) or whole for key in ("sliding_window", "attention_chunk_size")]
            bound = f"context bound to {o.context}" if o.context < text["max_position_embeddings"] else ""
            missing = ", ".join(head for head, why in o.heads.items() if why)
            wrong = "" if o.passes else f" **wrong** {o.raised or ', '.join(o.wrong)}"
            cells = (f"{name}{wrong}", f"`{o.family}`", "yes" if min(windows) < whole else bound)
            cells += (f"all but {missing}" if missing else "all", AFTER.get(name, ""))
            lines.append(f"| {' | '.join(cells)} |")
    lines += ["", "| refused | message |", "|---|---|"]
    lines += [f"| {name} | {o.refused} |" for name, o in sorted(outcomes.items()) if o.refused]
    unbuilt = [name for name, o in sorted(outcomes.items()) if o.unbuilt]
    return "\n".join([*lines, "", f"Not built by transformers from these sizes: {', '.join(unbuilt) or 'none'}."])


def summary(outcomes: dict[str, Outcome]) -> str:
    """Return how many configurations passed, were refused, are wrong and could not be built."""
    built = [o for o in outcomes.values() if not o.unbuilt]
    passed = [o for o in built if o.passes]
    return (
        f"{len(built)} configurations of {len({o.family for o in built})} model types: {len(passed)} pass "
        f"everything ({len({o.family for o in passed})} model types), "
        f"{sum(bool(o.refused) for o in built)} are refused by name, "
        f"{sum(o.loads and not o.passes and not o.raised for o in built)} are wrong, "
        f"{sum(bool(o.raised) for o in built)} raise; {len(outcomes) - len(built)} could not be built here"
    )


if __name__ == "__main__":
    entry_point(main)
