"""``drafthead generate --head DIR "prompt"``: stream an answer, then say what drafting bought."""

import argparse
import sys

import torch
from rich.console import Console

from drafthead.data.text.chat import prompt_ids
from drafthead.data.utils.errors import UserError
from drafthead.models.base.base_model import BaseModel
from drafthead.models.base.config import BaseConfig
from drafthead.models.decoding.loop import decode
from drafthead.models.decoding.sampling import Sampler
from drafthead.models.decoding.step_log import DecodeResult
from drafthead.models.heads.common.contract import DraftHead
from drafthead.models.heads.common.loading import load_base_and_head


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="drafthead generate", description=__doc__)
    parser.add_argument("prompt", help="the user's message; - reads standard input")
    parser.add_argument("--head", required=True, help="head folder (outputs/NAME/head) or Hub repository (user/name)")
    parser.add_argument("--base", default="", help="base model; by default the one that the head was trained for")
    parser.add_argument("--max-new-tokens", type=int, default=256, help="default 256")
    parser.add_argument("--temperature", type=float, default=0.0, help="default 0: greedy, the base's own text exactly")
    parser.add_argument("--top-p", type=float, default=1.0, help="of sampled answers; default 1")
    parser.add_argument("--top-k", type=int, default=0, help="of sampled answers; default 0: all tokens")
    parser.add_argument("--seed", type=int, default=0, help="of sampled answers")
    parser.add_argument("--raw", action="store_true", help="continue the prompt as it is, without the chat template")
    parser.add_argument(
        "--no-compare", action="store_true", help="skip the plain decoding that the speedup is measured against"
    )
    arguments = parser.parse_args()
    try:
        _generate(arguments)
    except UserError as error:
        raise SystemExit(f"error: {error}") from None


def _generate(arguments: argparse.Namespace) -> None:
    text = sys.stdin.read() if arguments.prompt == "-" else arguments.prompt
    if not text.strip():
        raise UserError("the prompt is empty; give some words")
    base, head = load_base_and_head(arguments.head, BaseConfig(name=arguments.base))
    if arguments.raw:
        ids = base.tokenizer(text).input_ids
    else:
        ids = prompt_ids(base.tokenizer, [{"role": "user", "content": text}])
    decode(base, head, ids[-8:], max_new_tokens=4)  # warm up, so that the first answer is timed like any other
    console = Console(highlight=False)
    try:
        sampler = Sampler(temperature=arguments.temperature, top_p=arguments.top_p, top_k=arguments.top_k)
    except ValueError as error:
        raise UserError(str(error)) from None
    result = _stream(base, head, ids, arguments, sampler, console)
    rate = len(result.tokens) / result.total_s
    mean = sum(s.committed for s in result.steps) / max(1, len(result.steps))
    line = f"{len(result.tokens)} tokens, {rate:.1f} tokens/s, {mean:.2f} tokens a step"
    if not arguments.no_compare:
        plain = decode(base, None, ids, max_new_tokens=arguments.max_new_tokens, sampler=sampler, seed=arguments.seed)
        if not sampler.greedy:
            same = "another sample of the same law"
        else:
            same = "the same text" if plain.tokens == result.tokens else "another text (a near-tie; see drafthead eval)"
        plain_rate = len(plain.tokens) / plain.total_s
        line += f"; plain decoding {plain_rate:.1f} tokens/s and {same}: speedup {rate / plain_rate:.2f}"
    console.print(f"\n[dim]{line}[/dim]", soft_wrap=True)


def _stream(
    base: BaseModel,
    head: DraftHead,
    ids: list[int],
    arguments: argparse.Namespace,
    sampler: Sampler,
    console: Console,
) -> DecodeResult:
    """Decode, printing text as soon as it is final."""
    answer: list[int] = []
    shown = 0

    def show(tokens: list[int]) -> None:
        nonlocal shown
        answer.extend(tokens)
        text = base.tokenizer.decode(answer, skip_special_tokens=True)
        if not text.endswith("\ufffd"):  # half of a multi-byte character: wait for the rest
            console.out(text[shown:], end="", highlight=False)
            shown = len(text)

    with torch.inference_mode():
        result = decode(
            base,
            head,
            ids,
            max_new_tokens=arguments.max_new_tokens,
            sampler=sampler,
            seed=arguments.seed,
            on_tokens=show,
        )
    console.out("")
    return result


if __name__ == "__main__":
    main()
