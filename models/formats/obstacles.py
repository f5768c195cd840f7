"""What heads do and formats cannot say. An export lists all of it at once, with the settings that avoid it."""

from dataclasses import dataclass

from drafthead.models.draft_head import DraftHead


@dataclass(frozen=True)
class Obstacle:
    """Something that a head does and a format cannot say."""

    found: str
    """``it reads ...``: with the head as the subject."""
    instead: str
    """Settings that avoid it."""


def adapter_obstacles(head: DraftHead) -> list[Obstacle]:
    """A base with an adapter merged into it: its name, by which engines download it, would find another one."""
    adapter = head.base.config.adapter
    if adapter is None:
        return []
    return [
        Obstacle(
            f"it drafts for {head.base.name} with the adapter {adapter}, which engines would not load",
            "publish the base as a whole model, which head.save_merged=true writes, and name it: base_name=user/repo",
        )
    ]


def vocabulary_obstacles(head: DraftHead, instead: str = "") -> list[Obstacle]:
    """A draft vocabulary where the format has none: rows for the other ids would need values that nobody trained.

    Args:
        head: may draft over the whole vocabulary, which is none.
        instead: another format that has one: ``to=...``.
    """
    if len(head.d2t) == head.base.vocab_size:
        return []
    return [
        Obstacle(
            f"it drafts over {len(head.d2t)} of {head.base.vocab_size} ids, and the format has no draft vocabulary",
            " or ".join(filter(None, ["head.draft_vocab_size=null", instead])),
        )
    ]
