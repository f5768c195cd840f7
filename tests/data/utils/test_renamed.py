"""Names in saved files of earlier versions."""

from typing import Any

import pytest

from drafthead.data.utils.renamed import update_names

OLD_PHASE = {"corpus": "generations", "hidden_states": "cached", "seq_len": 64}
PHASE = {"corpus": "answers", "store_hidden_states": True, "seq_len": 64}


@pytest.mark.parametrize(
    ("saved", "path", "expected"),
    [
        ({"phases": {"distill": OLD_PHASE}}, "", {"phases": {"distill": PHASE}}),
        (OLD_PHASE, "phases.distill", PHASE),
        ({"phases.pretrain.hidden_states": "computed"}, "", {"phases.pretrain.store_hidden_states": False}),
        (
            {"data": {"generations": {"keep_hidden_states": True, "prompts": 3}}},
            "",
            {"data": {"answers": {"prompts": 3}}},
        ),
        ({"data.generations.prompts": 3, "data.generations.keep_hidden_states": True}, "", {"data.answers.prompts": 3}),
        ({"a": [{"b": "${data.generations.prompts}"}]}, "", {"a": [{"b": "${data.answers.prompts}"}]}),
        (
            {"corpus": "generations", "hidden_states": "cached"},
            "",
            {"corpus": "generations", "hidden_states": "cached"},
        ),
    ],
)
def test_keys_and_values_get_their_new_names(saved: Any, path: str, expected: Any) -> None:
    assert update_names(saved, path) == expected
