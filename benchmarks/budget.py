"""How many positions of its cache a base needs to draft for itself (TriForce): acceptance against the budget.

    python benchmarks/budget.py --plot FILE.png           questions about one of many passages, 2,000 to 6,000 tokens
    python benchmarks/budget.py --budgets 64,256,1024 --policies recent,sinks:4,retrieval:8,retrieval:1/1

A policy is one of ``recent``, ``sinks:TOKENS`` and ``retrieval:CHUNK``; ``/N`` chooses the positions anew every N
tokens (64 by default). ``retrieval:1/1`` is the oracle: at every token each head keeps the keys that this very token
agrees with most. The base answers greedily; then every token of the answer is predicted over the budget's cache, after
the answer's own tokens, and counts as accepted where it is the next one. Bytes are read in a step: of keys and values,
and of the weights.
"""

from argparse import Namespace
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch
from common import at_least, draw_lines, entry_point, parser, save_record
from rich.console import Console
from rich.table import Table

from drafthead.data.utils.errors import UserError
from drafthead.eval.prompts.prompt import conversation_ids
from drafthead.eval.prompts.suites import load_suite
from drafthead.models.base.base_model import BaseModel
from drafthead.models.base.shape import ModelShape
from drafthead.models.cache.kv_cache import KVCache
from drafthead.models.decoding.drafter import DraftConfig
from drafthead.models.drafters.experimental.triforce import BudgetState, Policy, TriForce
from drafthead.models.heads.parts.loading import load_base
from drafthead.models.token_tree import TokenTree

REFRESH = 64
ONE = DraftConfig(tree=TokenTree.chain(1))


@torch.inference_mode()
def greedy_answer(base: BaseModel, ids: list[int], count: int) -> tuple[list[int], KVCache]:
    """The base's next tokens, and its cache of the prompt and all of them but the last."""
    cache = base.new_cache(len(ids) + count + 1)
    tokens, answer = torch.tensor([ids], device=base.device), []
    for _ in range(count):
        answer.append(int(base.logits(base.forward(tokens, cache).final[:, -1]).argmax()))
        tokens = torch.tensor([[answer[-1]]], device=base.device)
        if answer[-1] in base.eos_ids:
            break
    return answer, cache


def accepted(base: BaseModel, ids: list[int], answer: list[int], whole: KVCache, drafter: TriForce) -> int:
    """How many of the answer's tokens after the first are what ``drafter`` drafts next."""
    state = drafter.attach(drafter.init_state(1), KVCache.view(whole.stacks, whole.places, len(ids)))
    found, read = 0, torch.tensor([ids], device=base.device)
    for place, (token, following) in enumerate(zip(answer, answer[1:], strict=False)):
        state = drafter.update(state, read, None)
        read = torch.tensor([[token]], device=base.device)
        # The pass that chooses positions writes the last token's states, which are those of the answer anyway.
        state = BudgetState(**{**vars(state), "target": KVCache.view(whole.stacks, whole.places, len(ids) + place)})
        found += int(drafter.draft(state, read[0], ONE).tokens[0, 1]) == following
    return found


def bytes_a_step(base: BaseModel, positions: int) -> int:
    """Keys and values that a step reads."""
    shape = base.cache_shape
    return 2 * shape.layers * shape.heads * shape.head_dim * positions * base.embedding.element_size()


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure every policy at every budget."""
    options = parser(__doc__)
    options.add_argument("--base", default="embedded:smollm2")
    options.add_argument("--suite", default="long_questions")
    options.add_argument("--prompts", type=int, default=6)
    options.add_argument("--tokens", type=int, default=48, help="of every answer")
    options.add_argument("--budgets", default="64,128,256,512,1024,2048")
    options.add_argument("--policies", default="recent,sinks:4,retrieval:8,retrieval:1/1")
    options.add_argument("--plot", type=Path, metavar="FILE.png")
    args: Namespace = options.parse_args(arguments)
    at_least(args, 2, "tokens")
    at_least(args, 1, "prompts")
    budgets = [int(text) for text in args.budgets.split(",") if text.isdigit()]
    if not budgets:
        raise UserError(f"--budgets needs numbers, got {args.budgets}")
    policies: list[tuple[str, str, int]] = []
    for text in args.policies.split(","):
        name, _, every = text.partition("/")
        Policy.parse(name)
        policies.append((text, name, int(every or REFRESH)))
    console = Console()
    base = load_base(args.base)
    counts: Counter[tuple[str, int]] = Counter()
    total, lengths = 0, []
    for number, prompt in enumerate(load_suite(args.suite, args.prompts), start=1):
        ids = conversation_ids(base.tokenizer, prompt, template_kwargs=base.config.chat_template_kwargs)
        if len(ids) + args.tokens > base.max_context:
            continue
        answer, whole = greedy_answer(base, ids, args.tokens)
        total += len(answer) - 1
        lengths.append(len(ids))
        for text, name, every in policies:
            for budget in budgets:
                drafter = TriForce(base, budget, name, num_tokens=1, refresh=every)
                counts[text, budget] += accepted(base, ids, answer, whole, drafter)
        console.print(f"   prompt {number}: {len(ids)} tokens, {len(answer)} answered")
    mean_length = sum(lengths) // max(1, len(lengths))
    # Packed layers hold their weights out of sight of ``parameters``.
    weights = ModelShape.from_config(base.model.config).base_parameters * base.embedding.element_size()
    rows = [
        {
            "policy": text,
            "budget": budget,
            "acceptance": counts[text, budget] / total,
            "tokens": total,
            "cache_bytes": bytes_a_step(base, min(budget, mean_length)),
        }
        for text, _, _ in policies
        for budget in budgets
    ]
    shown = Table("policy", *map(str, budgets), title=f"acceptance, {total} tokens after {lengths} tokens of prompt")
    for text, _, _ in policies:
        shown.add_row(text, *(f"{row['acceptance']:.3f}" for row in rows if row["policy"] == text))
    shown.add_row("cache, MB a step", *(f"{bytes_a_step(base, budget) / 1e6:.1f}" for budget in budgets))
    console.print(shown)
    whole_mb = bytes_a_step(base, mean_length) / 1e6
    console.print(
        f"the whole cache: {whole_mb:.0f} MB a step; weights: {weights / 1e6:.0f} MB, which every step reads too"
    )
    save_record(args, "budget", {"rows": rows, "weights_bytes": weights, "prompts": lengths})
    if args.plot:
        draw_lines(rows, "policy", "budget", "acceptance", "positions kept", "acceptance of the next draft", args.plot)


if __name__ == "__main__":
    entry_point(main)
