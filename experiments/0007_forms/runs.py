"""Draws the loss of runs of ultralong_jax.main, one line each.

python -m experiments.0007_forms.runs OUT.png tiny=runs/tiny/metrics.jsonl ...
"""
import json
import pathlib
import sys

import matplotlib
import numpy as np

matplotlib.use("Agg")
from matplotlib import pyplot  # noqa: E402

WINDOW = 9  # logged steps in the running mean


def main(out, *runs):
  figure, axes = pyplot.subplots(figsize=(6, 3.2))
  for run in runs:
    name, _, path = run.partition("=")
    rows = [json.loads(line)
            for line in pathlib.Path(path).read_text().splitlines()]
    steps, bits = zip(*((row["step"], row["bits_per_byte"]) for row in rows
                        if "bits_per_byte" in row))
    held = [row for row in rows if "validation_bits_per_byte" in row][-1]
    mean = np.convolve(bits, np.ones(WINDOW) / WINDOW, mode="valid")
    line, = axes.plot(steps[WINDOW // 2:WINDOW // 2 + len(mean)], mean,
                      label=f"{name}, {held['train_seconds']:.0f} s")
    axes.plot(held["step"], held["validation_bits_per_byte"], "o",
              color=line.get_color())
  axes.set(xlabel="step", ylabel="bits per byte", ylim=(1.5, 6))
  axes.legend()
  figure.tight_layout()
  figure.savefig(out, dpi=90)


if __name__ == "__main__":
  main(*sys.argv[1:])
