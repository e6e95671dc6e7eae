"""Draws the curves that sweep.py saved: loss, load, gradients by depth.

python -m experiments.0007_forms.figure CURVES_FOLDER OUT.png
"""
import pathlib
import sys

import matplotlib
import numpy as np

matplotlib.use("Agg")
from matplotlib import pyplot  # noqa: E402

WINDOW = 16  # steps in a running mean
BALANCERS = ("published", "load quantile", "aux loss", "sign bias",
             "no balancing")
ARTICLE = ("published", "article", "article without injection",
           "plain residual")


def smooth(x_S):
  return np.convolve(x_S, np.ones(WINDOW) / WINDOW, mode="valid")


def main(folder, out):
  curves = {path.stem.replace("_", " "): np.load(path)
            for path in sorted(pathlib.Path(folder).glob("*.npz"))}
  figure, axes = pyplot.subplots(2, 2, figsize=(10, 7))
  loss, load, dead, depth = axes.flat
  base_S = curves["published"]["loss"].mean(1)
  colors = pyplot.cm.tab20(np.linspace(0, 1, len(curves)))
  for color, (name, own) in zip(colors, curves.items()):
    loss.plot(smooth(own["loss"].mean(1) - base_S), color=color, label=name)
  loss.set(ylabel="loss over published's, nats", xlabel="step",
           ylim=(-0.05, 0.25))
  for name in BALANCERS:
    own = curves[name]
    label = "quantile (published)" if name == "published" else name
    load.plot(smooth(own["load_max_over_mean"].mean(1)), label=label)
    dead.plot(smooth(own["dead_experts"].mean(1)), label=label)
  load.set(ylabel="largest load over the mean", xlabel="step", yscale="log")
  dead.set(ylabel="experts of all layers without a token", xlabel="step",
           yscale="symlog")
  for name in ARTICLE:
    norms_SL = curves[name]["layer_grad_norm"].mean(1)
    depth.plot(np.median(norms_SL[-100:], axis=0), "o-", label=name)
  depth.set(ylabel="gradient norm, median of 100 steps", xlabel="layer",
            yscale="log")
  for panel in (loss, load, dead):
    panel.axvline(len(base_S) // 2 - WINDOW // 2, color="0.7", zorder=0)
  for panel in axes.flat:
    panel.legend(fontsize=7, loc="upper right")
  figure.tight_layout()
  figure.savefig(out, dpi=90)


if __name__ == "__main__":
  main(*sys.argv[1:])
