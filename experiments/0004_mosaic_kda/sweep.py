"""What was run, and how bench.py's rows become the rows of results.jsonl.

python -m experiments.0004_mosaic_kda.sweep DEVICE rows.jsonl ... \
    > experiments/0004_mosaic_kda/results.jsonl
"""
import json
import pathlib
import sys

BENCH = "python -m experiments.0004_mosaic_kda.bench --out rows.jsonl"

# One call of the device machine a line; commits are in the rows. The Triton
# kernels were a checkout of 18e7699 beside each.
RUNS = [
    f"{BENCH} --commit 06c3149 stages mosaic; {BENCH} --cases 1:3 check",
    f"{BENCH} --commit 2d82a9a stages mosaic triton_stages triton",
    f"{BENCH} --commit 395c552 stages mosaic; {BENCH} --cases 0:2 check",
    f"{BENCH} --commit 171d3b1 stages mosaic triton_stages triton check; "
    f"{BENCH} --shapes 1,2,3 mosaic golden"]


VERSIONS = {"06c3149": "five sums", "2d82a9a": "one block resident",
            "395c552": "two blocks resident", "171d3b1": "blocks that stay",
            "18e7699": "triton"}


def convert(row, device):
  """Returns the report's row of one of bench.py's rows."""
  names = [VERSIONS[row["commit"]] + ":",
           row.get("kernel", row.get("name", "forward"))]
  names += [f"{axis}{row[axis]}" for axis in "BTH" if axis in row]
  skip = {"section", "kernel", "name", "commit", "B", "T", "H", "ok", "same"}
  metrics = {x: y for x, y in row.items() if x not in skip}
  if row["section"] in ("check", "golden"):
    metrics = {f"relative error of {x}": y for x, y in metrics.items()}
  return dict(name=" ".join(names), config={}, commit=row["commit"],
              device=device, wall_seconds=None, seed=0, metrics=metrics)


def main(device, *paths):
  """Prints the converted rows of all files, failures left out."""
  for path in paths:
    for line in pathlib.Path(path).read_text().splitlines():
      row = json.loads(line)
      if "failed" not in row:
        print(json.dumps(convert(row, device)))


if __name__ == "__main__":
  main(*sys.argv[1:])
