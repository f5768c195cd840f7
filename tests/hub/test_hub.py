"""Uploads to the Hub and downloads: complete despite faults, private if requested, never a pickle."""

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard
from safetensors.torch import load_file

import drafthead
from drafthead.errors import UserError
from drafthead.files.hub import REPOSITORY, HubConfig, fetch, push, require_login
from drafthead.models.base.base_model import BaseModel
from drafthead.models.heads.medusa import MedusaConfig, MedusaHead
from drafthead.models.heads.medusa2 import Medusa2Config
from drafthead.models.heads.parts.head_folder import resolve_folder
from drafthead.models.token_tree import TokenTree
from drafthead.train import pipeline
from support import TinyBase, call_fails, cases, composed, refuses

TREE = TokenTree.from_paths([(0,), (1,), (0, 0)])


def save(base: BaseModel, folder: Path, seed: int = 0, tree: TokenTree | None = TREE) -> MedusaHead:
    torch.manual_seed(seed)
    head = MedusaConfig(num_draft_tokens=3, own_lm_head=True, draft_vocab_size=100).build(base, torch.arange(100))
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.normal_()
    head.tree = tree
    head.save_pretrained(folder)
    (folder / "README.md").write_text(f'---\ntags: [drafthead]\n---\nhead = drafthead.load_head("{REPOSITORY}")\n')
    return head


@pytest.fixture
def saved(tiny_base: TinyBase, tmp_path: Path) -> Path:
    save(tiny_base(), tmp_path / "head")
    return tmp_path / "head"


def same(first: MedusaHead, second: Any) -> bool:
    one, two = first.state_dict(), second.state_dict()
    return one.keys() == two.keys() and all(torch.equal(one[key], two[key]) for key in one)


def test_a_head_comes_back_as_it_was(hub: Any, tiny_base: TinyBase, tmp_path: Path) -> None:
    first = save(tiny_base(), tmp_path / "head")
    assert push(tmp_path / "head", "user/medusa") == f"{hub.url}/user/medusa"
    old = list(hub.repos["user/medusa"].commits)[-1]
    second = save(tiny_base(), tmp_path / "head", seed=1, tree=None)
    (tmp_path / "head" / "tree.json").unlink()
    push(tmp_path / "head", "user/medusa")

    newest, before = drafthead.load_head("user/medusa"), drafthead.load_head("user/medusa", revision=old)
    assert same(second, newest) and newest.tree is None, "the tree of the head before must not stay"
    assert same(first, before) and before.tree == TREE
    assert not same(first, newest)
    assert same(second, drafthead.load_head("user/medusa", tiny_base()))


def test_transformers_drafts_with_a_repository(hub: Any, saved: Path, tiny_base: TinyBase) -> None:
    push(saved, "user/drafts")
    model, ids = tiny_base().stock(), torch.arange(20, 32)[None]
    settings = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    by_name = {"custom_generate": "user/drafts", "trust_remote_code": True}
    stock = model.generate(ids, **settings)
    for revision in ({}, {"revision": "main"}):
        assert torch.equal(model.generate(ids, **settings, **by_name, **revision), stock)
    with pytest.raises(ValueError, match="trust_remote_code"):
        model.generate(ids, **settings, custom_generate="user/drafts", trust_remote_code=False)


def test_a_tuned_base_comes_back_with_its_adapter(hub: Any, tiny_base: TinyBase, tmp_path: Path) -> None:
    base, folder = tiny_base(), tmp_path / "head"
    head = Medusa2Config(num_draft_tokens=2, lora_rank=4, lora_dropout=0.0).build(base)
    head.train_base(now=True)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    head.save_pretrained(folder)
    push(folder, "user/medusa2")
    assert {"adapter/adapter_config.json", "adapter/adapter_model.safetensors"} <= set(hub.files("user/medusa2"))
    shutil.move(folder, tmp_path / "away")  # what is loaded came from the Hub

    loaded = drafthead.load_head("user/medusa2")
    local = drafthead.load_head(tmp_path / "away")
    assert same(local, loaded)
    ids = torch.arange(20, 32)[None]
    outputs = [h.base.model(ids).logits for h in (loaded, local)]
    assert torch.equal(*outputs) and not torch.allclose(outputs[0], base.model(ids).logits, atol=1e-3)


@pytest.mark.parametrize("name", ["config.json", "adapter/adapter_config.json", "adapter"])
def test_links_out_of_the_folder_are_not_uploaded(hub: Any, saved: Path, tmp_path: Path, name: str) -> None:
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "adapter_config.json").write_text("secret")
    (saved / name).unlink(missing_ok=True)
    (saved / name).parent.mkdir(exist_ok=True)
    (saved / name).symlink_to(secret if name == "adapter" else secret / "adapter_config.json")
    try:
        push(saved, "user/medusa")
    except UserError as error:
        assert "leads out of" in str(error) or "outside" in str(error), error
    else:
        assert name == "adapter", "a link to a file has to be refused; linked folders are not walked"
    assert not hub.repos or not any(b"secret" in content for content in hub.files("user/medusa").values())


def test_only_the_head_is_uploaded(hub: Any, saved: Path) -> None:
    for name in ("optimizer.pt", ".env", "notes.txt", "eval.json", "training_loss.png"):
        (saved / name).write_text("{}")
    push(saved, "user/medusa")
    uploaded = {"README.md", "config.json", "eval.json", "model.safetensors", "training_loss.png", "tree.json"}
    uploaded |= {"custom_generate/generate.py", "custom_generate/requirements.txt"}
    assert set(hub.files("user/medusa")) == uploaded
    push(saved, "user/medusa")
    assert hub.count("PUT /lfs/") == 1 and hub.count("/commit/main") == 1, "what was sent is not sent again"
    hub.publish("user/medusa", {**hub.files("user/medusa"), "mine.txt": b"kept"})
    push(saved, "user/medusa")
    assert "mine.txt" in hub.files("user/medusa")


@pytest.mark.parametrize("status", [500, None], ids=["500", "cut"])
@pytest.mark.parametrize("path", ["repos/create", "preupload", "^/lfs/", "/commit/"])
def test_failed_uploads_are_repeated(hub: Any, saved: Path, slept: list[float], path: str, status: int | None) -> None:
    hub.fail(path, times=2, status=status)
    lines: list[str] = []
    push(saved, "user/medusa", log=lines.append)
    assert hub.left() == 0 and len(slept) == 2
    assert {"config.json", "model.safetensors", "tree.json"} <= set(hub.files("user/medusa"))
    for line in lines:
        assert line.startswith("warning: pushing to user/medusa failed (") and "; next attempt in " in line


def test_a_commit_whose_answer_is_lost_is_not_made_twice(hub: Any, saved: Path, slept: list[float]) -> None:
    hub.fail("/commit/", times=1, status=None, done=True)
    push(saved, "user/medusa")
    assert slept == [2.0] and hub.count("/commit/") == 1
    assert "model.safetensors" in hub.files("user/medusa")


def test_a_refusal_is_not_repeated(hub: Any, saved: Path, slept: list[float]) -> None:
    hub.fail("/commit/", times=9, status=403)
    refuses("403", push, saved, "user/medusa")
    assert slept == [] and hub.count("/commit/") == 1


def test_an_upload_that_keeps_failing_says_how_to_push_later(hub: Any, saved: Path, slept: list[float]) -> None:
    before = {path.name: path.read_bytes() for path in saved.glob("*.*")}
    hub.fail("/commit/", times=3)
    lines: list[str] = []
    with pytest.raises(UserError, match="pushing .*500.*push it later") as error:
        push(saved, "user/medusa", private=True, log=lines.append, waits=(1, 2))
    assert slept == [1, 2] and len(lines) == 2
    after = {path.name: path.read_bytes() for path in saved.glob("*.*")}
    assert {k: v for k, v in after.items() if k != "README.md"} == {k: v for k, v in before.items() if k != "README.md"}
    later = shlex.split(str(error.value).partition("push it later with: ")[2])
    assert later == ["drafthead", "push", f"head={saved}", "repo=user/medusa", "private=true"]
    push(saved, "user/medusa", private=True)
    assert "model.safetensors" in hub.files("user/medusa")


def test_private_means_private_and_the_card_names_the_repository(hub: Any, saved: Path) -> None:
    push(saved, "user/secret", private=True)
    assert hub.repos["user/secret"].private
    hub.publish("user/open", {})
    refuses("user/open .*public.*private=true", push, saved, "user/open", private=True)
    assert hub.files("user/open") == {}
    push(saved, "medusa")
    assert b'load_head("user/medusa")' in hub.files("user/medusa")["README.md"], "under the token's own account"
    push(saved, "team/copy")
    assert b'load_head("team/copy")' in hub.files("team/copy")["README.md"]


def test_who_may_push(hub: Any, slept: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    for status in (503, None):  # a Hub that is down now may be up by the upload
        hub.fail("whoami", times=99, status=status)
        require_login("push=true")
        hub.faults.clear()
    hub.role = "read"
    refuses("push=true.*token.*HF_TOKEN", require_login, "push=true")
    monkeypatch.setenv("HF_TOKEN", "hf_of_nobody")
    refuses("push=true.*token", require_login, "push=true")
    monkeypatch.delenv("HF_TOKEN")
    refuses("push=true.*login.*HF_TOKEN", require_login, "push=true")


def test_pickles_are_refused_by_name(hub: Any, saved: Path) -> None:
    config = (saved / "config.json").read_bytes()
    hub.publish("user/old", {"config.json": config, "pytorch_model.bin": b"\x80\x04", "sub/x.pkl": b"\x80\x04"})
    refuses("pytorch_model.bin, sub/x.pkl.*pickles", drafthead.load_head, "user/old")
    assert hub.count("resolve/.*(bin|pkl)$") == 0, "not even downloaded"
    (saved / "model.safetensors").rename(saved / "model.pt")
    refuses("model.pt.*pickles", drafthead.load_head, saved)


def test_what_is_not_there(hub: Any) -> None:
    refuses("user/none.*404", fetch, "user/none")
    hub.publish("user/there", {"config.json": b"{}"})
    refuses("user/there.*v9", fetch, "user/there", "v9")
    refuses("some one/-head.*Hub", resolve_folder, "some one/-head")


@pytest.mark.parametrize("name", ["a/b/c", "us er/x"])
def test_names_that_the_hub_forbids(name: str) -> None:
    with pytest.raises(ValueError, match="repo must be"):
        HubConfig(repo=name)


@pytest.mark.slow
def test_the_command_and_the_environment(hub: Any, saved: Path, tmp_path: Path) -> None:
    """Run in separate processes, because the client reads HF_ENDPOINT at import."""
    home = {"HF_HOME": str(tmp_path / "home"), "HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_XET": "1"}
    environment = {**os.environ, **home}

    def python(*arguments: str, **changed: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *arguments], capture_output=True, text=True, env={**environment, **changed}
        )

    push_it = ("-m", "drafthead", "push", f"head={saved}", "repo=user/medusa")
    refused = python(*push_it, HF_TOKEN="")
    assert refused.returncode == 1 and refused.stderr.count("\n") == 1
    assert refused.stderr.startswith("error: drafthead push needs a login to the Hub")
    done = python(*push_it, "private=true")
    assert done.returncode == 0, done.stderr
    assert f"pushed: {hub.url}/user/medusa" in done.stdout
    assert hub.repos["user/medusa"].private
    code = "import drafthead, sys; drafthead.load_head('user/medusa').save_pretrained(sys.argv[1])"
    loaded = python("-c", code, str(tmp_path / "again"))
    assert loaded.returncode == 0, loaded.stderr
    assert (tmp_path / "again/model.safetensors").read_bytes() == (saved / "model.safetensors").read_bytes()


@cases(
    "given, says",
    (["head=RUN", "repo=user/x"], "is a run folder"),
    (["head=HEAD"], "error: repo is missing"),
    (["head=BROKEN", "repo=user/x"], "model.safetensors cannot be read"),
)
def test_bad_commands(hub: Any, saved: Path, tmp_path: Path, given: list[str], says: str) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(saved, broken)
    (broken / "model.safetensors").write_bytes(b"\x10" * 40)
    for name, folder in {"RUN": tmp_path, "HEAD": saved, "BROKEN": broken}.items():
        given = [argument.replace(name, str(folder)) for argument in given]
    call_fails(says, "push", *given)
    assert hub.count("create") == 0


# Runs with ``push=true`` ----------------------------------------------------------------------------------------------


def train(folder: Path, *overrides: str) -> Path:
    short = ["phases.pretrain.steps=3", "phases.distill.steps=3", "tree_prompts=1", "eval.limit=1"]
    tiny = ["recipe=medusa_smollm2", "debug=tiny", *short, "eval.max_new_tokens=8"]
    pipeline.run_pipeline(*composed(folder, *tiny, "push=true", *overrides))
    return folder / "run"


def test_without_a_token_nothing_is_begun(hub: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_TOKEN")
    refuses("push=true.*login.*HF_TOKEN", train, tmp_path)
    assert not (tmp_path / "run").exists() and not (tmp_path / "corpora").exists()


@pytest.mark.slow
def test_the_next_start_pushes_after_a_hub_was_down(hub: Any, slept: list[float], tmp_path: Path) -> None:
    hub.fail("/commit/", times=4)
    refuses(r"drafthead push head=\S+/run/head", train, tmp_path)
    run = tmp_path / "run"
    weights = (run / "head" / "model.safetensors").read_bytes()
    assert all((run / name).exists() for name in ("eval.json", "report.html", "head/README.md", "head/eval.json"))
    assert (run / "plots" / "training_loss.png").exists()

    measured = (run / "calibration.json").stat().st_mtime_ns
    train(tmp_path, "hub.repo=team/medusa", "hub.private=true")
    assert (run / "calibration.json").stat().st_mtime_ns == measured, "costs are not measured again"
    files = hub.files("team/medusa")
    assert set(files) == {
        "README.md", "config.json", "eval.json", "model.safetensors", "training_loss.png", "tree.json",
        "custom_generate/generate.py", "custom_generate/requirements.txt",
    }  # fmt: skip
    assert files["model.safetensors"] == weights and hub.repos["team/medusa"].private
    head = drafthead.load_head("team/medusa")
    saved = load_file(run / "head" / "model.safetensors")
    assert all(torch.equal(value, saved[key]) for key, value in head.state_dict().items())
    card = ModelCard(files["README.md"].decode())
    assert {"drafthead", "speculative-decoding", "custom_generate", "medusa"} <= set(card.data.tags)
    assert card.data.eval_results and 'custom_generate="team/medusa", trust_remote_code=True)' in card.content
    assert head.base_fingerprint in card.content and str(tmp_path) not in card.content
