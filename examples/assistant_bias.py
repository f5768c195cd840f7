"""Show that transformers samples with a bias when a Gemma 4 assistant drafts: python examples/assistant_bias.py

A tiny random Gemma 4 and a tiny random assistant, both of transformers' own classes, answer one prompt many times. The
answers of three tokens are compared with the probabilities that the model itself gives them (chi-square test). The
first token is never drafted. The second one is drafted by ``SinglePositionMultiTokenCandidateGenerator``.

About two minutes on 2 cores of an Intel Xeon, 26 November 2026:

    transformers 5.24.0, torch 2.13.0+cpu, 2000 samples each
    greedy answers of 40 tokens are equal: True
    sampled without the assistant                total variation 0.023   p = 8.3e-01
    sampled with the assistant                   total variation 0.184   p = 4.0e-72
    the same, without the assistant's logits     total variation 0.027   p = 5.7e-01
"""

import argparse
from collections import Counter
from itertools import product

import torch
import transformers
from transformers import Gemma4AssistantConfig, Gemma4AssistantForCausalLM, Gemma4ForCausalLM, Gemma4TextConfig
from transformers.generation.candidate_generator import SinglePositionMultiTokenCandidateGenerator as Generator

VOCABULARY, PROMPT, LENGTH = 5, [1, 2, 3], 3
LAYERS = ["sliding_attention", "full_attention"]
SHAPE = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
SHAPE |= {"vocab_size": VOCABULARY, "num_hidden_layers": 2, "layer_types": LAYERS, "global_head_dim": 8}
SHAPE |= {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0, "initializer_range": 0.5}
SHAPE |= {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": None}


if transformers.__version__ == "5.23.0":  # which builds no assistant; 5.21.0 and 5.24.0 return these values
    Gemma4TextConfig.kv_sharing_modes = property(lambda self: ["reuse" if self.num_kv_shared_layers else "store"] * 2)


def models(seed: int) -> tuple[Gemma4ForCausalLM, Gemma4AssistantForCausalLM]:
    """Return a model and an assistant with random weights."""
    torch.manual_seed(seed)
    model = Gemma4ForCausalLM(Gemma4TextConfig(**SHAPE)).eval()
    config = Gemma4AssistantConfig(text_config=Gemma4TextConfig(**SHAPE), backbone_hidden_size=SHAPE["hidden_size"])
    assistant = Gemma4AssistantForCausalLM(config).eval()
    assistant.generation_config.num_assistant_tokens = 4
    return model, assistant


@torch.no_grad()
def expected(model: Gemma4ForCausalLM) -> torch.Tensor:
    """Return the model's probabilities of all answers, in the order of ``itertools.product``."""
    answers = torch.tensor(list(product(range(VOCABULARY), repeat=LENGTH)))
    ids = torch.cat([torch.tensor(PROMPT).expand(len(answers), -1), answers], 1)
    log_probs = model(input_ids=ids).logits[:, len(PROMPT) - 1 : -1].double().log_softmax(-1)
    return log_probs.gather(2, answers[..., None]).sum((1, 2)).exp()


def counts(model: Gemma4ForCausalLM, samples: int, **options: object) -> torch.Tensor:
    """Return how often each answer was generated, in the order of ``expected``."""
    ids = torch.tensor([PROMPT])
    found: Counter[tuple[int, ...]] = Counter()
    for _ in range(samples):
        answer = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=LENGTH, **options)
        found[tuple(answer[0, len(PROMPT) :].tolist())] += 1
    return torch.tensor([found[answer] for answer in product(range(VOCABULARY), repeat=LENGTH)]).double()


def report(name: str, found: torch.Tensor, probs: torch.Tensor) -> None:
    """Print the total variation and the p-value of a chi-square test; answers expected below 5 times are merged."""
    distance, wanted = (found / found.sum() - probs).abs().sum() / 2, probs * found.sum()
    rare = wanted < 5
    found, wanted = (torch.cat([x[~rare], x[rare].sum()[None]]) for x in (found, wanted))
    statistic = ((found - wanted) ** 2 / wanted.clamp(min=1e-9)).sum()
    p_value = torch.special.gammaincc(torch.tensor((len(found) - 1) / 2).double(), statistic / 2)
    print(f"{name:<44} total variation {distance:.3f}   p = {p_value:.1e}")


def main() -> None:
    """Compare greedy answers; sample without the assistant, with it, and with a repair."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    transformers.logging.set_verbosity_error()
    model, assistant = models(arguments.seed)
    print(f"transformers {transformers.__version__}, torch {torch.__version__}, {arguments.samples} samples each")

    ids = torch.tensor([PROMPT])
    greedy = [
        model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=40, do_sample=False, **how)
        for how in ({}, {"assistant_model": assistant})
    ]
    print(f"greedy answers of 40 tokens are equal: {torch.equal(*greedy)}")
    probs, options = expected(model), {"do_sample": True, "top_k": 0, "assistant_model": assistant}
    report("sampled without the assistant", counts(model, arguments.samples, do_sample=True, top_k=0), probs)
    report("sampled with the assistant", counts(model, arguments.samples, **options), probs)
    stock = Generator.get_candidates
    Generator.get_candidates = lambda *a, **k: (stock(*a, **k)[0], None)
    report("the same, without the assistant's logits", counts(model, arguments.samples, **options), probs)


if __name__ == "__main__":
    main()
