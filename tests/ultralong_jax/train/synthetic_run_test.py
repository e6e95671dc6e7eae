"""A run on generated tasks, from the config to the figures on disk."""
import json

from configs import common
from ultralong_jax.train import loop
from ultralong_jax.train import validate


def test_two_steps_on_generated_tasks_give_answers_and_recall(tmp_path):
  text = tmp_path / "text"
  text.mkdir()
  for i in range(20):
    (text / f"{i}.txt").write_text("".join(f"line {i} {j}\n"
                                           for j in range(100)))
  c = common.get_config()
  c.steps, c.batch, c.context, c.optim.warmup_steps = 2, 2, 512, 1
  c.model.update(dict(
      width=16, layers=2, pattern="dm", block_layers=1, heads=2, key_width=8,
      value_width=8, latent_heads=2, latent_key_width=8, latent_shared_width=4,
      latent_value_width=8, latent_rank=8, dense_hidden=16, dense_layers=2))
  c.data.source, c.data.path = "synthetic", str(text)
  c.data.synthetic.documents = 16
  c.data.validation_fraction = 0.3
  c.data.validation_bytes, c.data.validation_context = 4_096, 512
  c.evaluate.recall_lengths, c.evaluate.recall_depths = (400,), (0.0, 1.0)
  c.evaluate.recall_samples, c.evaluate.recall_segment = 2, 256
  loop.train(c, tmp_path / "run")
  lines = [json.loads(line) for line in
           (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
  assert [line["step"] for line in lines if "loss" in line][-1] == 2
  last = lines[-1]
  for task in ("needles", "pairs"):
    assert [row[:2] + row[3:4] for row in
            last[f"validation_recall_{task}"]] == [[400, 0., 2], [400, 1., 2]]
  asked = {name: value for name, value in last.items()
           if name.endswith("_asked")}
  assert sum(asked.values()) > 5
  # The same figures after training, of the checkpoint.
  again = validate.evaluate(c, tmp_path / "run")
  for name in again.keys() - {"step"}:
    assert again[name] == last[name] or name.startswith("validation_bits") or (
        name == "validation_loss"), name
  assert abs(again["validation_loss"] - last["validation_loss"]) < 1e-4
