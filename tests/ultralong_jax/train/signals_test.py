import os
import signal
import subprocess
import sys
import time

import pytest

from ultralong_jax.train import signals


@pytest.mark.parametrize("signum, code", [(signal.SIGINT, 130),
                                          (signal.SIGTERM, 143)])
def test_signal_sets_the_flag_and_the_exit_code(signum, code, capfd):
  before = signal.getsignal(signum)
  with signals.listen() as stop:
    assert not stop()
    os.kill(os.getpid(), signum)
    assert stop() and stop.exit_code == code
  assert signal.getsignal(signum) is before
  assert "saves after this step" in capfd.readouterr().err


def test_second_signal_leaves_at_once():
  program = (
      "import time\n"
      "from ultralong_jax.train import signals\n"
      "with signals.listen():\n"
      "  print('ready', flush=True)\n"
      "  while True: time.sleep(0.01)\n")
  process = subprocess.Popen([sys.executable, "-c", program],
                             stdout=subprocess.PIPE, stderr=subprocess.PIPE)
  assert process.stdout.readline() == b"ready\n"
  process.send_signal(signal.SIGTERM)
  time.sleep(0.2)
  assert process.poll() is None
  process.send_signal(signal.SIGINT)
  _, err = process.communicate(timeout=10)
  assert process.returncode == 130
  assert b"second signal" in err
