"""Time the verification of 1, 8 and 16 nodes by bases with recurrent layers, in the shape of real ones.

    python benchmarks/recurrent_cost.py --bases qwen3_5_0_8b,lfm2_1_2b
    python benchmarks/recurrent_cost.py --bases all --json docs/results/recurrent_cost.json

The bases have random weights in float32 (0.8 to 1.2 B parameters, 3 to 5 GB of memory each). ``qwen3_0_6b`` has
attention alone, to compare with. The tree is a chain after 200 tokens; the median of --repeats rounds counts, in which
the sizes take turns.
"""

import gc
from collections.abc import Sequence
from typing import Any

from common import at_least, entry_point, listed, parser, print_table, save_record

from drafthead.eval.trees.cost_model import measure_costs
from drafthead.models.base.base_config import BaseConfig
from drafthead.models.base.base_model import BaseModel
from drafthead.models.drafters.prompt_lookup import PromptLookup
from drafthead.system.machine import other_processes_line

CONTEXT = {"max_position_embeddings": 2048, "tie_word_embeddings": True}
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3_5_0_8b": {
        **{"model_type": "qwen3_5_text", "hidden_size": 1024, "intermediate_size": 3584, "num_hidden_layers": 24},
        **{"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256, "vocab_size": 248320},
        **{"linear_num_key_heads": 16, "linear_num_value_heads": 16},
    },
    "lfm2_1_2b": {
        **{"model_type": "lfm2", "hidden_size": 2048, "intermediate_size": 12288, "num_hidden_layers": 16},
        **{"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 65536},
        "full_attn_idxs": [2, 5, 8, 10, 12, 14],
    },
    "qwen3_0_6b": {
        **{"model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28},
        **{"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936},
    },
}
SIZES = (1, 8, 16)


def main(given: Sequence[str] | None = None) -> None:
    """Measure every base, and print the table."""
    options = parser(__doc__)
    options.add_argument("--bases", default="all", help=f"all, or a list of {', '.join(SHAPES)}")
    options.add_argument("--repeats", type=int, default=9)
    arguments = options.parse_args(given)
    at_least(arguments, 1, "repeats")
    names = list(SHAPES) if arguments.bases == "all" else listed("bases", arguments.bases, list(SHAPES))
    rows = []
    for name in names:
        config = BaseConfig(random=True, dtype="float32", tokenizer="builtin:tiny", shape=SHAPES[name] | CONTEXT)
        base = BaseModel.load(config)
        costs = measure_costs(base, PromptLookup(8, 1), sizes=SIZES, repeats=arguments.repeats)
        row: dict[str, Any] = {"base": name, "recurrent layers": sum(map(bool, base.cache_shape.states))}
        row |= {f"{n} nodes, ms": round(1000 * costs.verify[n], 1) for n in SIZES}
        row |= {f"{n} / 1": round(costs.verify[n] / costs.verify[1], 2) for n in SIZES[1:]}
        others = costs.other_processes_cores
        rows.append(row | {"other processes, cores": None if others is None else round(others, 2)})
        print_table("verification", rows[-1:])
        del base
        gc.collect()
    print_table("Verification of chains, float32", rows)
    print(other_processes_line(max(row["other processes, cores"] for row in rows)))
    save_record(arguments, "recurrent_cost", {"results": rows})


if __name__ == "__main__":
    entry_point(main)
