"""Generated tasks: exact distances, one evidence, the same every time."""

import re

import numpy as np
import pytest

from configs import common
from ultralong_jax.data import haystack
from ultralong_jax.data import interleave
from ultralong_jax.data import loader
from ultralong_jax.data import sources
from ultralong_jax.data import synthetic
from ultralong_jax.data import tokenizer

BYTE = tokenizer.load("byte")
NAME = "[bcdfghjklmnpqrstvwxz]{5}"


def open_split(folder, split="train", ids=BYTE, context=512, seed=0,
               **leaves):
  c = common.get_config().data
  c.source, c.path = "synthetic", str(folder)
  c.validation_fraction, c.validation_bytes = 0.3, 8_000
  c.validation_context = 512
  c.synthetic.documents = 60
  c.update_from_flattened_dict(leaves)
  return loader.open_data(c, ids, split=split, context=context, batch=2,
                          seed=seed)


def solve(text):
  """Answers a document's question from the text before it, by task."""
  body, question = text.rstrip("\n").rsplit("\n", 1)
  rules = ((f"code of ({NAME}) is ", "needles"), (f"({NAME}) ", "pairs"),
           (f"print ({NAME}) gives ", "variables"),
           (f"rule ({NAME}) on (\\d+) gives ", "settings"),
           ("marks of documents 1 to (\\d+): ", "permuted"))
  found, task = next((match, task) for rule, task in rules
                     if (match := re.fullmatch(rule, question)))
  name = found[1]

  def one(pattern):
    """The only place where it stands."""
    (only,) = re.finditer(pattern, body)
    return only

  if task == "permuted":
    first = re.search(f"\ndocument \\d+, mark {NAME}\n", body)
    marks = [one(f"\ndocument {i + 1}, mark ({NAME})\n")[1]
             for i in range(int(name))]
    return task, " ".join(marks), first
  if task == "variables":
    while not name.isdigit():
      evidence = one(f"\nlet {name} = (\\w+)\n")
      name = evidence[1]
    return task, name, evidence
  if task == "settings":
    evidence = one(f"\nrule {name}: (\\w+) ({NAME})\n")
    digits = {"forward": found[2], "backward": found[2][::-1],
              "ascending": "".join(sorted(found[2])),
              "descending": "".join(sorted(found[2]))[::-1]}[evidence[1]]
    return task, f"{digits} {evidence[2]}", evidence
  code = "\ncode of {} is (\\d{{5}})\n" if task == "needles" else (
      "\n{} (\\d{{5}});")
  evidence = one(code.format(name))
  assert len(re.findall(name, body)) == len(re.findall(evidence[1], body)) == 1
  return task, evidence[1], evidence


@pytest.mark.parametrize("statements", [2, 5])
def test_an_answer_has_one_evidence_at_the_exact_distance(
    folder, ids, statements):
  documents = haystack.Haystack(sources.open_documents(str(folder)), ids)
  for task in synthetic.TASKS:
    for index, distance in enumerate((160, 200, 333)):
      tokens, (start, stop), (first, last) = synthetic.document(
          documents, haystack.Draw(task, index), task, length=720,
          distance=distance, statements=statements)
      assert (tokens[0], tokens[-1]) == (ids.bos, ids.eos)
      assert len(tokens) == 721 and stop == 720
      answer = ids.decode_bytes(tokens[start:stop]).decode()
      prompt = ids.decode(tokens[:start])
      found_task, found, evidence = solve(prompt)
      assert (found_task, found) == (task, answer)
      assert ids.decode(tokens[first:last]) == evidence[0]
      question = len(ids.encode("\n" + prompt.rsplit("\n", 1)[1]))
      assert start - question - last == distance


def test_statements_and_questions_fit_into_their_room():
  for task, make in synthetic.MAKERS.items():
    for index, statements in ((i, n) for i in range(20) for n in (1, 4, 40)):
      draw = haystack.Draw(task, index)
      work = make(draw, haystack.Fresh(draw, b""), statements)
      assert len(work.statements) == statements > work.asked
      sizes = list(map(len, work.statements))
      assert max(sizes) <= synthetic.STATEMENT
      assert 2 + sum(sizes) + len(work.question + work.answer) <= (
          synthetic.room(statements))


def test_a_document_depends_on_seed_and_index_alone(folder, goes_on):
  data, again = open_split(folder), open_split(folder)
  goes_on(data, again)
  for i in (17, 3):
    np.testing.assert_array_equal(data._encoded._make(i)[0],
                                  again._encoded._make(i)[0])
  other = open_split(folder, seed=1)
  assert any(np.any(other._encoded._make(i)[0][:99]
                    != data._encoded._make(i)[0][:99]) for i in range(4))
  assert other.fingerprint != data.fingerprint
  changed = open_split(folder, **{"synthetic.weights.pairs": 3.0})
  assert loader.compare(data.fingerprint, changed.fingerprint)


def test_choices_stay_what_they_were():
  draw = haystack.Draw("a", 1)
  # A checkpoint's rows come back only if these do.
  assert (draw.below(1000), draw.between(3, 4), draw.word(), draw.number(),
          draw.weighted([0, 1, 0]), draw.shuffled("abcd")) == (
              971, 3, "xvbwk", "33538", 1, list("adcb"))


def test_rows_hold_whole_documents_with_marked_and_weighed_answers(folder):
  data = open_split(folder, context=1024, **{
      "synthetic.weights.text": 0.25, "synthetic.weights.settings": 4.0})
  tasks, seen, several = len(interleave.TASKS), set(), 0
  for index in range(data.rows_per_epoch):
    row = data.row(index)
    segments = row["segment_ids"]
    several += segments.max() > 1
    for segment in range(1, segments.max() + 1):
      own = segments == segment
      tokens, targets = row["tokens"][own], row["targets"][own]
      assert tokens[0] == BYTE.bos and targets[-1] == BYTE.eos
      np.testing.assert_array_equal(row["positions"][own],
                                    np.arange(own.sum()))
      marks, weights = row["answers"][own], row["weights"][own]
      (mark,) = set(marks.tolist()) - {0}
      at = np.flatnonzero(marks)
      task, answer, _ = solve(BYTE.decode(tokens[:at[0] + 1]))
      assert BYTE.decode(targets[at]) == answer
      assert interleave.TASKS[(mark - 1) % tasks] == task
      assert (mark - 1) // tasks == segment - 1
      np.testing.assert_array_equal(
          weights, np.where(marks > 0, 4 if task == "settings" else 1, 0.25))
      seen.add(task)
    assert not row["weights"][segments == 0].any()
  assert seen == set(synthetic.TASKS) and several


def test_shares_decide_how_many_documents_a_task_has(folder):
  shares = {f"synthetic.shares.{task}": 0.0 for task in synthetic.TASKS}
  data = open_split(folder, **{**shares, "synthetic.shares.pairs": 1.0,
                               "synthetic.shares.needles": 3.0})
  counts = [data._encoded._make(i)[2] for i in range(60)]
  assert set(counts) == {"pairs", "needles"}
  assert 35 <= counts.count("needles") <= 55


def test_train_and_validation_share_neither_text_nor_names(tmp_path):
  for i in range(30):
    (tmp_path / f"{i}.txt").write_text(f"<{i:02}>" * 300)
  found = []
  for split in ("train", "validation"):
    data = open_split(tmp_path, split, **{"synthetic.weights.text": 0.5})
    texts = [BYTE.decode(data._encoded._make(i)[0])
             for i in range(len(data._encoded.lengths))]
    text = "".join(texts)
    found.append((set(re.findall(r"<(\d\d)>", text)),
                  set(re.findall(NAME, text))))
    weights = {float(x) for x in np.unique(data.row(0)["weights"])} - {0.}
    # What is measured does not depend on what training weighs.
    assert weights == ({0.5, 1.} if split == "train" else {1.})
  assert 0 < sum(map(len, texts)) <= 8_000
  for train, validation in zip(*found):
    assert train and validation and not train & validation


def test_a_folder_without_text_is_no_haystack(folder):
  documents = sources.open_documents(str(folder)).select([])
  with pytest.raises(ValueError, match="a haystack needs text"):
    haystack.Haystack(documents, BYTE)
