"""Draws each expert's tokens over the steps, from the curves of sweep.py.

python -m experiments.0007_forms.tokens CURVES_FOLDER OUT.png

One row of pictures for each layer drawn, one column for each balancer; the
experts of a picture are sorted by their tokens over the last 40 steps.
"""
import pathlib
import sys

import matplotlib
import numpy as np

from .figure import BALANCERS

matplotlib.use("Agg")
from matplotlib import colors, pyplot  # noqa: E402

WINDOW = 4  # steps in a column of a picture
LAYERS = (0, -1)  # of those with experts


def averaged(load_SE):
  """Means over windows of steps: [S // WINDOW, E], most used expert last."""
  steps = len(load_SE) // WINDOW * WINDOW
  load_SE = load_SE[:steps].reshape(-1, WINDOW, load_SE.shape[-1]).mean(1)
  return load_SE[:, np.argsort(load_SE[-40 // WINDOW:].mean(0))]


def main(folder, out):
  figure, axes = pyplot.subplots(
      len(LAYERS), len(BALANCERS), figsize=(12, 5), sharex=True, sharey=True,
      layout="constrained")
  scale = colors.LogNorm(1 / 16, 16)
  for column, name in zip(axes.T, BALANCERS):
    path = pathlib.Path(folder) / f"{name.replace(' ', '_')}.npz"
    load_SLE = np.load(path)["load_of_first"].astype(np.float32)
    steps, layers, experts = load_SLE.shape
    for panel, layer in zip(column, LAYERS):
      drawn = panel.imshow(
          np.maximum(averaged(load_SLE[:, layer]), 1 / 16).T, norm=scale,
          cmap="RdBu_r", aspect="auto", origin="lower",
          extent=(0, steps, 0, experts), interpolation="nearest")
      panel.axvline(steps / 2, color="0.3", linewidth=0.8)
      number = "first" if layer == 0 else "last"
      panel.set(ylabel=f"experts of the {number} of {layers} layers"
                if name == BALANCERS[0] else "",
                xlabel="step" if layer == LAYERS[-1] else "")
    column[0].set_title("quantile (published)" if name == "published"
                        else name, fontsize=10)
  figure.colorbar(drawn, ax=axes, label="tokens over the fair share",
                  ticks=[1 / 16, 1 / 4, 1, 4, 16],
                  format=lambda x, _: f"{x:g}")
  figure.savefig(out, dpi=90)


if __name__ == "__main__":
  main(*sys.argv[1:])
