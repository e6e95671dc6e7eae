"""Where the numbers of a run go: metrics.jsonl, TensorBoard, the terminal."""
import json
import math
import pathlib
import sys
import time

import numpy as np
from rich import console, progress
import tensorboardX

from ultralong_jax.train import workdir as workdir_lib


class Log:
  """Writes what the loop reports.

  Attributes:
    seconds: training time so far, earlier parts of the run included;
      evaluation, between pause() and resume(), is not in it.
  """

  def __init__(self, workdir, c, *, start: int, steps: int, seconds: float,
               peak: float | None):
    """Opens the files and drops lines of steps that are about to be redone.

    Args:
      workdir: the run's folder.
      c: every_steps and every_seconds, the longest silence.
      start: steps that are already done.
      steps: of the whole run.
      seconds: training time of those that are done.
      peak: what all devices could do in a second, or None.
    """
    self.seconds = seconds
    self._c, self._steps = c, steps
    self._stage, self._flops_per_token, self._peak = "", 0., peak
    path = pathlib.Path(workdir) / "metrics.jsonl"
    _forget(path, after=start)
    self._file = open(path, "a", buffering=1)  # a line is on disk at once
    self._board = tensorboardX.SummaryWriter(
        str(pathlib.Path(workdir) / "tensorboard"), purge_step=start + 1,
        write_to_disk=True)
    self._bar = _bar(start, steps)
    self._tokens = 0.0
    self._clock = self._written = time.monotonic()
    self._written_step = start
    self._since = self.seconds

  def enter(self, stage: str, flops_per_token: float):
    """Says what is trained from here on.

    Args:
      stage: its name, in every line to come; "" is in none.
      flops_per_token: of training, forward and backward.
    """
    self._stage, self._flops_per_token = stage, flops_per_token

  def resume(self):
    """Starts counting training time."""
    self._clock = time.monotonic()

  def pause(self):
    """Stops counting training time."""
    self._tick()

  def _tick(self):
    now = time.monotonic()
    self.seconds += now - self._clock
    self._clock = now

  def step(self, step: int, metrics: dict):
    """Takes a step's metrics, on the host; writes a line when it is time."""
    self._tick()
    self._tokens += float(metrics["tokens"])
    now = time.monotonic()
    if (step - self._written_step < self._c.every_steps
        and now - self._written < self._c.every_seconds
        and step < self._steps and not metrics.get("skipped")):
      return
    elapsed = max(self.seconds - self._since, 1e-9)
    rate = self._tokens / elapsed
    line = {**metrics, "tokens_per_second": rate, "train_seconds": self.seconds}
    if self._peak:
      line["utilisation"] = rate * self._flops_per_token / self._peak
    self.write(step, line)
    self._show(step, line)
    self._tokens, self._since = 0.0, self.seconds
    self._written, self._written_step = now, step

  def write(self, step: int, values: dict):
    """Writes one line of metrics.jsonl and its scalars to TensorBoard."""
    values = {name: _plain(x) for name, x in values.items()}
    stage = {"stage": self._stage} if self._stage else {}
    self._file.write(json.dumps({"step": step, **stage, **values}) + "\n")
    for name, x in values.items():
      if isinstance(x, (int, float)):
        self._board.add_scalar(name, x, step)

  def say(self, text: str):
    """Prints a line; above the bar, if there is one."""
    if self._bar:
      self._bar.console.print(text, markup=False, highlight=False)
    else:
      print(text, flush=True)

  def _show(self, step: int, line: dict):
    left = (self._steps - step) * (self.seconds - self._since) / max(
        step - self._written_step, 1)
    text = (f"loss {line['loss']:.4f}  {line['bits_per_byte']:.3f} bits/byte  "
            f"{line['tokens_per_second']:,.0f} tokens/s")
    if "utilisation" in line:
      text += f"  {line['utilisation']:.1%} of peak"
    if line.get("skipped"):
      text += "  SKIPPED: gradient not finite"
    text += f"  {_clock(left)} left"
    if self._bar:
      self._bar.update(self._bar.task_ids[0], completed=step, text=text)
    else:
      print(f"step {step}/{self._steps}  {text}", flush=True)

  def close(self):
    if self._bar:
      self._bar.stop()
    self._board.close()
    self._file.close()


def _bar(start: int, steps: int):
  """Returns a running bar, or None where nobody looks."""
  if not sys.stdout.isatty():
    return None
  bar = progress.Progress(
      progress.TextColumn("step {task.completed}/{task.total}"),
      progress.BarColumn(bar_width=20),
      progress.TextColumn("{task.fields[text]}"),
      console=console.Console(), refresh_per_second=2)
  bar.add_task("train", total=steps, completed=start, text="first step")
  bar.start()
  return bar


def _forget(path: pathlib.Path, after: int):
  """Drops lines of later steps, and half a line that a kill left."""
  if not path.exists():
    return
  kept = []
  for text in path.read_text().splitlines():
    try:
      if json.loads(text)["step"] <= after:
        kept.append(text + "\n")
    except json.JSONDecodeError:
      continue
  workdir_lib.write_whole(path, "".join(kept))


def _plain(x):
  """Turns numbers and small arrays into JSON; non-finite becomes null."""
  if isinstance(x, (np.ndarray, np.generic)):
    x = x.tolist()
  if isinstance(x, list):
    return [_plain(item) for item in x]
  if isinstance(x, float) and not math.isfinite(x):
    return None
  return x


def _clock(seconds: float) -> str:
  minutes, seconds = divmod(int(seconds), 60)
  hours, minutes = divmod(minutes, 60)
  return f"{hours}:{minutes:02}:{seconds:02}" if hours else (
      f"{minutes}:{seconds:02}")
