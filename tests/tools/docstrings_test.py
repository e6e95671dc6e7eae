"""Every file, and every public name in it, says what it is."""

import ast
import pathlib

import pytest

ROOT = pathlib.Path(__file__).parents[2]
FILES = sorted(path.relative_to(ROOT)
               for package in ("ultralong_jax", "pallas_kernels", "configs")
               for path in (ROOT / package).rglob("*.py"))


def silent(source):
  """Returns what has no docstring: "file", public functions and classes."""
  tree = ast.parse(source)
  found = [] if ast.get_docstring(tree) else ["file"]
  for node in tree.body:
    if (isinstance(node, (ast.ClassDef, ast.FunctionDef))
        and not node.name.startswith("_") and not ast.get_docstring(node)
        and len(node.body) > 1):  # a single statement speaks for itself
      found.append(node.name)
  return found


# Nothing imports main; an __init__ only gathers names.
@pytest.mark.parametrize("path", [
    path for path in FILES if path.name not in ("main.py", "__init__.py")],
    ids=str)
def test_says_what_it_is(path):
  assert not silent((ROOT / path).read_text())


def test_finds_what_is_silent():
  source = '''
def loud():
  """Speaks."""
  return 1

def quiet(x):
  x += 1
  return x

def _private(x):
  x += 1
  return x

def short(x):
  return x

class Thing:
  a: int
  b: int
'''
  assert silent(source) == ["file", "quiet", "Thing"]
