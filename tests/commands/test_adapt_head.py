"""A head for a fine-tune: attach it, measure what it keeps, adapt it, and go back to the original base."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from drafthead.errors import UserError
from drafthead.eval.trees.replay import length_ratio
from drafthead.files.local import read_json
from drafthead.models.base.base_config import BaseConfig, save_merged
from drafthead.models.heads.medusa import MedusaConfig
from drafthead.models.heads.parts.loading import load_base, load_head
from drafthead.models.simulation.acceptance import accept_probs_of_ranks, simulate_acceptance
from drafthead.models.token_tree import TokenTree
from drafthead.train.config import composed as parsed
from drafthead.train.pipeline import run_pipeline
from support import TINY, call, call_fails, composed, refuses

SHAPE = [f"++base.shape.{key}={value}" for key, value in {**TINY, "num_hidden_layers": 2}.items()]
SHORT = (
    "~phases.pretrain",
    "data.answers.prompts=20",
    "data.answers.sampler.max_new_tokens=8",
    "phases.distill.steps=2",
)


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of an original base, another one of equal sizes, and a deeper one; and a head of the first."""
    folder = tmp_path_factory.mktemp("bases")
    for seed, name in enumerate(("original", "tuned", "deeper")):
        shape = {**TINY, "initializer_range": 0.3, "num_hidden_layers": 3 if name == "deeper" else 2}
        save_merged(BaseConfig(random=True, shape=shape, seed=seed, tokenizer="builtin:tiny"), folder / name)
    head = MedusaConfig(num_draft_tokens=3).build(load_base(str(folder / "original")), torch.arange(100)).eval()
    head.tree = TokenTree.chain(2)
    head.save_pretrained(folder / "head")
    return folder


def test_a_head_is_attached_to_a_fine_tune_and_back(bases: Path, tmp_path: Path) -> None:
    here, back = tmp_path / "here", tmp_path / "back"
    call_fails(
        "trained for .*original.*drafthead import", "replay", f"head={bases / 'head'}", f"base={bases / 'tuned'}"
    )
    call("import", f"from={bases / 'head'}", f"base={bases / 'tuned'}", f"out={here}")
    head = load_head(here)
    assert head.base.name == str(bases / "tuned") and head.tree == TokenTree.chain(2)
    call("import", f"from={here}", f"base={bases / 'original'}", f"out={back}")
    weights = "model.safetensors"
    assert (back / weights).read_bytes() == (here / weights).read_bytes() == (bases / "head" / weights).read_bytes()
    assert read_json(back / "config.json")["base"] == read_json(bases / "head" / "config.json")["base"]
    own = f"^error: .* is a drafthead head of this base already; use it directly, as in `drafthead eval head={here}"
    call_fails(own, "import", f"from={here}", f"base={bases / 'tuned'}", f"out={tmp_path / 'x'}")
    call_fails(
        "num_layers 2.*num_layers 3", "import", f"from={here}", f"base={bases / 'deeper'}", f"out={tmp_path / 'x/y'}"
    )
    call_fails("leave out config", "import", f"from={here}", f"base={bases / 'original'}", "config.layers=[1]", "out=x")
    call_fails("leave out config", "import", f"from={here}", f"base={bases / 'original'}", "format=medusa", "out=x")
    assert not (tmp_path / "x").exists()


def test_replay_shows_what_a_head_keeps(
    bases: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    call("import", f"from={bases / 'head'}", f"base={bases / 'tuned'}", f"out={tmp_path / 'here'}")
    capsys.readouterr()
    suite = ["suite=builtin", "limit=3", "max_new_tokens=12", "costs=false"]
    call("replay", f"head={tmp_path / 'here'}", *suite, f"original_base={bases / 'original'}")
    output = " ".join(capsys.readouterr().out.split())
    found = re.search(
        r"tau (\d\.\d\d) on this base and (\d\.\d\d) on .*original, .* keeps (\d+) % \((\d+)-(\d+)\)", output
    )
    assert found is not None, output
    here, there, kept = (float(found[n]) for n in (1, 2, 3))
    assert kept == pytest.approx(100 * here / there, abs=1.5)
    command = f"train recipe=adapt_head base.name={bases / 'tuned'} init_from={tmp_path / 'here'}"
    assert command in output
    call_fails("original_base", "replay", f"head={tmp_path / 'here'}", *suite, "rule=block", "original_base=x")
    here, other = f"head={tmp_path / 'here'}", f"base={bases / 'tuned'}"
    monkeypatch.delattr("drafthead.commands.replay.base_answers")  # all of these before anything is answered
    call_fails(
        "a head that was trained, not prompt", "replay", "head=prompt_lookup:2", other, *suite, "original_base=x"
    )
    call_fails("other sizes", "replay", here, *suite, f"original_base={bases / 'deeper'}")
    call_fails("itself; name the one before", "replay", here, *suite, f"original_base={bases / 'tuned'}")


def test_the_ratio_of_lengths_is_paired() -> None:
    ranks = [np.random.default_rng(n).integers(0, 2, size=(30, 3)) for n in range(12)]
    good, bad = ([accept_probs_of_ranks(each + shift, 4) for each in ranks] for shift in (0, 1))
    chain = TokenTree.chain(3)
    first, second = simulate_acceptance(good, chain), simulate_acceptance(bad, chain)
    ratio, (low, high) = length_ratio(first, second)
    assert ratio == pytest.approx(first.mean_accepted_length / second.mean_accepted_length)
    assert low < ratio < high
    assert length_ratio(first, first) == (1.0, (1.0, 1.0))


@pytest.mark.slow
def test_a_head_is_adapted_to_a_fine_tune(bases: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"Count to {n}."}) + "\n" for n in range(60)))
    tiny = ("recipe=adapt_head", "debug=tiny", f"base.name={bases / 'tuned'}", "base.random=false", *SHAPE)
    init = (f"init_from={bases / 'head'}", "extend_vocabulary=true")
    run = composed(tmp_path, *tiny, *init, f"data.prompts={prompts}", *SHORT)
    assert run[0].head_config().head_type == "medusa" and list(run[0].phases) == ["distill"]
    run_pipeline(*run)
    output = capsys.readouterr().out
    assert "was trained for another base" in output
    assert re.search(r"new data, \d+ held-out answers: mean accepted length", output)
    adapted = load_head(tmp_path / "run" / "head")
    assert adapted.base.name == str(bases / "tuned")
    before = load_head(bases / "head")
    assert {*before.d2t.tolist()} < {*adapted.d2t.tolist()}, "tokens of the answers are added"
    assert any(not torch.equal(p, q) for p, q in zip(adapted.parameters(), before.parameters(), strict=True))
    run_pipeline(*run)  # the same command again finds everything done


@pytest.mark.parametrize("recipe", ["adapt_head", "adapt_head_smollm2"])
def test_the_recipes_need_a_head_to_adapt(recipe: str, bases: Path) -> None:
    for more in ([], ["head=eagle3"]):
        with pytest.raises(UserError, match="init_from is missing, the head to adapt; set init_from=HEAD"):
            parsed([f"recipe={recipe}", *more])
    refuses("extend_vocabulary needs init_from", parsed, ["recipe=medusa_smollm2", "extend_vocabulary=true"])
    with pytest.raises(UserError, match="type medusa, not eagle3"):
        parsed([f"recipe={recipe}", "head=eagle3", f"init_from={bases / 'head'}"])
    for budget, answers, steps in (("adapt_500", 500, 50), ("adapt_20000", 20000, 2000)):
        run = parsed([f"recipe={recipe}", f"init_from={bases / 'head'}", "base.name=x", f"budget={budget}"])
        assert (run.data.answers.prompts, run.phases["distill"].steps) == (answers, steps)
