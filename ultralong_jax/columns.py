"""Rows of words as text in columns."""


def align(rows, right=()) -> str:
  """Returns a line a row, with the columns two spaces apart.

  Args:
    rows: of strings, all of the same number.
    right: numbers of the columns that end alike, as figures do.
  """
  widths = [max(map(len, column)) for column in zip(*rows)]
  return "\n".join("  ".join(
      text.rjust(width) if i in right else text.ljust(width)
      for i, (text, width) in enumerate(zip(row, widths))).rstrip()
      for row in rows)
