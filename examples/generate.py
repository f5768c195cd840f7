"""Use a trained head from Python: a whole answer, a stream with accepted drafts in green, and transformers' generate.

94 s on 2 cores of an AMD EPYC that seven other programs used (24 November 2026), with the head of `make demo`. It
printed: tau 1.27, the same text without the head: True; transformers' generate gives the same tokens: True.

    python examples/generate.py outputs/medusa_smollm2/head "Why is the sky blue?"
"""

import sys
import time

import drafthead


def main(folder: str, prompt: str, tokens: int = 48) -> None:
    """Answer ``prompt`` with the head in ``folder``, in three ways."""
    started = time.perf_counter()
    head = drafthead.load_head(folder)  # loads its base, too
    base = head.base

    answer = drafthead.generate(base, head, prompt, max_new_tokens=tokens)
    plain = drafthead.generate(base, None, prompt, max_new_tokens=tokens)
    print(f"tau {answer.mean_accepted_length:.2f}, the same text without the head: {answer.text == plain.text}\n")

    for text, accepted in drafthead.stream(base, head, prompt, max_new_tokens=tokens):
        print(f"\033[1;32m{text}\033[0m" if accepted else text, end="", flush=True)

    inputs = base.tokenizer(prompt, return_tensors="pt")
    drafts = drafthead.custom_generate(head)
    with_head = base.model.generate(**inputs, max_new_tokens=tokens, do_sample=False, custom_generate=drafts)
    stock = base.model.generate(**inputs, max_new_tokens=tokens, do_sample=False)
    print(f"\n\ntransformers' generate gives the same tokens: {with_head.tolist() == stock.tolist()}")
    print(f"{time.perf_counter() - started:.0f} s in all, loading included")


if __name__ == "__main__":
    main(*sys.argv[1:3])
