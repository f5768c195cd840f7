"""What a model card says where the tiny run of the Hub's tests does not come: licences, engines, names, data."""

import json
import shlex
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard

from drafthead.data.answers.store import AnswerStats
from drafthead.data.text.sources import SourceConfig
from drafthead.models.base.base_config import BaseConfig
from drafthead.models.base.base_model import BaseModel
from drafthead.models.heads.eagle3 import Eagle3Config
from drafthead.models.heads.kangaroo import KangarooConfig
from drafthead.models.heads.medusa import MedusaConfig
from drafthead.train.publish import card
from support import TinyBase, cases, composed, evaluation_of, task_results

ANSWERS = AnswerStats(rows=3, tokens=50, finished=1)


@cases(
    "front, wanted",
    ("license: mit", {"license": "mit"}),
    (
        "license: other\nlicense_name: acme\nlicense_link: LICENSE",
        {"license": "other", "license_name": "acme", "license_link": "LICENSE"},
    ),
    ("tags: [a]", {"license": "unknown"}),
    ("license: [", {"license": "unknown"}),
)
def test_the_licence_is_the_bases(tmp_path: Path, front: str, wanted: dict[str, str]) -> None:
    (tmp_path / "README.md").write_text(f"---\n{front}\n---\n# A base\n")
    assert card.base_licences(BaseConfig(name=str(tmp_path))) == wanted


@pytest.mark.usefixtures("offline")
def test_a_licence_that_cannot_be_read_is_unknown(tmp_path: Path) -> None:
    for name in (str(tmp_path), "user/base"):
        assert card.base_licences(BaseConfig(name=name)) == {"license": "unknown"}


def written_card(folder: Path, base: BaseModel, rule: dict[str, Any], *overrides: str) -> ModelCard:
    run, _ = composed(folder, "recipe=medusa_smollm2", "debug=tiny", *overrides)
    head = MedusaConfig(num_draft_tokens=2).build(base, None)
    (folder / "head").mkdir()
    evaluation = evaluation_of(task_results(1.5), math=task_results(1.5)) | {"resumed": [1, 2]}
    card.write_card(run, head, ANSWERS, evaluation | {"rule": rule}, None, folder, processes=1)
    return ModelCard.load(folder / "head" / "README.md")


def test_a_card_names_no_folder_and_its_results_are_metadata(tiny_base: TinyBase, tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("---\nlicense: other\nlicense_name: acme\n---\n")
    stored = (f"base.name={tmp_path}", "base.random=false")
    model_card = written_card(tmp_path, tiny_base(), {"name": "exact", "lossless": True}, *stored)
    assert "/home/me" not in str(model_card) + (tmp_path / "head" / "eval.json").read_text()
    assert "keeps the base's distribution" in model_card.content
    assert "`acme`, from the base's card" in model_card.content
    assert "mine, at most 24 new tokens, batch size 1. Some <CPU>; CPU cores: 2" in model_card.content
    assert "drafthead 0.2.0, torch 2.13.0." in model_card.content
    results = model_card.data.eval_results
    assert {(r.metric_type, r.dataset_name, r.dataset_config, r.metric_value) for r in results} == {
        (metric, f"mine, {task}", task, value)
        for task in ("math", "overall")
        for metric, value in (("speedup", 1.5), ("mean_accepted_length", 1.8))
    }


def test_a_lossy_rule_does_not_promise_the_bases_text(tiny_base: TinyBase, tmp_path: Path) -> None:
    model_card = written_card(tmp_path, tiny_base(), {"name": "typical", "lossless": False, "total_variation": 0.3})
    assert "exactly what the base" not in model_card.content and "lossy rule, typical" in model_card.content
    metric = model_card.data.eval_results[0].metric_name
    assert metric == "speedup over the fastest autoregressive decoding (lossy, TV 0.3)"
    assert "the base's licence could not be read" in model_card.content


def test_a_run_ends_with_the_commands_that_serve_its_head_or_with_reasons(tiny_base: TinyBase, tmp_path: Path) -> None:
    base, folder = copy(tiny_base()), tmp_path / "head"
    served = Eagle3Config(num_draft_tokens=2, ttt_steps=2, layers=[1, 2], draft_vocab_size=100)
    lines = card.serving_lines(served.build(base, torch.arange(100)), folder)
    assert [line for line in lines if line[0] != " "] == [f"serve it in {x}:" for x in ("vLLM", "SGLang")]
    export = f"   drafthead export head={folder} to=speculators out={tmp_path / 'speculators'}"
    assert [lines[1], lines[3]] == [export, f"   (with a GPU: vllm serve {tmp_path / 'speculators'} --dtype float32)"]
    on_cpu = f"python -m vllm.entrypoints.openai.api_server --model {tmp_path / 'speculators'} --dtype float32"
    assert lines[2].endswith(f"{on_cpu} --max-model-len 512 --kv-cache-memory-bytes 1G"), "with an interpreter"
    wide = MedusaConfig(num_draft_tokens=2, own_lm_head=False, draft_vocab_size=100).build(base, torch.arange(100))
    assert " vocabulary=full " in card.serving_lines(wide, folder)[1]
    copies = MedusaConfig(num_draft_tokens=2, own_lm_head=False, draft_vocab_size=100, induction_rank=4)
    lines = card.serving_lines(copies.build(base, torch.arange(100)), folder)
    assert lines[0] == "no engine serves this head:" and "head.induction_rank=0" in lines[1]
    (_, why, _) = card.serving_lines(KangarooConfig(exit_layer=1).build(base), folder)
    assert why == "   no current release of an engine loads heads of the type kangaroo"
    base.config = replace(base.config, adapter="adapter")
    lines = card.serving_lines(served.build(base, torch.arange(100)), folder)
    assert "merged_base=true" in lines[1] and f"--model-path {tmp_path / 'eagle3' / 'base'}" in lines[6]


def test_a_head_that_no_engine_loads_is_served_by_drafthead_in_vllm(tiny_base: TinyBase, tmp_path: Path) -> None:
    base, folder = copy(tiny_base()), tmp_path / "head"
    base.config, base.name = BaseConfig(name="org/base"), "org/base"
    head = MedusaConfig(num_draft_tokens=2, own_lm_head=False, induction_rank=4).build(base)
    first, serve, line = card.serving_lines(head, folder)
    assert first == "serve it in vLLM without an export, by drafthead's own code:"
    assert serve == f"   drafthead serve head={folder}"
    words = dict(zip((split := shlex.split(line)), split[1:], strict=False))
    spoken = json.loads(words["--speculative-config"])
    assert words["--model"] == "org/base" and words["--dtype"] == "float32" and "VLLM_USE_V2_MODEL_RUNNER=0" in split
    assert spoken["num_speculative_tokens"] == 2
    assert spoken["draft_load_config"]["model_loader_extra_config"] == {"head": str(folder)}
    (module,) = [word.partition("=")[2] for word in split if word.startswith("PYTHONPATH=")]
    assert Path(module, f"{spoken['model'].partition('.')[0]}.py").exists()


def test_data_is_named_without_this_machines_folders_and_with_its_weights(tiny_base: TinyBase, tmp_path: Path) -> None:
    run, _ = composed(tmp_path, "recipe=medusa_smollm2", "debug=tiny")
    run.data.answers.sources = [
        SourceConfig(kind="jsonl", name="/home/me/secret/prompts.jsonl", weight=3),
        SourceConfig(kind="hf", name="user/set", subset="en", revision="v1", weight=0.5),
    ]
    head = MedusaConfig(num_draft_tokens=2).build(tiny_base(), None)
    assert dict(card.facts(run, head, ANSWERS))["prompts"].startswith(
        "jsonl `prompts.jsonl` (weight 3), "
        "[user/set](https://huggingface.co/datasets/user/set) (en, train, revision v1) (weight 0.5)"
    )


def test_a_head_without_a_run_gets_a_card_too(tiny_base: TinyBase, tmp_path: Path) -> None:
    MedusaConfig(num_draft_tokens=2).build(tiny_base(), None).save_pretrained(tmp_path)
    card.minimal_card(tmp_path)
    model_card = ModelCard.load(tmp_path / "README.md")
    assert model_card.data.license == "unknown"
    assert "(Medusa) for speculative decoding with `random-llama`" in model_card.content
    assert 'load_head("<this repository or folder>")' in model_card.content
