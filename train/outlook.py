"""What a run will do, stage by stage, and about how long each takes here: printed before the first long stage.

Two short passes of the base say how fast the machine is; times of training follow from the products that it multiplies.
"""

from statistics import mean
from time import perf_counter

import torch
from rich.table import Table

from drafthead.data.utils.display import duration
from drafthead.eval.prompts.prompt import conversation_ids
from drafthead.eval.prompts.suites import load_suite
from drafthead.eval.trees.cost_model import SIZES
from drafthead.models.base.base_model import BaseModel
from drafthead.models.base.layers import reading_copy
from drafthead.train.config import PhaseConfig, RunConfig
from drafthead.train.estimate import Estimate

LONG_PASS = 256
"""Tokens of the pass that stands for reading text and for training."""
PROMPT_TOKENS = 100
"""Of a usual prompt with its chat template, where the real ones are not known yet."""
MOST_TURNS = 2
"""Of a conversation of a suite."""
TRAINING_PASSES = 3
"""Forward, and twice as much backward."""
TRAINING_OVERHEAD = 1.5
"""Of a training step over its products, on a CPU."""


class Outlook:
    """Seconds that the stages of a run will take on this machine, as far as they can be told."""

    def __init__(self, run: RunConfig, base: BaseModel, devices: int) -> None:
        self.run, self.base, self.devices = run, base, devices
        self.read_s = _seconds(base, LONG_PASS) / LONG_PASS
        """Of reading a token among many."""
        self.cache_s = _seconds(reading_copy(base), LONG_PASS) / LONG_PASS
        """The same for hidden states to train on."""
        self.step_s = _seconds(base, 1)
        """Of one autoregressive step."""
        self.costs = Estimate(run, devices, device=base.device.type)

    def rows(self) -> list[tuple[str, str, float]]:
        """Stage, what it does, and seconds; of the stages that will run."""
        known = {"corpora": self._corpora, "tree": self._tree, "evaluate": self._evaluate}
        rows = []
        for stage in self.run.stages:
            if stage == "train":
                rows += [(f"phase {name}", *self._phase(name, phase)) for name, phase in self.run.phases.items()]
            elif stage in known:
                rows.append((stage, *known[stage]()))
        return rows

    def _corpora(self) -> tuple[str, float]:
        config = self.run.data.answers
        if config.copied:
            return f"answers made before ({config.precomputed}), compared with the base", 5.0
        answers = config.prompts + config.self_prompted
        if config.server.url is not None:
            return f"{answers:,} answers by {config.server.url}", float("nan")
        steps = answers * config.sampler.max_new_tokens / min(config.batch_size, answers) / self.devices
        return f"the base's answers to {answers:,} prompts", steps * _seconds(self.base, config.batch_size)

    def _phase(self, name: str, phase: PhaseConfig) -> tuple[str, float]:
        tokens = self.costs.tokens(name) / self.devices
        head = self.costs.head
        trained = head.trainable + head.positions * head.draft_vocab_size * self.base.hidden_size
        per_parameter = self.read_s / self.costs.shape.base_parameters
        seconds = self.costs.trained_tokens(name) / self.devices * trained * per_parameter
        seconds *= TRAINING_PASSES * TRAINING_OVERHEAD
        answers = self.run.data.answers
        if phase.corpus == "text":
            corpus = min(self.run.data.text.max_tokens, phase.max_tokens or tokens)
        else:
            prompt = min(PROMPT_TOKENS, answers.max_prompt_tokens)
            answered = (answers.prompts + answers.self_prompted) * answers.sampler.max_new_tokens
            answered = min(answered, phase.max_tokens or answered)
            corpus = answered + answered * prompt // answers.sampler.max_new_tokens
        if not phase.store_hidden_states:
            read = tokens
        else:
            read = 0 if phase.corpus == "answers" and self.run.stores_answer_states else min(corpus, tokens)
        return f"{phase.steps:,} steps on {phase.corpus}, {int(tokens):,} tokens", seconds + read * self.cache_s

    def _tree(self) -> tuple[str, float]:
        run, repeats = self.run, 11
        passes = repeats * sum(max(self.step_s, n * self.read_s) for n in SIZES)
        prompts = run.tree_prompts if run.eval.split == "test" else 0
        if prompts:
            asked = self._prompt_tokens("dev", prompts)
            answered = MOST_TURNS * run.eval.max_new_tokens * _seconds(self.base, prompts)
            passes += answered + MOST_TURNS * sum(asked) * self.read_s
        return f"answers to {prompts} prompts, and the costs of a step", passes

    def _evaluate(self) -> tuple[str, float]:
        config = self.run.eval
        suite = load_suite(config.suite, config.limit, config.seed, config.tasks, config.split)
        turns = sum(prompt.turns for prompt in suite)
        decoders = 3 + config.stock_baseline + len(config.baselines)
        read = mean(self._prompt_tokens(config.split, config.limit)) * self.read_s
        answer = config.max_new_tokens * self.step_s + read
        what = f"{turns} answers of {config.max_new_tokens} tokens ({config.suite}), each by {decoders} methods in turn"
        return what, (turns + 1) * decoders * answer

    def _prompt_tokens(self, split: str, limit: int | None) -> list[int]:
        """Of the suite's first turns."""
        config, base = self.run.eval, self.base
        suite = load_suite(config.suite, limit, config.seed, config.tasks, split)
        kwargs = base.config.chat_template_kwargs
        return [len(conversation_ids(base.tokenizer, prompt, template_kwargs=kwargs)) for prompt in suite]

    def table(self) -> Table:
        """For the console."""
        table = Table(title=f"{self.run.name}: what will happen", box=None, pad_edge=False, title_justify="left")
        table.add_column("stage", min_width=16)
        table.add_column("what it does", overflow="fold")
        table.add_column("about", justify="right", no_wrap=True)
        rows = self.rows()
        for stage, what, seconds in rows:
            table.add_row(stage, what, duration(seconds))
        table.add_section()
        table.add_row("all of it", "", duration(sum(seconds for *_, seconds in rows)))
        return table


def _seconds(base: BaseModel, tokens: int) -> float:
    """Of one pass of the base over so many tokens, logits included; the faster of three."""
    tokens = min(tokens, base.max_context)
    ids = torch.zeros(1, tokens, dtype=torch.long, device=base.device)
    found = []
    for _ in range(3):
        started = perf_counter()
        base.logits(base.forward(ids, base.new_cache(tokens)).final[:, -1])
        base.synchronise()
        found.append(perf_counter() - started)
    return min(found)
