"""Expected duration of every stage on this machine, printed before the first long stage. A few short passes of the base
measure the machine. Training times follow from the base's time per token and parameter, or from measured training steps
(``mode=estimate``)."""

from collections.abc import Mapping
from statistics import mean
from time import perf_counter

import torch
from rich.table import Table

from drafthead.data.prompts.prompt import conversation_ids
from drafthead.data.prompts.suites import OWN, load_suite
from drafthead.data.text.sources import num_entries
from drafthead.eval.trees.cost_model import SIZES
from drafthead.models.base.base_model import BaseModel
from drafthead.models.base.layers import reading_copy
from drafthead.system.display import duration
from drafthead.train.config import PhaseConfig, RunConfig
from drafthead.train.corpora.corpora import FEWEST_SUITE_PROMPTS, HELD_OUT_MOST, is_suite_prompt
from drafthead.train.corpora.corpus_config import HELD_OUT_EVERY
from drafthead.train.estimate.memory import Estimate
from drafthead.train.trainer.trainer import VALIDATED_ROWS

LONG_PASS = 256  # tokens of the pass that represents reading text and training
PROMPT_TOKENS = 100  # of a typical prompt with its chat template, used before the real prompts are known
MAX_TURNS = 2  # per conversation, assumed for choosing the tree
TREE_REPEATS = 11  # passes per tree size: 9 (the default of `measure_costs`) and 2 that do not count
TRAINING_PASSES = 3  # cost of training in forward passes: a backward pass costs two
TRAINING_OVERHEAD = 1.5  # time of a training step by that of its matrix products, on a CPU


class StageDurations:
    """Expected seconds of each stage of a run on this machine, from passes of ``base`` that the constructor times."""

    def __init__(
        self, run: RunConfig, base: BaseModel, devices: int, measured: Mapping[str, float] | None = None
    ) -> None:
        """Time the passes. ``measured`` has seconds per step of one micro-batch by phase; None: predict them."""
        self.run, self.base, self.devices, self.measured = run, base, devices, measured
        self.read_s = _pass_seconds(base, LONG_PASS) / LONG_PASS  # per token of a long pass
        # Per token of a long pass that computes hidden states for training.
        self.cache_s = _pass_seconds(reading_copy(base), LONG_PASS) / LONG_PASS
        self.step_s = _pass_seconds(base, 1)  # of one autoregressive step
        self.costs = Estimate(run, devices, device=base.device.type)
        entries = sum(num_entries(source) or 0 for source in (*run.data.prompts, *run.data.transcripts))
        own = sum(map(is_suite_prompt, range(entries))) if run.eval.suite.startswith(OWN) else 0
        self.own = own // 2 if own >= FEWEST_SUITE_PROMPTS else 0
        """Number of the user's prompts, held out, for the tree and as many for the report; 0: prompts of the suite."""

    def rows(self) -> list[tuple[str, str, float]]:
        """Return (stage, description of its work, seconds) for long stages; seconds are nan if unknown."""
        known = {"corpora": self._corpora, "tree": self._tree, "evaluate": self._evaluate}
        rows = []
        for stage in self.run.stages:
            if stage == "train":
                rows += [(f"phase {name}", *self._phase(name, phase)) for name, phase in self.run.phases.items()]
            elif stage in known:
                rows.append((stage, *known[stage]()))
        return rows

    def table(self, title: str = "stages of a whole run; a resumed run skips what is done") -> Table:
        table = Table(title=f"{self.run.name}: {title}", box=None, pad_edge=False, title_justify="left")
        table.add_column("stage", min_width=16)
        table.add_column("work", overflow="fold")
        table.add_column("about", justify="right", no_wrap=True)
        rows = self.rows()
        for stage, work, seconds in rows:
            table.add_row(stage, work, duration(seconds))
        table.add_section()
        table.add_row("all stages", "", duration(sum(seconds for *_, seconds in rows)))
        return table

    def _corpora(self) -> tuple[str, float]:
        config = self.run.data.answers
        if not self.run.data.uses_answers:
            given = [*map(str, self.run.data.transcripts)] or [str(self.run.data.offline.folder)]
            return f"transcripts ({', '.join(given)})", float("nan")
        if config.copied:
            return f"precomputed answers ({config.precomputed}), compared with the base", 5.0
        answers = config.prompts + config.self_prompted
        if config.server.url is not None:
            return f"{answers:,} answers by {config.server.url}", float("nan")
        steps = answers * config.sampler.max_new_tokens / min(config.batch_size, answers) / self.devices
        return f"the base's answers to {answers:,} prompts", steps * _pass_seconds(self.base, config.batch_size)

    def _phase(self, name: str, phase: PhaseConfig) -> tuple[str, float]:
        tokens = self.costs.tokens(name) / self.devices
        head = self.costs.head
        parameters = self.costs.trained - self.costs.adapters + head.depth * len(head.d2t) * self.base.hidden_size
        seconds_per_parameter = self.read_s / self.costs.base.model.num_parameters()
        seconds = self.costs.trained_tokens(name) / self.devices * parameters * seconds_per_parameter
        seconds *= TRAINING_PASSES * TRAINING_OVERHEAD
        config = self.run.data.answers
        if phase.corpus == "text":
            corpus = min(self.run.data.text.max_tokens, phase.max_tokens or tokens)
        else:
            prompt = min(PROMPT_TOKENS, config.max_prompt_tokens)
            answers = (config.prompts + config.self_prompted) * config.sampler.max_new_tokens
            if self.run.data.has_given_answers:  # of unknown size
                answers = self.costs.trained_tokens(name)
            answers = min(answers, phase.max_tokens or answers)
            corpus = answers + answers * prompt // config.sampler.max_new_tokens
        read_tokens = tokens
        if phase.store_hidden_states:
            read_tokens = 0 if phase.corpus == "answers" and self.run.stores_answer_states else min(corpus, tokens)
        rows = phase.batch_line(self.devices, self.costs.rows_per_step(name))
        work = f"{phase.steps:,} steps on {phase.corpus}, {rows}, {int(tokens):,} tokens per process"
        trained = phase.steps * self.costs.rows_per_step(name)
        # A validation makes two forward passes of a row, which take about as long as training on it.
        validated = 1 + self._validated_rows() * -(-phase.steps // self.run.validate_every) / trained
        if self.measured is not None:  # steps that computed hidden states, if they are not stored
            seconds = self.measured[name] * trained / phase.micro_batch_size / self.devices * validated
            return work, seconds + (read_tokens * self.cache_s if phase.store_hidden_states else 0.0)
        return work, seconds * validated + read_tokens * self.cache_s

    def _validated_rows(self) -> int:
        """Return the number of rows of a validation, about; the most if the answers are not of known size."""
        config = self.run.data.answers
        if self.run.data.has_given_answers:
            return VALIDATED_ROWS
        answers = min(HELD_OUT_MOST, (config.prompts + config.self_prompted) // HELD_OUT_EVERY)
        tokens = min(PROMPT_TOKENS, config.max_prompt_tokens) + config.sampler.max_new_tokens
        return min(VALIDATED_ROWS, -(-answers * tokens // self.run.answer_row_length))

    def _tree(self) -> tuple[str, float]:
        run = self.run
        seconds = TREE_REPEATS * sum(max(self.step_s, n * self.read_s) for n in SIZES)
        prompts = min(run.tree_prompts, self.own or run.tree_prompts) if run.eval.split == "test" else 0
        if prompts:
            seconds += MAX_TURNS * run.eval.max_new_tokens * _pass_seconds(self.base, prompts)
            seconds += MAX_TURNS * sum(self._prompt_tokens("dev", prompts)) * self.read_s
        return f"answers to {prompts} prompts ({self._suite}), and the costs of a step", seconds

    def _evaluate(self) -> tuple[str, float]:
        config = self.run.eval
        suite = load_suite(config.suite, config.limit, config.seed, config.tasks, config.split)[: self.own or None]
        turns = sum(prompt.turns for prompt in suite)
        methods = 3 + config.stock_baseline + len(config.baselines)
        prompt_s = mean(self._prompt_tokens(config.split, config.limit)) * self.read_s
        answer = config.max_new_tokens * self.step_s + prompt_s
        work = f"{turns} answers of {config.max_new_tokens} tokens ({self._suite}), each by {methods} methods in turn"
        return work, (turns + 1) * methods * answer

    @property
    def _suite(self) -> str:
        return "your own, held out" if self.own else self.run.eval.suite.removeprefix(OWN)

    def _prompt_tokens(self, split: str, limit: int | None) -> list[int]:
        config, base = self.run.eval, self.base
        suite = load_suite(config.suite, limit, config.seed, config.tasks, split)
        kwargs = base.config.chat_template_kwargs
        return [len(conversation_ids(base.tokenizer, prompt, template_kwargs=kwargs)) for prompt in suite]


def _pass_seconds(base: BaseModel, tokens: int) -> float:
    """Time a pass over ``tokens`` tokens (at most the context), with the last token's logits: the fastest of three."""
    tokens = min(tokens, base.max_context)
    ids = torch.zeros(1, tokens, dtype=torch.long, device=base.device)
    seconds = []
    for _ in range(3):
        started = perf_counter()
        base.logits(base.forward(ids, base.new_cache(tokens)).final[:, -1])
        base.synchronise()
        seconds.append(perf_counter() - started)
    return min(seconds)
