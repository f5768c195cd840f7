"""The generate command on a stored base: what it says beside the answer."""

from pathlib import Path

import pytest
from transformers import GenerationConfig

from drafthead.models.base.base_config import BaseConfig
from drafthead.models.base.base_model import BaseModel
from support import TinyBase, call


def test_settings_of_a_generation_config_are_named_where_they_are_left_out(
    tiny_base: TinyBase, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With them transformers writes another text than that of the largest logits."""
    base = tiny_base()
    base.stock().save_pretrained(tmp_path)
    how = "head=prompt_lookup:3", f"base.name={tmp_path}", "base.tokenizer=builtin:tiny", "max_new_tokens=4", "hello"
    call("generate", *how)
    assert "generation_config" not in capsys.readouterr().out
    GenerationConfig(repetition_penalty=1.5, suppress_tokens=[7], num_beams=1).save_pretrained(tmp_path)
    call("generate", *how)
    shown = capsys.readouterr().out.splitlines()[-1]
    assert shown.startswith("not applied, of the base's generation_config.json: repetition_penalty=1.5, suppress_tok")
    loaded = BaseModel.load(BaseConfig(name=str(tmp_path), tokenizer="builtin:tiny"))
    assert loaded.ignored_settings == ["repetition_penalty=1.5", "suppress_tokens"]
