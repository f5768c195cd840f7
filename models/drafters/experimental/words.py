"""The words of experimental drafters in expressions (``drafters/expression.py``)."""

from pathlib import Path

from drafthead.errors import UserError
from drafthead.models.base.base_model import BaseModel
from drafthead.models.decoding.drafter import Drafter
from drafthead.models.drafters.draft_model import ModelDrafter
from drafthead.models.drafters.experimental.horizontal_cascade import HorizontalCascade
from drafthead.models.drafters.experimental.max_gram import MaxGram, bigram_table
from drafthead.models.drafters.experimental.triforce import DEFAULT_POLICY, Policy, TriForce
from drafthead.models.drafters.experimental.vertical_cascade import VerticalCascade
from drafthead.models.drafters.kinds import Expression, Kind, Parts


def _max_gram(expression: Expression, base: BaseModel, parts: Parts) -> Drafter:
    if not expression.name:
        return MaxGram(expression.tokens)
    from drafthead.data.answers.store import open_answers  # loads pyarrow, which serving engines lack

    # A run's corpus folder, or its folder ``answers``.
    answers = open_answers(Path(expression.name)).read(with_hidden_states=False)
    bigrams = bigram_table((a.input_ids[a.boundary - 1 :].tolist() for a in answers), base.vocab_size)
    return MaxGram(expression.tokens, bigrams)


def _budget(expression: Expression, base: BaseModel, parts: Parts) -> Drafter:
    return TriForce(base, expression.numbers[0], expression.name or DEFAULT_POLICY, num_tokens=expression.tokens)


def _relay(expression: Expression, base: BaseModel, parts: Parts) -> Drafter:
    return HorizontalCascade([drafter for drafter, _ in parts], [config.depth for _, config in parts])


def _nested(expression: Expression, base: BaseModel, parts: Parts) -> Drafter:
    (model, _), (drafter, config) = parts
    first = expression.parts[0]
    if isinstance(model, TriForce):
        policy = first.name or DEFAULT_POLICY
        return TriForce(base, model.budget, policy, num_tokens=model.depth, drafter=drafter, draft_config=config)
    if not isinstance(model, ModelDrafter):
        raise UserError(
            f"in {expression.text!r}, {first.text!r} is not a model; as the first drafter, give early_exit:LAYERS, "
            "budget:POSITIONS or model:NAME"
        )
    return VerticalCascade(model.model, drafter, num_tokens=model.depth, draft_config=config, target=base)


WORDS = {
    "max_gram": Kind(form="max_gram[:CORPUS]", build=_max_gram, tokens=10, takes_name=True),
    "budget": Kind(
        form="budget:POSITIONS[:POLICY]",
        build=_budget,
        tokens=6,
        numbers=(1, 1),
        tokens_at=1,
        takes_name=True,
        name_last=True,
        check_name=lambda name: name and Policy.parse(name),
    ),
    "relay": Kind(form="relay:A@2+B@4", build=_relay, combines=True),
    "nested": Kind(form="nested:A@6+B", build=_nested, combines=True, nests=True),
}
