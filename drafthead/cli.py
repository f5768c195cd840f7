"""The ``drafthead`` command line. The module of a command is imported only when the command is called."""

import gc
import sys
from importlib import import_module

from drafthead.errors import print_any_text
from drafthead.version import __version__

COMMANDS = {  # module of each command, and its line in `drafthead --help`
    "train": ("drafthead.train.run", "run a recipe: corpora, phases, tree, evaluation, head on disk"),
    "data": ("drafthead.commands.data", "make the corpora of a recipe and stop"),
    "serve": ("drafthead.commands.serve", "serve a head in vLLM, or a base that computes hidden states"),
    "eval": ("drafthead.commands.eval", "measure a saved head: mean accepted length, speedup, identical outputs"),
    "generate": ("drafthead.commands.generate", "stream an answer with a head, and print its speedup"),
    "chat": ("drafthead.commands.chat", "chat in the terminal, with accepted drafts in colour"),
    "replay": ("drafthead.commands.replay", "simulate any draft length and tree of a head, without decoding"),
    "adapt": ("drafthead.commands.adapt", "answer a stream of prompts with a head that learns from its answers"),
    "certify": ("drafthead.commands.certify", "check exhaustively, on small tables, that acceptance rules are exact"),
    "doctor": ("drafthead.commands.doctor", "check this machine: versions, exactness, costs, recipes that fit"),
    "export": ("drafthead.commands.export", "write a head in a published format, and check the export's drafts"),
    "import": ("drafthead.commands.import_head", "turn a published head into a head folder, attached to its base"),
    "engines": ("drafthead.commands.engines", "install serving engines that an evaluation measures (engines=[...])"),
    "push": ("drafthead.commands.push", "upload a head with its card, tree and evaluation to the Hugging Face Hub"),
}
HELP = f"""\
drafthead: train draft heads for speculative decoding on a frozen Hugging Face causal LM, and measure the speedup.

usage: drafthead COMMAND [key=value ...]

{chr(10).join(f"  {name:<10} {line}" for name, (_, line) in COMMANDS.items())}

  drafthead train recipe=medusa_smollm2               # a real model on 2 CPU cores, without a login
  drafthead train recipe=medusa_llama3 mode=estimate  # memory and tokens of a run; loads no weights
  drafthead train recipe=medusa_llama3 debug=tiny     # the whole run on a random tiny base, offline
  drafthead eval head=outputs/medusa_smollm2/head suite=mt_bench
  drafthead generate head=outputs/medusa_smollm2/head "Why is the sky blue?"
  drafthead chat head=outputs/medusa_smollm2/head
  drafthead replay head=outputs/medusa_smollm2/head suite=mt_bench
  drafthead adapt head=outputs/medusa_smollm2/head suite=code
  drafthead certify
  drafthead doctor
  drafthead export head=outputs/eagle3_smollm2_served/head to=eagle3 out=published
  drafthead import from=user/medusa-vicuna-7b base=lmsys/vicuna-7b-v1.3 out=outputs/medusa_vicuna/head
  drafthead push head=outputs/medusa_smollm2/head repo=user/medusa-smollm2

Every command takes settings as key=value, --cfg job (print the settings, start nothing) and --help.
device=NAME (cpu, cuda:1, mps) computes on that device instead of the accelerator that torch finds.
Several GPUs: accelerate launch train/run.py recipe=...  takes the settings of drafthead train.

  --version  print the version
  --help     print this text
"""


def main() -> None:
    print_any_text()
    command, rest = (sys.argv[1:2] or ["--help"])[0], sys.argv[2:]
    if command in ("--help", "-h", "help"):
        sys.stdout.write(HELP)
        raise SystemExit(0)
    if command in ("--version", "-V"):
        sys.stdout.write(f"drafthead {__version__}\n")
        raise SystemExit(0)
    if command not in COMMANDS:
        sys.stderr.write(f"drafthead: unknown command {command!r}; choose one of {', '.join(COMMANDS)}, or --help\n")
        raise SystemExit(2)
    sys.argv = [f"drafthead {command}", *rest]
    gc.disable()  # imports create no garbage, and searching for it takes a tenth of their time
    try:
        compose = import_module("drafthead.settings.compose")  # not at the top, to keep --help and --version quick
    except ModuleNotFoundError as error:
        raise SystemExit(f"commands need {error.name}; run: pip install 'drafthead[train]'") from None
    with compose.one_line_errors():
        module = import_module(COMMANDS[command][0])
        gc.freeze()
        gc.enable()
        module.main()
