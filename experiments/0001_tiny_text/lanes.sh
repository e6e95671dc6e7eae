#!/bin/bash
# All variants side by side on one GPU; what was printed stays when time ends.
cd "$(dirname "$0")/../.."
out=${1:?folder of the results}
export XLA_PYTHON_CLIENT_MEM_FRACTION=0.15
export XLA_FLAGS="--xla_gpu_autotune_level=0"
lane() {
  timeout "${LIMIT:-270}" python -m experiments.0001_tiny_text.lanes "$@" \
      --out "$out/lanes.jsonl" 2> "$out/$1.err" | tee -a "$out/lanes.log" &
}
lane "w256 muon" --tokens 430000 --rates 0.005,0.01,0.02 --adam 0.0025,0.006
lane "w192 muon" --tokens 480000 --rates 0.005,0.01,0.02 --adam 0.0025,0.006
lane "w128 muon" --tokens 500000 --rates 0.005,0.01,0.02 --adam 0.0025,0.006
lane "w128 adamw" --tokens 740000 --rates 0.0015,0.0025,0.004,0.006,0.01
lane "w128 adamw 1 row" --tokens 740000 --rates 0.0015,0.0025,0.004,0.006,0.01
lane "w256 adamw" --tokens 540000 --rates 0.0015,0.0025,0.004,0.006,0.01
wait
