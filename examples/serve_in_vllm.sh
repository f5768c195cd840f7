#!/bin/bash
# Train an EAGLE-3 head that engines can load, export it, check the export, and serve it with vLLM.
#
# Time and result, 2 cores of an AMD EPYC, 22 November 2026 (docs/results/served.md): about 6 minutes of training with the
# recipe's 350 steps on data=smollm2_large. In vLLM 0.32.0, 4 % faster than without a head; after 3,200 steps 29 %.
#
#   bash examples/serve_in_vllm.sh                         # ends in a running server; vLLM must be installed
#   SERVE=echo bash examples/serve_in_vllm.sh debug=tiny   # prints the last command instead, in two minutes
set -e
OUT=${OUT:-outputs/served}
drafthead train recipe=eagle3_smollm2_served data=smollm2_large out="$OUT" 'stages=[corpora,train]' "$@"
drafthead export head="$OUT/head" to=speculators out="$OUT/published" suite=builtin limit=2 max_new_tokens=16
# The folder names its base, so vLLM needs no other option. Then, in another terminal:
#   curl localhost:8000/v1/completions -H 'Content-Type: application/json' \
#     -d '{"model": "'$OUT'/published", "prompt": "The sky is", "max_tokens": 64}'
${SERVE:-} vllm serve "$OUT/published"
