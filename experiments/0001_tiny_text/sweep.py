"""Runs configs/tiny.py with overrides and collects what each reached.

python -m experiments.0001_tiny_text.sweep --parallel 8 --out results.jsonl

Figures of one machine compare; the standard library that is read differs a
little from Python version to Python version.
"""
import argparse
import concurrent.futures
import json
import pathlib
import subprocess
import sys
import tempfile
import time

from experiments import report

# Name of a run -> overrides of configs/tiny.py.
RUNS = {
    "muon 0.02": {},
    "muon 0.01": {"optim.lr": 0.01},
    "muon 0.005": {"optim.lr": 0.005},
    "muon 0.04": {"optim.lr": 0.04},
    "muon 0.02, adam 5e-3": {"optim.adam_lr": 5e-3},
    "muon 0.01, adam 5e-3": {"optim.lr": 0.01, "optim.adam_lr": 5e-3},
    "muon 0.01, adam 1e-2": {"optim.lr": 0.01, "optim.adam_lr": 1e-2},
    "muon 0.01, 1024 tokens": {"optim.lr": 0.01, "batch": 2, "steps": 600},
    "muon 0.02, 1024 tokens": {"optim.lr": 0.02, "batch": 2, "steps": 600},
    "muon 0.005, 1024 tokens": {"optim.lr": 0.005, "batch": 2, "steps": 600},
    "muon 0.01, 1024 tokens, adam 5e-3": {
        "optim.lr": 0.01, "batch": 2, "steps": 600, "optim.adam_lr": 5e-3},
    "muon 0.01, no decay": {"optim.lr": 0.01, "optim.weight_decay": 0.0},
    "adamw 2.5e-3": {"optim.name": "adamw", "optim.lr": 2.5e-3},
    "adamw 5e-3": {"optim.name": "adamw", "optim.lr": 5e-3},
}
COMMON = {"steps": 300, "model.dtype": "float32", "evaluate.every_steps": 0,
          "checkpoint.every_steps": 0}


def run(name, overrides, seed):
  """One run in a process and a folder of its own: config, metrics, seconds."""
  flags = {**COMMON, **overrides, "seed": seed}
  with tempfile.TemporaryDirectory() as folder:
    began = time.monotonic()
    command = [sys.executable, "-m", "ultralong_jax.main", "--config",
               "configs/tiny.py", "--workdir", folder]
    command += [f"--config.{k}={v}" for k, v in flags.items()]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
      print(name, "failed:", done.stderr[-2000:], file=sys.stderr)
      return None
    lines = (pathlib.Path(folder) / "metrics.jsonl").read_text().splitlines()
  metrics = {}
  for line in lines:
    metrics |= json.loads(line)
  metrics = {k: metrics[k] for k in ("validation_bits_per_byte",
                                     "train_seconds")}
  return flags, metrics, round(time.monotonic() - began, 1)


def main():
  parser = argparse.ArgumentParser()
  parser.add_argument("--parallel", type=int, default=1)
  parser.add_argument("--only", default="", help="runs whose name holds this")
  parser.add_argument("--seeds", type=int, default=1)
  report.add_flags(parser)
  args = parser.parse_args()
  jobs = [(name, overrides, seed) for seed in range(args.seeds)
          for name, overrides in RUNS.items() if args.only in name]
  with concurrent.futures.ThreadPoolExecutor(args.parallel) as pool:
    done = pool.map(lambda job: run(*job), jobs)
    for (name, _, seed), result in zip(jobs, done):
      if result:
        flags, metrics, seconds = result
        report.append(args, name, metrics, flags, seed, seconds)


if __name__ == "__main__":
  main()
