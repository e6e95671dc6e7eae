"""A call in a thread of its own, and how it went."""
import threading
from typing import Callable


class Call:
  """A call in a thread of its own; the interpreter waits for its end."""

  def __init__(self, call: Callable[[], None]):
    self._call = call
    self._error = None
    self._thread = threading.Thread(target=self._run, name="commit")
    self._thread.start()

  def _run(self):
    try:
      self._call()
    except BaseException as error:  # kept for whoever asks
      self._error = error

  def done(self) -> bool:
    """Has it ended? Waits for nothing."""
    return not self._thread.is_alive()

  def result(self):
    """Waits, and raises what the call raised."""
    self._thread.join()
    if self._error is not None:
      raise self._error
