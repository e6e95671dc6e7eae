"""Draws a run's loss against what a bigram model reaches.

python -m experiments.0001_tiny_text.figure runs/tiny/metrics.jsonl OUT.png
"""
import json
import pathlib
import sys

import matplotlib
import numpy as np

matplotlib.use("Agg")
from matplotlib import pyplot  # noqa: E402

WINDOW = 9  # steps in the running mean


def main(source, out):
  rows = [json.loads(line)
          for line in pathlib.Path(source).read_text().splitlines()]
  steps, bits = zip(*((row["step"], row["bits_per_byte"]) for row in rows
                      if "bits_per_byte" in row))
  bigram = next(row["bigram_bits_per_byte"] for row in rows
                if "bigram_bits_per_byte" in row)
  mean = np.convolve(bits, np.ones(WINDOW) / WINDOW, mode="valid")
  figure, axes = pyplot.subplots(figsize=(6, 3.2))
  axes.plot(steps, bits, color="0.8", label="a step's batch")
  axes.plot(steps[WINDOW // 2:WINDOW // 2 + len(mean)], mean,
            label=f"mean of {WINDOW} logged steps")
  axes.axhline(bigram, color="k", linestyle="--", label="bigram model")
  for row in rows:
    if "validation_bits_per_byte" in row:
      axes.plot(row["step"], row["validation_bits_per_byte"], "o", color="C3",
                label="validation")
  axes.set(xlabel="step", ylabel="bits per byte", ylim=(1.5, 6))
  axes.legend()
  figure.tight_layout()
  figure.savefig(out, dpi=110)


if __name__ == "__main__":
  main(*sys.argv[1:])
