"""Peak memory of a training whose base a server runs, for a base of 7B parameters in bfloat16.

    python benchmarks/served_memory.py --json docs/results/served_memory.json

The base has the shape of Llama 2 7B with SmolLM2's vocabulary and random weights; its layers are a hole in a sparse
file. Nobody runs it: a stand-in for vLLM answers with states made of embeddings, which its output head agrees with, so
that a run's checks pass. The run (answers, states, a few steps) is a separate process, whose peak is printed.
"""

import json
import resource
import shutil
import struct
import subprocess
import sys
import threading
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from common import at_least, entry_point, parser, print_table, save_record
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

from drafthead.models.base.base_config import EMBEDDED, BaseConfig
from drafthead.models.base.parts import BaseParts

RECIPES = {"Medusa": "medusa_smollm2_served"}
SHAPE = {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32}


def write_base(folder: Path) -> None:
    """Write the checkpoint: random embedding and output head, ones in all norms, and layers that take no disk space."""
    small = BaseConfig(name=EMBEDDED).folder()
    for path in (path for name in ("*token*", "chat_template*") for path in Path(small).glob(name)):
        shutil.copy(path, folder)
    ids = {
        key: getattr(AutoConfig.from_pretrained(small), key) for key in ("vocab_size", "bos_token_id", "eos_token_id")
    }
    config = LlamaConfig(**SHAPE, **ids, tie_word_embeddings=False, dtype="bfloat16", max_position_embeddings=4096)
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    with torch.device("meta"):
        shapes = {
            name: list(value.shape) for name, value in AutoModelForCausalLM.from_config(config).state_dict().items()
        }
    header, end, given = {}, 0, {}
    for name, shape in shapes.items():
        size = 2 * int(torch.tensor(shape).prod())
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [end, end + size]}
        if "embed_tokens" in name or "lm_head" in name:
            given[name] = torch.randn(shape, generator=torch.Generator().manual_seed(end % 97)).mul(0.02).bfloat16()
        elif "norm" in name:
            given[name] = torch.ones(shape, dtype=torch.bfloat16)
        end += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        start = file.tell()
        file.truncate(start + end)
        for name, value in given.items():
            file.seek(start + header[name]["data_offsets"][0])
            file.write(value.view(torch.uint8).numpy().tobytes())


class StandIn:
    """A server whose states of a token depend on this token only."""

    def __init__(self, parts: BaseParts, folder: Path) -> None:
        self.parts, self.folder, self.count = parts, folder, 0
        handler = type("Handler", (_Handler,), {"served": self})
        self.http = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        self.lock = threading.Lock()
        folder.mkdir(parents=True, exist_ok=True)
        threading.Thread(target=self.http.serve_forever, daemon=True).start()

    @torch.no_grad()
    def states(self, ids: Sequence[int]) -> Tensor:
        """Return [T, 2, D]: the embedding, and the last layer."""
        tokens = torch.tensor(ids)
        return torch.stack(
            [self.parts.input_embeddings(t) for t in (tokens, (7 * tokens + 3) % self.parts.vocab_size)], 1
        )

    def next_tokens(self, states: Tensor) -> list[int]:
        found: list[int] = self.parts.lm_head.logits(self.parts.final_norm(states[:, -1])).argmax(-1).tolist()
        return found

    @torch.no_grad()
    def respond(self, body: dict[str, Any]) -> dict[str, Any]:
        ids, answer = list(body["prompt"]), list[int]()
        for _ in range(body["max_tokens"]):
            answer += self.next_tokens(self.states([*ids, *answer][-1:]))
        choice: dict[str, Any] = {"index": 0, "text": "", "finish_reason": "length", "token_ids": answer}
        if (body.get("kv_transfer_params") or {}).get("include_output_tokens"):
            ids += answer[:-1]
        states = self.states(ids)
        if body.get("prompt_logprobs"):
            rows = [{str(token): {"rank": 1}} for token in self.next_tokens(states)]
            choice["prompt_logprobs"] = [None, *rows[:-1]]
        self.count += 1
        path = self.folder / f"{self.count}.safetensors"
        save_file({"hidden_states": states.contiguous(), "token_ids": torch.tensor(ids)}, path)
        usage = {"prompt_tokens": len(ids), "completion_tokens": len(answer)}
        payload = {"object": "text_completion", "model": body["model"], "choices": [choice], "usage": usage}
        return payload | {"kv_transfer_params": {"hidden_states_path": str(path)}}


class _Handler(BaseHTTPRequestHandler):
    served: StandIn

    def do_GET(self) -> None:
        self._send({"object": "list", "data": [{"id": self.served.parts.name, "max_model_len": 4096}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.served.lock:
            self._send(self.served.respond(body))

    def _send(self, payload: dict[str, Any]) -> None:
        content = json.dumps(payload).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *args: Any) -> None:
        pass


def main(argv: Sequence[str] | None = None) -> None:
    """Train, and print the peak."""
    options = parser(__doc__)
    options.add_argument("--steps", type=int, default=4)
    options.add_argument("--prompts", type=int, default=24)
    arguments = options.parse_args(argv)
    at_least(arguments, 1, "steps", "prompts")
    rows = []
    for head, recipe in RECIPES.items():
        with TemporaryDirectory() as temporary:
            folder = Path(temporary)
            (folder / "base").mkdir()
            write_base(folder / "base")
            config = BaseConfig(name=str(folder / "base"), dtype="bfloat16")
            server = StandIn(BaseParts.of_checkpoint(config), folder / "corpora" / "served")
            settings = [
                f"recipe={recipe}",
                f"base.name={config.name}",
                "base.dtype=bfloat16",
                f"data.states.url={server.url}",
            ]
            settings += [f"out={folder / 'run'}", f"data.folder={folder / 'corpora'}", "~phases.pretrain"]
            settings += [f"data.answers.prompts={arguments.prompts}", "data.answers.self_prompted=0"]
            settings += [
                "data.answers.fresh=true",
                "data.answers.sampler.max_new_tokens=32",
                "max_draft_vocab_size=null",
            ]
            settings += [f"phases.distill.steps={arguments.steps}", "stages=[corpora,train]", "tracker=none"]
            settings += ["data.states.compare_layers=false"]  # which are a hole
            subprocess.run([sys.executable, "-m", "drafthead", "train", *settings], check=True)
            peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20
            server.http.shutdown()
            size = (folder / "base" / "model.safetensors").stat().st_size / 2**30
        rows.append({"head": head, "base in GiB": size, "peak of the training in GiB": peak})
    print_table("a base whose layers only a server has", rows)
    save_record(arguments, "served_memory", {"rows": rows})


if __name__ == "__main__":
    entry_point(main)
