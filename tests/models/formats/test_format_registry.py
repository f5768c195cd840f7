"""Discovery of formats, and the look-ups by name, head type and ``config.json``."""

from pathlib import Path

import pytest

from drafthead.errors import UserError
from drafthead.models import formats
from drafthead.models.formats import all_formats, format_for, format_named, recognise
from drafthead.models.heads.kangaroo import KangarooConfig
from drafthead.models.heads.medusa import MedusaConfig
from support import refuses

TOY = """
from drafthead.models.formats.kangaroo import KangarooFormat

class ToyFormat(KangarooFormat):
    name = "toy"
"""


def test_a_new_format_is_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = set(all_formats())
    (tmp_path / "toy.py").write_text(TOY)
    monkeypatch.setattr(formats, "__path__", [*formats.__path__, str(tmp_path)])
    discovered = all_formats.__wrapped__()
    assert discovered["toy"].title == all_formats()["kangaroo"].title
    assert set(discovered) == {"toy", *known} and len(known) == 13


def test_look_ups() -> None:
    assert format_for("kangaroo", KangarooConfig) is format_named("kangaroo") is all_formats()["kangaroo"]
    refuses("type hydra, .*type medusa: export it to=medusa or to=tgi_medusa", format_for, "hydra", MedusaConfig)
    refuses("unknown format 'onnx'; choose one of .*medusa", format_named, "onnx")
    refuses("x/config.json .* matches none of dspark", recognise, {"model_type": "llama"}, "x")
    with pytest.raises(UserError, match="x holds a head that drafthead does not support"):
        recognise({"model_type": "mlp_speculator", "architectures": 5}, "x")
