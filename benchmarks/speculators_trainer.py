"""Parts of training_quality.py that run in an environment with speculators 0.9.0, without torchvision.

    python speculators_trainer.py states BASE TRAIN HELD_OUT OUT     hidden states for two outputs of `prepare-data`
    python speculators_trainer.py train FLAGS                        `speculators train` on a CPU

speculators takes hidden states from a vLLM server. Here stock transformers computes the same ones, in bfloat16: the
inputs of three layers, and the last layer's output before the final norm, which speculators applies itself. Its trainer
wants an accelerator, so ``train`` replaces the device and the validation, and nothing else. A CPU also needs
``--draft-attn-impl sdpa`` (flex attention has no backward pass there), ``--loss-implementation eager`` (no Triton) and
``--num-workers 0``.
"""

import sys
from pathlib import Path
from typing import Any

import torch


def write_states(base: str, train: str, held_out: str, out: str) -> None:
    """Join two data sets, and write the states [n, 4, D] of each row as hs_<row>.safetensors."""
    from datasets import concatenate_datasets, load_from_disk
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    rows = concatenate_datasets([load_from_disk(train), load_from_disk(held_out)])
    rows.save_to_disk(out)
    decoder = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16).eval().model
    last: dict[str, Any] = {}

    def keep(module: Any, inputs: Any, output: Any) -> None:
        last["states"] = output[0] if isinstance(output, tuple) else output

    decoder.layers[-1].register_forward_hook(keep)
    layers = [2, len(decoder.layers) // 2, len(decoder.layers) - 3]  # speculators' default
    folder = Path(out) / "hidden_states"
    folder.mkdir(exist_ok=True)
    for number, row in enumerate(rows.with_format("torch")):
        ids = row["input_ids"]
        with torch.inference_mode():
            result = decoder(ids[None], output_hidden_states=True)
        read = [*(result.hidden_states[n][0] for n in layers), last["states"].reshape(len(ids), -1)]
        values = {"token_ids": ids.clone(), "hidden_states": torch.stack(read, 1).contiguous()}
        save_file(values, folder / f"hs_{number}.safetensors")


def _end_after_last_step(trainer: Any, epoch: int) -> None:
    """Replace the validation, which heads are not compared by. --max-steps ends an epoch, but not the run."""
    if trainer.global_step >= trainer.config.max_steps:
        raise SystemExit


def train(flags: list[str]) -> None:
    """Run `speculators train` on the CPU."""
    torch.accelerator.synchronize = lambda *args, **kwargs: None
    from speculators.train import cli, trainer
    from speculators.train.config import TrainConfig

    trainer.get_local_rank = lambda: "cpu"  # the trainer calls .to() with it
    trainer.Trainer.val_epoch = _end_after_last_step
    init = trainer.Trainer.__init__

    def on_cpu(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        self.device_type = "cpu"  # autocast's

    trainer.Trainer.__init__ = on_cpu
    cli.main(TrainConfig.resolve(flags))


if __name__ == "__main__":
    write_states(*sys.argv[2:]) if sys.argv[1] == "states" else train(sys.argv[2:])
