import json

from ml_collections import ConfigDict
import numpy as np
import pytest

from ultralong_jax.train import progress


@pytest.fixture
def clock(monkeypatch):
  """A clock that a test moves by hand."""
  now = [100.]
  monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
  return now


def open_log(folder, start=0, seconds=0., every_steps=10, every_seconds=5.,
             peak=None):
  config = ConfigDict(dict(every_steps=every_steps,
                           every_seconds=every_seconds))
  log = progress.Log(folder, config, start=start, steps=40, seconds=seconds,
                     peak=peak)
  log.enter("", flops_per_token=1e3)
  return log


def lines(folder):
  return [json.loads(text) for text in
          (folder / "metrics.jsonl").read_text().splitlines()]


def metrics(loss=1.5, skipped=0.):
  return {"loss": np.float32(loss), "bits_per_byte": np.float32(2.),
          "tokens": np.float32(100.), "skipped": np.float32(skipped),
          "load": np.ones((1, 2), np.float32)}


def test_line_comes_by_steps_and_by_seconds(tmp_path, clock):
  log = open_log(tmp_path)
  log.resume()
  for step in range(1, 41):
    clock[0] += 3. if 20 < step <= 24 else 0.01
    log.step(step, metrics())
  log.close()
  assert [line["step"] for line in lines(tmp_path)] == [10, 20, 22, 24, 34, 40]


def test_slow_steps_have_a_line_each(tmp_path, clock):
  log = open_log(tmp_path)
  log.resume()
  for step in (1, 2, 3):
    clock[0] += 9.
    log.step(step, metrics())
  log.close()
  assert [line["step"] for line in lines(tmp_path)] == [1, 2, 3]


def test_rate_and_time_leave_pauses_out(tmp_path, clock, capsys):
  log = open_log(tmp_path, every_steps=2, seconds=50., peak=1e6)
  clock[0] += 1000.  # compile
  log.resume()
  for step in (1, 2):
    clock[0] += 1.
    log.step(step, metrics())
  log.pause()
  clock[0] += 500.  # evaluation
  log.resume()
  clock[0] += 1.
  log.step(3, metrics())
  log.close()
  last = lines(tmp_path)[-1]
  assert last["tokens_per_second"] == pytest.approx(100.)
  assert last["train_seconds"] == pytest.approx(53.)
  assert last["utilisation"] == pytest.approx(0.1)
  assert last["load"] == [[1., 1.]]
  printed = capsys.readouterr().out.splitlines()
  assert printed[-1] == ("step 3/40  loss 1.5000  2.000 bits/byte  100 tokens/s"
                         "  10.0% of peak  0:37 left")


def test_skipped_step_is_reported_at_once(tmp_path, clock, capsys):
  log = open_log(tmp_path)
  log.resume()
  log.step(1, metrics(loss=np.nan, skipped=1.))
  log.close()
  assert lines(tmp_path)[0]["loss"] is None  # NaN is no JSON
  assert "SKIPPED" in capsys.readouterr().out


def test_lines_of_redone_steps_and_half_lines_go(tmp_path, clock):
  path = tmp_path / "metrics.jsonl"
  path.write_text('{"step": 5}\n{"step": 10}\n{"step": 11}\n{"step": 1')
  open_log(tmp_path, start=10).close()
  assert lines(tmp_path) == [{"step": 5}, {"step": 10}]
