"""What was run, and how bench.py's rows become the rows of results.jsonl.

python -m experiments.0003_hopper_kda.sweep COMMIT DEVICE rows.jsonl ... \
    > experiments/0003_hopper_kda/results.jsonl
"""
import json
import pathlib
import sys

BENCH = "python -m experiments.0003_hopper_kda.bench --out rows.jsonl"

# Sections of bench.py by call; FLA needs minutes of its own for its tuning.
RUNS = [f"{BENCH} stages", f"{BENCH} ceilings ours xla",
        f"{BENCH} --shapes 1,2 ours", f"{BENCH} cudnn ours",
        f"{BENCH} check golden"]


# Seconds of each section's whole run, as bench.py printed them; the processes
# of check and golden were given 70.
SECONDS = {"stages": 25.3, "ceilings": 1.2, "ours": 13.4, "xla": 17.5,
           "cudnn": 14.0, "check": 70.0, "golden": 70.0}


def convert(row, commit, device):
  """Returns the report's row of one of bench.py's rows."""
  names = [row["section"]]
  if row["section"] in ("stages", "check", "golden"):
    names = [row.get("kernel", row.get("name"))]
  names += [f"{axis}{row[axis]}" for axis in "BTH" if axis in row]
  names += [f"{x} {row[x]}" for x in (
      "tile", "value_block", "pass_stages", "dtype") if x in row]
  skip = {"section", "kernel", "name", "commit", "B", "T", "H", "K", "V",
          "tile", "value_block", "pass_warps", "pass_stages", "dtype", "ok"}
  metrics = {x: y for x, y in row.items() if x not in skip}
  if row["section"] in ("check", "golden"):
    metrics = {"worst relative error": max(metrics.values())}
  return dict(name=" ".join(names), config={}, commit=commit, device=device,
              wall_seconds=SECONDS[row["section"]], seed=0, metrics=metrics)


def main(commit, device, *paths):
  """Prints the converted rows of all files, failures left out."""
  for path in paths:
    for line in pathlib.Path(path).read_text().splitlines():
      row = json.loads(line)
      if "failed" not in row:
        print(json.dumps(convert(row, commit, device)))


if __name__ == "__main__":
  main(*sys.argv[1:])
