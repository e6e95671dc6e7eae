"""The fingerprint: what the order of rows depends on, and what differs."""

import json
import os
import subprocess
import sys

from ultralong_jax.data import loader
from ultralong_jax.data import tokenizer


def test_fingerprint_names_what_differs(open_train):
  base = open_train().fingerprint
  again = json.loads(json.dumps(open_train().fingerprint))
  assert loader.compare(again, base) == []
  for change, name in [({"seed": 1}, "seed"), ({"batch": 2}, "batch"),
                       ({"context": 32}, "context")]:
    now = open_train(**change).fingerprint
    value = change[name]
    assert loader.compare(base, now) == [
        f"data.{name}: saved {base[name]}, now {value}"]
  assert loader.compare(base, {**base, "new": 1}) == [
      "data.new: saved nothing, now 1"]
  assert loader.compare({**base, "old": 1}, base) == [
      "data.old: saved 1, now nothing"]


def test_fingerprint_sees_an_edit_of_one_byte(open_train, folder):
  base = open_train()
  name = base.documents.names[3]
  text = (folder / name).read_bytes()
  (folder / name).write_bytes(text[:-1] + b"X")
  differences = loader.compare(base.fingerprint,
                               open_train().fingerprint)
  assert any(d.startswith("data.files: saved") for d in differences)


def test_fingerprint_sees_the_tokenizer(open_train, train_bpe):
  bpe = tokenizer.load(train_bpe())
  differences = loader.compare(open_train().fingerprint,
                               open_train(ids=bpe).fingerprint)
  assert [d.split(":")[0] for d in differences] == ["data.tokenizer"]


SCRIPT = """
import hashlib, itertools, json, sys, types
from ultralong_jax.data import loader, tokenizer
config = types.SimpleNamespace(
    source="text", path=sys.argv[1], validation_fraction=0.2,
    validation_bytes=3000,
    validation_context=64)
data = loader.open_data(config, tokenizer.load("byte"), context=64, batch=4,
                        seed=0)
digest = hashlib.sha256()
for batch in itertools.islice(data.batches(position=3), 30):
  for name in sorted(batch):
    digest.update(batch[name].tobytes())
print(json.dumps([digest.hexdigest(), data.fingerprint], sort_keys=True))
"""


def test_processes_agree_whatever_their_hash_seed(folder):
  running = [
      subprocess.Popen(
          [sys.executable, "-c", SCRIPT, str(folder)], text=True,
          stdout=subprocess.PIPE,
          env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path),
               "PYTHONHASHSEED": seed})
      for seed in ("1", "2")]
  outputs = [process.communicate()[0] for process in running]
  assert outputs[0] == outputs[1] and "files" in outputs[0]
