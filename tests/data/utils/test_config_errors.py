"""What a recipe's settings are refused with."""

import pytest
from hydra import compose, initialize_config_module

from drafthead.data.utils.errors import UserError
from drafthead.train.config import RunConfig, parse_run

MEDUSA_ONLY = ("num_layers", "reads_last_token")


def load(*overrides: str) -> RunConfig:
    with initialize_config_module("drafthead.recipes", version_base="1.3"):
        return parse_run(compose("train", overrides=[*overrides]))


def test_settings_of_another_head_are_named_at_once() -> None:
    """``head=eagle3`` beside a Medusa recipe: the user typed none of the keys that do not fit."""
    with pytest.raises(UserError) as found:
        load("recipe=medusa_smollm2", "head=eagle3", "head.ttt_steps=3")
    said = str(found.value)
    assert f"Eagle3Config has no {', '.join(MEDUSA_ONLY)}; the recipe sets them for another head" in said
    assert "Choose a recipe of this head" in said and "\n" not in said
    advised = [word for word in said.split() if word.startswith("~head.")]
    assert advised == [f"~head.{name}" for name in MEDUSA_ONLY]
    assert load("recipe=medusa_smollm2", "head=eagle3", "head.ttt_steps=3", *advised).head["draft_vocab_size"] == 4096


def test_a_misspelt_setting_is_named_beside_those_that_there_are() -> None:
    with pytest.raises(UserError, match=r"MedusaConfig has no num_draft_tokns; .*misspelt \(it has .*num_draft_tokens"):
        load("recipe=medusa_smollm2", "+head.num_draft_tokns=3")


def test_overlong_messages_keep_both_ends() -> None:
    said = str(UserError(f"a.json has a bad name {'9' * 5000!r}; copy it again"))
    assert len(said) < 2300 and said.startswith("a.json has a bad name '999") and said.endswith("'; copy it again")
