"""Settings classes: limits, types, misspelt keys and help, each with the dotted key that users type."""

from dataclasses import field, replace
from importlib import import_module
from typing import Annotated, Any, Literal

import pytest
from pydantic import Field

from drafthead.cli import COMMANDS
from drafthead.commands.command import REGISTERED
from drafthead.data.text.sources import SourceConfig
from drafthead.models.heads.parts.loading import config_class, head_types
from drafthead.settings.help import describe, first_sentence, help_text
from drafthead.settings.schema import NonNegative, Positive, check, require, settings
from drafthead.train.config import RunConfig
from support import cases, refuses


@settings(kw_only=True)
class Optim:
    """The optimiser."""

    lr: Annotated[float, Field(gt=0, lt=1)] = 1e-3
    """Peak learning rate. A second sentence."""
    name: Literal["adamw", "muon"] = "adamw"
    betas: tuple[float, float] = (0.9, 0.95)
    steps: Positive | None = None
    window: int = 3

    def __post_init__(self) -> None:
        require(self.window < 10, "window", "below 10", self.window)


@settings(kw_only=True)
class Phase:
    """A phase."""

    corpus: str
    """``text`` or ``answers``."""
    optim: Optim = field(default_factory=Optim)
    decay: float | int | str = 0.8
    lengths: list[NonNegative] = field(default_factory=list)


@settings(kw_only=True)
class Run:
    """A run."""

    name: str
    phases: dict[str, Phase] = field(default_factory=dict)
    more: list[Optim] = field(default_factory=list)


def run(**phase: Any) -> Run:
    return check({"name": 3, "phases": {"distill": {"corpus": "text", **phase}}}, Run)


def test_values_are_converted_as_yaml_writes_them() -> None:
    made = run(optim={"lr": "1e-2", "betas": [0.5, 1]})
    assert made.name == "3" and made.phases["distill"].optim == Optim(lr=0.01, betas=(0.5, 1.0))


@cases(
    "phase, says",
    ({"optim": {"lr": 7}}, "phases.distill.optim.lr must be above 0 and below 1, got 7"),
    ({"optim": {"lr": float("nan")}}, "phases.distill.optim.lr must be a finite number, got nan"),
    ({"optim": {"name": "sgd"}}, "phases.distill.optim.name must be one of adamw, muon, got 'sgd'"),
    ({"optim": {"window": 12}}, "phases.distill.optim.window must be below 10, got 12"),
    ({"optim": {"betas": [1]}}, r"phases.distill.optim.betas must be a list of 2 values, got \["),
    ({"lengths": [1, -1]}, r"phases.distill.lengths\[1\] must be at least 0, got -1"),
    ({"optim": {"lrr": 1}}, "phases.distill.optim.lrr is not a setting; did you mean phases.distill.optim.lr?"),
    ({"corpsu": "text", "corpus": None}, "phases.distill.corpsu is not a setting; did you mean phases.distill.corpus?"),
    ({"corpus": None}, "phases.distill.corpus must be a valid string, got None"),
)
def test_bad_values_are_named_by_their_dotted_key(phase: dict[str, Any], says: str) -> None:
    refuses(f"^{says}", run, **phase)


def test_required_keys_and_python_callers() -> None:
    refuses("^nmae is not a setting; did you mean name", check, {"nmae": "x"}, Run)
    refuses("^name is missing", check, {}, Run)
    for make in (lambda: Optim(lr=2), lambda: replace(Optim(), lr=2)):
        refuses("^lr must be above 0 and below 1, got 2$", make)


def test_help_has_a_line_for_every_setting() -> None:
    keys = [setting.key for setting in describe(Run)]
    assert keys[:3] == ["name", "phases.NAME.corpus", "phases.NAME.optim.lr"] and keys[-1] == "more"
    text = help_text("usage: x\n", Run)
    assert all(any(line.lstrip().startswith(f"{key}=") for line in text.splitlines()) for key in keys)
    assert "  name=..." in text and "phases.NAME.optim.lr=0.001" in text
    assert "Peak learning rate (above 0 and below 1)" in text and "second" not in text


def test_first_sentence() -> None:
    assert first_sentence("Use ``a.b`` for 0.5 of it. ``a`` is more.") == "Use a.b for 0.5 of it"
    assert first_sentence("Size. 0 turns it off.") == "Size"


for module, _ in COMMANDS.values():
    import_module(module)  # registers its command
CLASSES = {"train": RunConfig, "source": SourceConfig} | {name: cls for name, (cls, _) in REGISTERED.items()}
CLASSES |= {name: config_class(name) for name in head_types()}


@pytest.mark.parametrize("name", CLASSES)
def test_every_setting_has_a_short_and_complete_help(name: str) -> None:
    first = {setting.key: first_sentence(setting.help) for setting in describe(CLASSES[name])}
    assert not [key for key, text in first.items() if not text]
    assert not [(key, text) for key, text in first.items() if len(text) > 110]
    assert not [(key, text) for key, text in first.items() if text.startswith("Of ") or "None" in text]
    assert max(map(len, help_text("", CLASSES[name]).splitlines())) <= 120
