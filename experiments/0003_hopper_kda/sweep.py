"""What was run, and how bench.py's rows become the rows of results.jsonl.

python -m experiments.0003_hopper_kda.sweep COMMIT DEVICE rows.jsonl ... \
    > experiments/0003_hopper_kda/results.jsonl
"""
import json
import pathlib
import sys

BENCH = "python -m experiments.0003_hopper_kda.bench --out rows.jsonl"

# In one call, one process after the other; FLA first, since its tuning takes a
# minute and more. The call before it ran FLA alone at the first shape.
RUNS = [f"{BENCH} --shapes 0,1,2 ceilings fla fla_packed accuracy",
        "python -m pallas_kernels.tune kda --shapes 1x8192x32x128x128",
        f"{BENCH} --shapes 0,1,2,3 ours packed decode conv"]

# Seconds of each section's whole run, as bench.py printed them.
SECONDS = {"fla": 128.9, "fla alone": 92.3, "ceilings": 1.9, "ours": 41.4,
           "decode": 12.6, "conv": 1.6}


def convert(row, commit, device):
  """Returns the report's row of one of bench.py's rows."""
  names = [row["section"]]
  if "name" in row:
    names.append(row["name"].removeprefix(f"{row['section']} "))
  names += [f"{axis}{row[axis]}" for axis in "BTH" if axis in row]
  if "documents" in row:
    names.append(f"{row['documents']} documents")
  skip = {"section", "name", "commit", "B", "T", "H", "K", "V", "documents"}
  return dict(name=" ".join(names), config={}, commit=commit, device=device,
              wall_seconds=SECONDS[row["section"]], seed=0,
              metrics={x: y for x, y in row.items() if x not in skip})


def main(commit, device, *paths):
  """Prints the converted rows of all files, failures left out."""
  for path in paths:
    for line in pathlib.Path(path).read_text().splitlines():
      row = json.loads(line)
      if "failed" not in row:
        print(json.dumps(convert(row, commit, device)))


if __name__ == "__main__":
  main(*sys.argv[1:])
