"""Tree, draft sampling, rule and drafter named by an evaluation's settings."""

from pathlib import Path

import pytest

from drafthead.commands.replay import ReplayConfig
from drafthead.errors import UserError
from drafthead.eval.config import EvalConfig
from drafthead.eval.timing.methods import check_methods
from drafthead.models.decoding.acceptance import AcceptanceRule
from drafthead.models.decoding.drafter import DraftConfig, Drafter, DraftSampling, DynamicTree
from drafthead.models.decoding.sampling import Sampler
from drafthead.models.drafters.combined import CombinedDrafter
from drafthead.models.drafters.experimental.horizontal_cascade import HorizontalCascade
from drafthead.models.drafters.experimental.vertical_cascade import VerticalCascade
from drafthead.models.drafters.expression import build_drafter, is_drafter, parse_drafter
from drafthead.models.drafters.prompt_lookup import PromptLookup
from drafthead.models.heads.hydra import HydraConfig
from drafthead.models.heads.medusa import MedusaConfig, MedusaHead
from drafthead.models.token_tree import TokenTree
from support import TinyBase, cases, refuses


@pytest.fixture
def head(tiny_base: TinyBase) -> MedusaHead:
    return MedusaConfig(num_draft_tokens=3).build(tiny_base())


def test_trees_by_name(head: MedusaHead, tmp_path: Path) -> None:
    path = tmp_path / "tree.json"
    path.write_text('{"choices": [[1], [0], [1, 0]]}')
    assert EvalConfig(tree=str(path)).draft_config(head).tree == TokenTree.from_paths([(0,), (1,), (1, 0)])
    assert EvalConfig().draft_config(head).tree == TokenTree.chain(3)
    assert EvalConfig(tree="chain:2").draft_config(head).tree == TokenTree.chain(2)
    assert EvalConfig(tree="expansion:1,3").draft_config(head).tree == TokenTree.expansion([1, 3])
    assert EvalConfig(tree="dynamic:16:4").draft_config(head).tree == DynamicTree(nodes=16, width=4, depth=3)
    assert EvalConfig().draft_config(head).adaptive is None
    adaptive = EvalConfig(length="heuristic").draft_config(head).adaptive
    assert adaptive is not None and adaptive.start == 3
    head.tree = TokenTree.from_paths([(0,), (0, 1)])
    assert EvalConfig().draft_config(head).tree == head.tree
    with pytest.raises(UserError, match="tree=chain:5 is 5 deep, but the drafter drafts 3 positions"):
        EvalConfig(tree="chain:5").draft_config(head)
    with pytest.raises(UserError, match="tree=dynamic:8 draft_sampling=with_replacement"):
        EvalConfig(tree="dynamic:8", draft_sampling="with_replacement").draft_config(head)
    config = EvalConfig(draft_sampling="without_replacement").draft_config(head)
    assert config.draft_sampling is DraftSampling.WITHOUT_REPLACEMENT


def test_only_drafts_of_the_head_are_chosen_by_cost() -> None:
    for drafter in ("relay:head@2+prompt_lookup@4", "prompt_lookup+head", "head@2+prompt_lookup", "head:folder"):
        refuses("tree=cost is for drafter=head and drafter=head.B, not for", EvalConfig, drafter=drafter, tree="cost")
    refuses("write tree=cost:5", EvalConfig, drafter="head+prompt_lookup", tree="cost", tree_nodes=5)
    assert EvalConfig(drafter="head+forced+prompt_lookup", tree="cost", baselines=["prompt_lookup"])


@pytest.mark.parametrize("tree", ["expansion:", "expansion:1,0", "dynamic:1", "dynamic:x", "chain:0", "chain:x"])
def test_a_tree_that_cannot_be_meant_is_refused_before_anything_is_loaded(tree: str) -> None:
    refuses("cannot be read .*give one of head, static", EvalConfig, tree=tree)


def test_what_cannot_be_coupled_is_refused_before_anything_is_loaded() -> None:
    coupled = Sampler(temperature=1.0, coupled=True)
    assert EvalConfig(sampler=coupled).sampler.coupled
    refuses("draft_sampling=top_k", EvalConfig, sampler=coupled, draft_sampling="with_replacement")
    refuses("rule.name=exact", EvalConfig, sampler=coupled, rule=AcceptanceRule(name="lenient"))
    refuses("measure it with drafthead eval", ReplayConfig, head="prompt_lookup:3", sampler=coupled)


def test_peers(tiny_base: TinyBase) -> None:
    base = tiny_base()
    check_methods(["prompt_lookup", "early_exit:2", "hf_prompt_lookup:3", "head+prompt_lookup:3", "model:a:b:7"])
    for wrong in ("prompt_lokup", "early_exit", "model", "head+hf_assisted:a"):
        refuses(f"'.*{wrong[5:]}'.*prompt_lookup", check_methods, [wrong])
    for wrong in ("prompt_lookup:x", "prompt_lookup:0", "early_exit:2:0"):
        refuses(r"the numbers of \w+ are whole and at least 1", check_methods, [wrong])
    for wrong in ("prompt_lookup:100000", "early_exit:2:257", "prompt_lookup@257", "head@0"):
        refuses("tokens; give 1 to 256", check_methods, [wrong])
    assert is_drafter("early_exit:2") and is_drafter("prompt_lookup@3") and not is_drafter("outputs/a/head")
    assert build_drafter(parse_drafter("prompt_lookup:4"), base)[0].depth == 4
    assert build_drafter(parse_drafter("early_exit:2:3"), base)[0].depth == 3
    for limited in ("(prompt_lookup@2)", "(prompt_lookup@2)@4", "(prompt_lookup@4)@2", "(prompt_lookup)@2"):
        assert build_drafter(parse_drafter(limited), base)[0].depth == 2
    refuses("1 to 2 layers, got 7", build_drafter, parse_drafter("early_exit:7"), base)


def test_the_folder_of_a_head_may_contain_a_plus(tmp_path: Path) -> None:
    folder = tmp_path / "medusa+copy"
    assert is_drafter(str(folder))
    folder.mkdir()
    assert not is_drafter(str(folder))
    alone = parse_drafter(f"head:{folder}")
    first, second = parse_drafter(f"(head:{folder})@2+prompt_lookup").parts
    assert alone.kind == first.kind == "head" and alone.name == first.name == str(folder)
    assert first.most_tokens == 2 and second.kind == "prompt_lookup"


def test_a_merged_tree_holds_both(head: MedusaHead) -> None:
    def combined(tree: str, nodes: int | None = None) -> tuple[Drafter, DraftConfig]:
        config = EvalConfig(tree=tree, drafter="head+prompt_lookup:4", tree_nodes=nodes)
        return config.build(head.base, head, config.draft_config(head))

    union, draft_config = combined("chain:2")
    assert (union.depth, draft_config.depth, draft_config.nodes) == (4, 4, 7)
    assert isinstance(union, CombinedDrafter) and union.nodes == 3, "as many as the head's own"
    union, _ = combined("head", nodes=9)
    assert isinstance(union, CombinedDrafter) and union.nodes == 9
    with pytest.raises(ValueError, match="tree_nodes"):
        EvalConfig(tree_nodes=1)
    refuses("static tree", combined, "dynamic:8")


def test_drafters_are_put_together_by_one_grammar(head: MedusaHead) -> None:
    base, head_config = head.base, EvalConfig().draft_config(head)

    relay, config = EvalConfig(drafter="relay:head@2+prompt_lookup@4").build(base, head, head_config)
    assert isinstance(relay, HorizontalCascade) and relay.lengths == (2, 4) and config.tree == TokenTree.chain(6)
    whole, _ = EvalConfig(drafter="relay:head+suffix_memory:2:99").build(base, head, head_config)
    assert isinstance(whole, HorizontalCascade) and whole.lengths == (3, 2) and whole.drafters[0] is head
    assert isinstance(whole.drafters[1], PromptLookup) and whole.drafters[1].memory == 99
    cascade, config = build_drafter(parse_drafter("relay:(nested:early_exit:2@4+max_gram)@3+prompt_lookup@2"), base)
    assert isinstance(cascade, HorizontalCascade) and cascade.lengths == (3, 2)
    assert isinstance(cascade.drafters[0], VerticalCascade)
    assert isinstance(cascade.drafters[0].drafter, PromptLookup) and cascade.drafters[0].drafter.max_ngram is None
    twice, _ = build_drafter(parse_drafter("nested:early_exit:2@5+early_exit:1@2+prompt_lookup"), base)
    assert isinstance(twice, VerticalCascade) and isinstance(twice.drafter, VerticalCascade)
    assert (twice.depth, twice.drafter.depth) == (5, 2)
    sampled = EvalConfig(draft_sampling="with_replacement").draft_config(head)
    between, config = build_drafter(parse_drafter("nested:early_exit:2+prompt_lookup"), base, head, sampled)
    assert config.draft_sampling is DraftSampling.WITH_REPLACEMENT and isinstance(between, VerticalCascade)


@cases(
    "spec, message",
    ("relay:prompt_lookup+head", "HydraHead reads the base's hidden states.*only be the first"),
    ("nested:early_exit:2+head", "HydraHead reads the base's hidden states.*as B in nested"),
    ("nested:prompt_lookup+prompt_lookup", "'prompt_lookup' is not a model"),
    ("relay:prompt_lookup", "has one part; a relay needs two or more"),
    ("prompt_lookup@0", "0 tokens"),
    ("relay:(head@2+prompt_lookup", "nor a known drafter or method"),
    ("prompt_lookup+", "'' names neither a folder nor a known drafter"),
)
def test_drafters_that_cannot_be_put_together(tiny_base: TinyBase, spec: str, message: str) -> None:
    hydra = HydraConfig(num_draft_tokens=3).build(tiny_base())
    with pytest.raises(UserError, match=message):
        build_drafter(parse_drafter(spec), hydra.base, hydra, EvalConfig().draft_config(hydra))
