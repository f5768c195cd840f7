#!/bin/bash
# Train Medusa heads for SmolLM2-135M on a CPU, measure them, and look at the report: what `make demo` does.
#
# 4 min 39 s on 2 cores of an AMD EPYC (24 November 2026), after the set-up. It printed: head and prompt lookup in one
# tree 1.39x (95 %: 1.21 to 1.63), tau 2.04; head alone 1.22x; prompt lookup alone 1.32x; 10 of 10 answers identical.
#
#   bash examples/train_medusa_cpu.sh                # outputs/medusa_smollm2
#   bash examples/train_medusa_cpu.sh debug=tiny     # a random tiny model instead, in under a minute
set -e
drafthead train recipe=medusa_smollm2 \
  data.text.max_tokens=6000 phases.pretrain.steps=8 phases.distill.max_tokens=28000 phases.distill.steps=100 \
  validate_every=200 eval.max_new_tokens=48 "$@"
echo "open outputs/medusa_smollm2/report.html, then: drafthead chat head=outputs/medusa_smollm2/head"
