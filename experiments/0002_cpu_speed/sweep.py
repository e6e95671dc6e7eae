"""Runs ours and the peer in turn, at the shapes of the question.

python -m experiments.0002_cpu_speed.sweep PEER_PYTHON [--dtypes bfloat16]
    [--same]

PEER_PYTHON is the interpreter of the environment that peer.py needs. Prints a
JSON line a run; nothing else may run on the machine. With --same ours is the
very function of the peer: softplus gate, plain residual, its parameters.
"""
import argparse
import pathlib
import subprocess
import sys
import tempfile

SHAPES = [(4, 512, 6), (2, 2_048, 4), (1, 8_192, 3)]  # steps of the peer
HERE = pathlib.Path(__file__).parent


def main():
  parser = argparse.ArgumentParser()
  parser.add_argument("peer")
  parser.add_argument("--dtypes", nargs="+", default=["float32"], help="of our "
                      "matmuls; bfloat16 where the CPU has instructions for it")
  parser.add_argument("--same", action="store_true")
  args = parser.parse_args()
  peer = [args.peer, str(HERE / "peer.py")]
  ours, folder = [sys.executable, "-m", "experiments.0002_cpu_speed.ours"], []
  if args.same:
    folder = ["--checkpoint", tempfile.mkdtemp()]
    subprocess.run([*peer, "2", "256", "--save", folder[1]], check=True)
  for batch, context, steps in SHAPES:
    shape = [str(batch), str(context)]
    for dtype in args.dtypes:
      subprocess.run([*ours, *shape, *folder, "--dtype", dtype], check=True)
    subprocess.run([*peer, *shape, "--steps", str(steps)], check=True)
  if not args.same:
    subprocess.run([*ours, "1", "32768", "--steps", "3"], check=True)


if __name__ == "__main__":
  main()
