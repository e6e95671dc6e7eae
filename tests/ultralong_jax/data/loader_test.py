"""The stream of batches: a function of seed and position, exact to the byte."""

import itertools
import json
import os
import subprocess
import sys
import threading
import time
import types

import numpy as np
import pytest

from ultralong_jax.data import loader
from ultralong_jax.data import tokenizer

BYTE = tokenizer.load("byte")


def leaves(path, **changes):
  return types.SimpleNamespace(**{
      "path": str(path), "validation_fraction": 0.2, "validation_bytes": 1000,
      "validation_context": 64, **changes})


@pytest.fixture
def folder(tmp_path):
  """Forty documents of 1 to 2000 bytes, some with wide characters."""
  rng = np.random.default_rng(0)
  alphabet = list("abcdefg \né🙂日")
  for i in range(40):
    size = int(1 + 700 * rng.random()**3)
    text = "".join(rng.choice(alphabet, size))
    (tmp_path / f"{i:02}.txt").write_text(text, encoding="utf-8")
  (tmp_path / "bad").write_bytes(b"\xff\xfe\x00")
  return tmp_path


def open_train(folder, context=64, batch=4, seed=0, ids=BYTE):
  return loader.open_data(leaves(folder), ids, context=context, batch=batch,
                          seed=seed)


def take(data, count, **where):
  batches = data.batches(**where)
  result = list(itertools.islice(batches, count))
  batches.close()
  return result


def joined(batches):
  """Returns the rows of consecutive batches as one dict of arrays."""
  return {name: np.concatenate([b[name] for b in batches])
          for name in batches[0]}


def assert_same(a, b):
  assert a.keys() == b.keys()
  for name in a:
    assert a[name].dtype == b[name].dtype
    np.testing.assert_array_equal(a[name], b[name])


def pieces(rows):
  """Yields (tokens, targets) of every document piece in some rows."""
  for tokens, targets, segments in zip(rows["tokens"], rows["targets"],
                                       rows["segment_ids"]):
    for segment in range(1, segments.max() + 1):
      yield tokens[segments == segment], targets[segments == segment]


@pytest.fixture(params=["byte", "bpe"])
def ids(request):
  if request.param == "byte":
    return BYTE
  return tokenizer.load(request.getfixturevalue("train_bpe")())


def test_batch_is_what_the_model_reads(folder):
  batch, = take(open_train(folder), 1)
  for name in ("tokens", "targets", "segment_ids", "positions"):
    assert batch[name].shape == (4, 64) and batch[name].dtype == np.int32
  assert batch["weights"].dtype == np.float32


def test_an_epoch_holds_every_byte_of_every_document_once(folder, ids):
  data = open_train(folder, ids=ids)
  steps = -(-data.rows_per_epoch // 4)
  rows = {name: x[:data.rows_per_epoch]
          for name, x in joined(take(data, steps)).items()}
  for tokens, targets in pieces(rows):
    assert np.array_equal(tokens[1:], targets[:-1])
  texts = sorted(b"".join(ids.decode_bytes(targets)
                          for _, targets in chain)
                 for chain in chains(rows, data))
  expected = sorted(data.documents.read(i)
                    for i in range(len(data.documents)))
  assert texts == expected
  assert (rows["targets"] == ids.eos).sum() == len(expected)
  assert (rows["tokens"] == ids.bos).sum() == len(expected)
  assert data.targets_per_epoch == rows["weights"].sum()
  weighed = rows["targets"][rows["weights"] > 0]
  assert ids.byte_lengths[weighed].sum() == data.bytes


def chains(rows, data):
  """Returns the pieces of each document, by the plan that made them."""
  plan, order = data._plan, data._order(0)
  found = {}
  for place, row in enumerate(order):
    one = {name: x[place:place + 1] for name, x in rows.items()}
    for piece, content in zip(range(plan.first[row], plan.first[row + 1]),
                              pieces(one)):
      found.setdefault(int(plan.document[piece]), []).append(
          (int(plan.start[piece]), content))
  return [[content for _, content in sorted(parts, key=lambda p: p[0])]
          for parts in found.values()]


def test_target_is_the_next_token_also_at_a_cut(folder, ids):
  data = open_train(folder, context=16, ids=ids)
  rows = joined(take(data, -(-data.rows_per_epoch // 4)))
  cuts = 0
  for chain in chains({n: x[:data.rows_per_epoch] for n, x in rows.items()},
                      data):
    for (_, targets), (tokens, _) in itertools.pairwise(chain):
      assert targets[-1] == tokens[0]
      cuts += 1
    assert chain[0][0][0] == ids.bos and chain[-1][1][-1] == ids.eos
  assert cuts > 10


def test_segments_positions_and_weights(folder):
  rows = joined(take(open_train(folder, context=700), 10))
  several = 0
  for row in range(len(rows["tokens"])):
    segments = rows["segment_ids"][row]
    real = segments > 0
    assert np.array_equal(rows["weights"][row], real.astype(np.float32))
    count = int(real.sum())
    assert real[:count].all()  # padding only at the end
    assert np.all(rows["tokens"][row][~real] == BYTE.pad)
    assert np.all(rows["targets"][row][~real] == BYTE.pad)
    assert np.all(rows["positions"][row][~real] == 0)
    assert np.all(np.isin(np.diff(segments[:count]), (0, 1)))
    assert segments[0] == 1
    starts = np.flatnonzero(np.diff(segments[:count], prepend=0))
    for start, stop in itertools.pairwise([*starts, count]):
      assert np.array_equal(rows["positions"][row][start:stop],
                            np.arange(stop - start))
    several += segments.max() > 1
  assert several


def test_restart_anywhere_equals_the_continuous_stream(folder):
  data = open_train(folder)
  rows = joined(take(data, 60))
  assert data.rows_per_epoch < 200  # The stream crosses borders of epochs.
  for position in (0, 1, 4, 37, data.rows_per_epoch - 1, data.rows_per_epoch,
                   data.rows_per_epoch + 2):
    again = joined(take(open_train(folder), 3, position=position))
    assert_same(again, {name: x[position:position + 12]
                        for name, x in rows.items()})


def test_rows_do_not_depend_on_the_batch(folder):
  rows = joined(take(open_train(folder, batch=4), 6))
  assert_same(rows, joined(take(open_train(folder, batch=8), 3)))


def test_a_far_position_costs_no_history(folder):
  data = open_train(folder)
  began = time.process_time()
  far, = take(data, 1, position=10**15)
  assert time.process_time() - began < 1
  epoch, place = divmod(10**15, data.rows_per_epoch)
  assert 0 <= place < data.rows_per_epoch and epoch > 10**12
  assert far["weights"].any()


def test_epochs_have_the_same_rows_in_another_order(folder):
  data = open_train(folder, batch=1)
  n = data.rows_per_epoch
  rows = joined(take(data, 2 * n))["tokens"]
  first, second = rows[:n].tolist(), rows[n:].tolist()
  assert first != second and sorted(first) == sorted(second)


def test_seed_changes_the_order(folder):
  a, b = (take(open_train(folder, seed=seed), 1)[0] for seed in (0, 1))
  assert not np.array_equal(a["tokens"], b["tokens"])


@pytest.mark.parametrize("count", [1, 2, 4])
def test_slices_of_processes_make_the_global_batch(folder, count):
  data = open_train(folder)
  where = {"position": 11, "skipped": [[13, 20]]}
  whole = take(data, 5, **where)
  slices = [take(data, 5, process_index=i, process_count=count, **where)
            for i in range(count)]
  for step in range(5):
    assert_same(whole[step], joined([s[step] for s in slices]))


def test_rows_that_do_not_divide_are_refused(folder):
  with pytest.raises(ValueError, match="batch=4.*process_count=3"):
    open_train(folder).batches(process_count=3)


@pytest.mark.parametrize("skipped", [
    [[5, 9]], [[0, 4]], [[5, 9], [2, 3]], [[5, 8], [7, 30]], [[3, 3]],
    [[5, 7], [7, 9]], [(100, 10_000)]])
def test_skipped_ranges_are_passed_over(folder, skipped):
  data = open_train(folder)
  rows = joined(take(data, 20))
  left = [i for i in range(80) if not any(a <= i < b for a, b in skipped)]
  for position in (0, 2, 7, 12):
    got = joined(take(data, 2, position=position, skipped=skipped))
    taken = left[position:position + 8]
    assert_same(got, {name: x[taken] for name, x in rows.items()})


def test_skipping_what_lies_ahead_does_not_move_what_lies_behind(folder):
  # A range that is added in the middle of a run keeps positions valid.
  before = joined(take(open_train(folder), 10))
  after = joined(take(open_train(folder), 10, skipped=[[20, 28]]))
  assert_same({n: x[:20] for n, x in before.items()},
              {n: x[:20] for n, x in after.items()})
  assert_same({n: x[28:40] for n, x in before.items()},
              {n: x[20:32] for n, x in after.items()})


def test_impossible_ranges_are_refused(folder):
  for wrong in ([[3, 1]], [[-1, 2]]):
    with pytest.raises(ValueError, match="not a range"):
      open_train(folder).batches(skipped=wrong)
  with pytest.raises(ValueError, match="position=-1"):
    open_train(folder).batches(position=-1)


def open_validation(folder, ids=BYTE, batch=4, context=64, seed=0, **changes):
  return loader.open_data(leaves(folder, **changes), ids, context=context,
                          batch=batch, seed=seed, split="validation")


def test_validation_is_finite_fixed_and_of_its_own_size(folder, ids):
  data = open_validation(folder, ids)
  batches = list(data.batches())
  rows = joined(batches)
  assert len(batches) == -(-data.rows_per_epoch // 4)
  assert rows["tokens"].shape == (4 * len(batches), 64)
  assert 1000 - 3 <= data.bytes <= 1000
  targets = rows["targets"][rows["weights"] > 0]
  assert ids.byte_lengths[targets].sum() == data.bytes
  assert rows["weights"].sum() == data.targets_per_epoch
  # Neither the training's context nor its seed nor its batch matter.
  other = open_validation(folder, ids, batch=1, context=999, seed=5)
  assert_same({n: x[:data.rows_per_epoch] for n, x in rows.items()},
              joined(list(other.batches())))


def test_validation_last_batch_is_filled_with_padding(folder):
  data = open_validation(folder, batch=7)
  assert data.rows_per_epoch % 7
  last = list(data.batches())[-1]
  filled = data.rows_per_epoch % 7
  assert last["weights"][:filled].any(axis=1).all()
  assert not last["weights"][filled:].any()
  assert not last["segment_ids"][filled:].any()
  parts = [list(data.batches(process_index=i, process_count=7))[-1]
           for i in range(7)]
  assert_same(last, joined(parts))


def test_train_and_validation_share_no_document(folder):
  train, validation = open_train(folder), open_validation(folder)
  contents = [{d.read(i) for i in range(len(d))}
              for d in (train.documents, validation.documents)]
  assert contents[0] and contents[1] and not contents[0] & contents[1]


def test_a_cut_document_has_no_end(folder):
  data = open_validation(folder)
  rows = joined(list(data.batches()))
  whole = data.documents.whole
  assert not whole.all()
  assert (rows["targets"] == BYTE.eos).sum() == whole.sum()
  assert (rows["tokens"] == BYTE.bos).sum() == len(whole)


def test_says_why_there_is_nothing_to_validate_on(folder):
  for change in ({"validation_fraction": 0}, {"validation_bytes": 0}):
    with pytest.raises(ValueError, match="nothing to validate on"):
      open_validation(folder, **change)
  with pytest.raises(ValueError, match="split='test'"):
    loader.open_data(leaves(folder), BYTE, context=8, batch=1, seed=0,
                     split="test")


def test_fingerprint_names_what_differs(folder):
  base = open_train(folder).fingerprint
  again = json.loads(json.dumps(open_train(folder).fingerprint))
  assert loader.compare(again, base) == []
  for change, name in [({"seed": 1}, "seed"), ({"batch": 2}, "batch"),
                       ({"context": 32}, "context")]:
    now = open_train(folder, **change).fingerprint
    value = change[name]
    assert loader.compare(base, now) == [
        f"data.{name}: saved {base[name]}, now {value}"]
  assert loader.compare(base, {**base, "new": 1}) == [
      "data.new: saved nothing, now 1"]
  assert loader.compare({**base, "old": 1}, base) == [
      "data.old: saved 1, now nothing"]


def test_fingerprint_sees_an_edit_of_one_byte(folder):
  base = open_train(folder)
  name = base.documents.names[3]
  text = (folder / name).read_bytes()
  (folder / name).write_bytes(text[:-1] + b"X")
  differences = loader.compare(base.fingerprint,
                               open_train(folder).fingerprint)
  assert any(d.startswith("data.files: saved") for d in differences)


def test_fingerprint_sees_the_tokenizer(folder, train_bpe):
  bpe = tokenizer.load(train_bpe())
  differences = loader.compare(open_train(folder).fingerprint,
                               open_train(folder, ids=bpe).fingerprint)
  assert [d.split(":")[0] for d in differences] == ["data.tokenizer"]


def test_a_tokenizer_that_loses_bytes_is_refused(folder, train_bpe):
  tokenizers = pytest.importorskip("tokenizers")
  path = train_bpe(normalizer=tokenizers.normalizers.Replace("a", "b"))
  with pytest.raises(ValueError, match="must not normalise"):
    open_train(folder, ids=tokenizer.load(path))


def test_long_texts_are_encoded_in_parts(folder, train_bpe, monkeypatch):
  bpe = tokenizer.load(train_bpe())
  monkeypatch.setattr(loader.encoded, "PART_BYTES", 10)
  data = open_train(folder, ids=bpe)
  rows = joined(take(data, -(-data.rows_per_epoch // 4)))
  targets = rows["targets"][:data.rows_per_epoch]
  assert bpe.byte_lengths[targets].sum() == data.bytes


def test_the_thread_ends_with_the_iterator(folder):
  def running():
    return [t for t in threading.enumerate() if "grain" in t.name]

  before = len(running())
  batches = open_train(folder).batches()
  next(batches)
  assert len(running()) == before + 1
  batches.close()
  deadline = time.monotonic() + 5
  while len(running()) > before and time.monotonic() < deadline:
    time.sleep(0.01)
  assert len(running()) == before


SCRIPT = """
import hashlib, itertools, json, sys, types
from ultralong_jax.data import loader, tokenizer
config = types.SimpleNamespace(
    path=sys.argv[1], validation_fraction=0.2, validation_bytes=3000,
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


@pytest.mark.parametrize("context", [512, 2048])
def test_library_rows_are_full_and_fast(context):
  data = loader.open_data(
      leaves("", validation_fraction=0.05), BYTE, context=context, batch=8,
      seed=0)
  assert data.fill > 0.95
  batches = data.batches()
  next(batches)
  began = time.process_time()  # of all threads together
  for _ in range(50):
    next(batches)
  spent = time.process_time() - began
  batches.close()
  assert 50 * 8 * context / spent > 200_000
