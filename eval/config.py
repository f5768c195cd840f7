"""What an evaluation measures."""

from dataclasses import dataclass, field

from hydra.core.config_store import ConfigStore

from drafthead.data.errors import UserError
from drafthead.models.base_config import BaseConfig


@dataclass(kw_only=True)
class EvalConfig:
    """Prompts, lengths and trees of an evaluation."""

    suite: str = "smoke"
    """``smoke``, ``mt_bench``, ``builtin``, or a path to a JSONL file of prompts."""
    limit: int | None = None
    """At most so many prompts, spread over the suite's tasks."""
    max_new_tokens: int = 128
    tree: str = "head"
    """``head`` (the tree calibrated on held-out answers and this machine), ``chain``, or a path to a ``tree.json``."""
    seed: int = 0
    """Of the prompt order and the bootstrap."""

    def __post_init__(self) -> None:
        if self.max_new_tokens < 2:
            raise ValueError(f"eval.max_new_tokens must be at least 2, got {self.max_new_tokens}")
        if self.limit is not None and self.limit < 1:
            raise ValueError(f"eval.limit must be >= 1 or null, got {self.limit}")


@dataclass(kw_only=True)
class EvalRunConfig:
    """``drafthead eval``: a saved head on a suite."""

    head: str = ""
    """A head folder (``outputs/NAME/head``) or a Hub repository."""
    base: BaseConfig = field(default_factory=BaseConfig)
    """By default the base that the head names."""
    suite: str = "smoke"
    limit: int | None = None
    max_new_tokens: int = 128
    tree: str = "head"
    seed: int = 0
    out: str = ""
    """Folder of ``eval.json`` and ``report.html``; by default ``eval-<suite>`` beside the head."""
    resume: bool = True
    """Keep the prompts that an interrupted evaluation has finished; false measures all again."""

    def evaluation(self) -> EvalConfig:
        """The part that a training recipe has too."""
        return EvalConfig(
            suite=self.suite, limit=self.limit, max_new_tokens=self.max_new_tokens, tree=self.tree, seed=self.seed
        )

    def __post_init__(self) -> None:
        self.evaluation()
        if not self.head:
            raise UserError("name a head: head=outputs/NAME/head or head=user/repo")


ConfigStore.instance().store(name="eval_schema", node=EvalRunConfig)
