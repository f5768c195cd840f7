"""On the real embedded model: greedy text of every head is plain text."""

from functools import cache
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_module

from drafthead import recipes
from drafthead.models.base.base_model import BaseModel
from drafthead.models.decoding.drafter import DraftConfig, DynamicTree
from drafthead.models.decoding.loop import decode, decode_batch
from drafthead.models.heads.parts.draft_head import DraftHead
from drafthead.models.heads.parts.loading import load_base, load_base_and_head, load_head
from drafthead.models.token_tree import TokenTree
from drafthead.train.config import parse_run

pytestmark = pytest.mark.slow
FILES = Path(recipes.__path__[0]).glob("recipe/[!a]*_smollm2.yaml")  # not adapt_head, for any kind
RECIPES = sorted(path.stem.removesuffix("_smollm2") for path in FILES)
TEXTS = (
    "The capital of France is",
    "One, two, three, four, five, six,",
    "def add(a, b):\n    return a + b\n\ndef sub(a, b):",
)
NEW = 24
PLANS = {
    "chain": DraftConfig(tree=TokenTree.chain(2)),
    "tree": DraftConfig(tree=TokenTree.expansion([3, 2])),
    "unsure": DraftConfig(tree=TokenTree.expansion([3, 2]), confidence_threshold=0.3),
    "dynamic": DraftConfig(tree=DynamicTree(nodes=6, width=3, depth=2)),
}


@cache
def base() -> BaseModel:
    return load_base("embedded:smollm2")


@cache
def prompts() -> list[list[int]]:
    return [base().tokenizer(text).input_ids for text in TEXTS]


def plain_texts(target: BaseModel) -> list[list[int]]:
    return [decode(target, None, ids, max_new_tokens=NEW, ignore_eos=True).tokens for ids in prompts()]


def head_of(recipe: str) -> DraftHead:
    """The head as the recipe makes it. It has learnt nothing, so it drafts over few ids and guesses right at times."""
    with initialize_config_module(version_base="1.3", config_module="drafthead.recipes"):
        run = parse_run(compose("train", [f"recipe={recipe}_smollm2"]))
    seen = {token for text in plain_texts(base()) for token in text}
    torch.manual_seed(0)
    head = run.head_config().build(base(), torch.tensor(sorted(seen)))
    with torch.no_grad():
        for parameter in head.parameters():
            if parameter.requires_grad:
                parameter += 0.02 * torch.randn_like(parameter)
    return head.eval()


@pytest.mark.parametrize("recipe", RECIPES)
def test_greedy_text(recipe: str, tmp_path: Path) -> None:
    head, target = head_of(recipe), base()
    if head.config.trains_base:
        head.train_base(now=True)
        with torch.no_grad():
            for parameter in head.parameters():
                parameter += 0.05 * torch.randn_like(parameter) * parameter.requires_grad
    head.save_pretrained(tmp_path)
    if recipe == "medusa2":  # its base is another one, with the adapter merged in
        target, head = load_base_and_head(str(tmp_path))
    plain = plain_texts(target)
    assert (plain == plain_texts(base())) == (recipe != "medusa2")
    accepted = 0
    for draft_config in PLANS.values():
        batch = decode_batch(target, head, prompts(), max_new_tokens=NEW, draft_config=draft_config, ignore_eos=True)
        assert [result.tokens for result in batch] == plain
        accepted += sum(step.accepted for result in batch for step in result.steps)
    assert accepted > 0, "no draft was accepted, so nothing was shown"
    loaded = load_head(tmp_path, target)
    again = decode(target, loaded, prompts()[0], max_new_tokens=NEW, draft_config=PLANS["tree"], ignore_eos=True)
    assert again.tokens == plain[0]
