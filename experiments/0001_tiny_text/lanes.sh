#!/bin/bash
# Two grids side by side on one GPU; what was printed stays when time ends.
cd "$(dirname "$0")/../.."
out=${1:?folder of the results}
export XLA_PYTHON_CLIENT_MEM_FRACTION=0.4
export XLA_FLAGS="--xla_gpu_autotune_level=0"
lane() {
  timeout "${LIMIT:-270}" python -m experiments.0001_tiny_text.lanes tiny \
      --tokens 510000 --commit "${COMMIT:?of this tree}" \
      --out "$out/lanes.jsonl" --grid "$@" 2>> "$out/lanes.err" \
      | tee -a "$out/lanes.log" &
}
lane lr=0.002,0.0028,0.004 adam_lr=0.003,0.006 momentum=0.8,0.9 \
    final_fraction=0.1,0.3
lane lr=0.0028 adam_lr=0.003,0.006 momentum=0.9 final_fraction=0.1,0.3 \
    weight_decay=0,0.1,0.3 b2=0.95,0.99
wait
