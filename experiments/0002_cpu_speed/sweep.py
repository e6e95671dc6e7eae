"""Runs ours and the peer in turn, at the shapes of the question.

python -m experiments.0002_cpu_speed.sweep PEER_PYTHON

PEER_PYTHON is the interpreter of the environment that peer.py needs. Prints a
JSON line a run; nothing else may run on the machine.
"""
import pathlib
import subprocess
import sys

SHAPES = [(4, 512, 6), (2, 2_048, 4), (1, 8_192, 3)]  # steps of the peer
DTYPES = ("float32",)  # and "bfloat16" where the CPU has instructions for it
HERE = pathlib.Path(__file__).parent


def main(peer):
  for batch, context, steps in SHAPES:
    for dtype in DTYPES:
      subprocess.run([sys.executable, "-m", "experiments.0002_cpu_speed.ours",
                      str(batch), str(context), "--dtype", dtype], check=True)
    subprocess.run([peer, str(HERE / "peer.py"), str(batch), str(context),
                    str(steps)], check=True)
  subprocess.run([sys.executable, "-m", "experiments.0002_cpu_speed.ours",
                  "1", "32768", "--steps", "3"], check=True)


if __name__ == "__main__":
  main(sys.argv[1])
