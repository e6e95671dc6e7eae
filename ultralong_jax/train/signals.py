"""Ctrl-C and SIGTERM: one flag that loops poll, then save and leave.

A Python handler runs between bytecodes: a signal that comes during a compile
is seen when the compile ends.
"""
import contextlib
import os
import signal
import sys

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stop:
  """Whether somebody asked to stop; `stop()` is what loops poll.

  Attributes:
    signum: the signal that came first, or 0.
  """

  def __init__(self):
    self.signum = 0

  def __call__(self) -> bool:
    return self.signum != 0

  @property
  def exit_code(self) -> int:
    """130 for Ctrl-C, 143 for SIGTERM, as shells and schedulers expect."""
    return 128 + self.signum

  def _handle(self, signum, frame):
    del frame
    if self.signum:
      # The first one is being obeyed and somebody lost patience. os._exit,
      # since a clean exit would wait for the threads of a save.
      os.write(sys.__stderr__.fileno(), b"\nsecond signal: left unsaved\n")
      os._exit(128 + signum)
    self.signum = signum
    name = signal.Signals(signum).name
    os.write(sys.__stderr__.fileno(),
             f"\n{name}: saves after this step, then leaves (once more: "
             "leaves at once)\n".encode())


@contextlib.contextmanager
def listen():
  """Yields a Stop that hears both signals until the block ends."""
  stop = Stop()
  previous = {s: signal.signal(s, stop._handle) for s in SIGNALS}
  try:
    yield stop
  finally:
    for signum, handler in previous.items():
      signal.signal(signum, handler)
