"""A name's capital suffix is its einsum subscript; letters are AXES."""

import ast
import pathlib
import re

import pytest

from ultralong_jax import notation

ROOT = pathlib.Path(__file__).parents[2]
FILES = sorted(path.relative_to(ROOT)
               for package in ("ultralong_jax", "pallas_kernels")
               for path in (ROOT / package).rglob("*.py"))
SUFFIX = re.compile(r"^[a-z]\w*_([A-Z]+)$")
# The second letter names the same axis, seen from the key side.
PAIRS = ("TS", "CJ")


def suffix(node):
  """Returns the capital suffix of what an expression is called, or None."""
  name = None
  if isinstance(node, ast.Name):
    name = node.id
  elif isinstance(node, ast.Attribute):
    name = node.attr
  elif isinstance(node, ast.Constant):
    name = node.value if isinstance(node.value, str) else None
  elif isinstance(node, ast.Subscript):  # params["w_unembed_DW"]
    return suffix(node.slice) if isinstance(node.slice, ast.Constant) else None
  elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
    if node.func.attr == "astype":  # keeps the axes
      return suffix(node.func.value)
  if name is None and isinstance(node, ast.Call) and node.args:
    # self.param("w_q_DHK", ...) and helpers that take the name first.
    name_first = isinstance(node.args[0], ast.Constant)
    return suffix(node.args[0]) if name_first else None
  match = SUFFIX.match(name or "")
  return match and match[1]


def same_axes(name, subscript):
  """Are these the same axes in the same order?"""
  if subscript.startswith("..."):  # leading axes are anybody's
    subscript = subscript[3:]
    name = name[len(name) - len(subscript):]
  for query, key in PAIRS:
    # Where both letters occur they are two axes, and swapping them transposes.
    if not any({query, key} <= set(x) for x in (name, subscript)):
      name = name.replace(key, query)
      subscript = subscript.replace(key, query)
  return name == subscript


def is_einsum(node):
  if not isinstance(node, ast.Call):
    return False
  name = getattr(node.func, "attr", getattr(node.func, "id", None))
  return name == "einsum"


def assigned(tree):
  """Yields (einsum call, name) where an einsum's value is given a name."""
  for node in ast.walk(tree):
    if isinstance(node, ast.Assign):
      target = node.targets[0]
    elif isinstance(node, (ast.AugAssign, ast.AnnAssign)):
      target = node.target
    elif isinstance(node, ast.keyword) and node.arg:
      target = ast.Constant(node.arg)
    else:
      continue
    value = node.value
    while not is_einsum(value):  # -einsum(...) and einsum(...).astype(...)
      if isinstance(value, ast.UnaryOp):
        value = value.operand
      elif getattr(getattr(value, "func", None), "attr", None) == "astype":
        value = value.func.value
      else:
        break
    if is_einsum(value):
      yield value, target


def problems(source):
  """Returns what is wrong with the einsums and suffixes of a source text."""
  tree, found = ast.parse(source), []
  targets = {id(call): target for call, target in assigned(tree)}
  for node in ast.walk(tree):
    name = getattr(node, "id", getattr(node, "arg", None))
    if isinstance(node, (ast.Name, ast.arg)) and SUFFIX.match(name):
      unknown = set(SUFFIX.match(name)[1]) - set(notation.AXES)
      if unknown:
        found.append(f"line {node.lineno}: {name}: {sorted(unknown)} not in "
                     "notation.AXES")
    if not is_einsum(node):
      continue
    equation = node.args[0]
    if not isinstance(equation, ast.Constant) or "->" not in equation.value:
      found.append(f"line {node.lineno}: equation is not a literal with ->")
      continue
    terms, result = equation.value.replace(" ", "").split("->")
    unknown = set(terms + result) - set(notation.AXES) - set(",.")
    if unknown:
      found.append(f"line {node.lineno}: {equation.value}: {sorted(unknown)} "
                   "not in notation.AXES")
    named = list(zip(node.args[1:], terms.split(",")))
    if id(node) in targets:
      named.append((targets[id(node)], result))
    for expression, subscript in named:
      name = suffix(expression)
      if name is not None and not same_axes(name, subscript):
        found.append(f"line {node.lineno}: {ast.unparse(expression)} stands "
                     f"for {subscript} in {equation.value}")
  return found


@pytest.mark.parametrize("path", FILES, ids=str)
def test_suffix_is_subscript(path):
  assert not problems((ROOT / path).read_text())


@pytest.mark.parametrize("source", [
    'a_BHCJ = jnp.einsum("BHCK,BHJK->BHCJ", q_BHCK, k_BHJK)',
    'a_BHCJ = jnp.einsum("BHCK,BHJK->BHCJ", q_BHCK, k_BHCK)',
    'a_BTS = einsum("BTK,BSK->BTS", q_BTK, k_BTK.astype(f), precision=p)',
    'y_BTD = jnp.einsum("BTV,VD->BTD", x, self.param("w_VD", init))',
    'y_BTW = jnp.einsum("BTD,DW->BTW", x_BTD, params["w_unembed_DW"])',
    'o_BTV += jnp.einsum("...TS,...SV->...TV", a, b)',
    'f(o_BTV=-einsum("...TS,...SV->...TV", a_BTS, b).astype(d))',
    'y = jnp.einsum("BTD,DF->BTF", x, w)',
])
def test_accepts(source):
  assert not problems(source)


@pytest.mark.parametrize("source, word", [
    # Both letters of a pair are there: a transposed result.
    ('a_BHCJ = jnp.einsum("BHCK,BHJK->BHJC", q_BHCK, k_BHJK)', "BHJC"),
    ('a_BTS = jnp.einsum("BTK,BSK->BST", q_BTK, k_BSK)', "BST"),
    ('o_BCV = jnp.einsum("BJC,BJV->BCV", a_BCJ, v_BJV)', "BJC"),
    ('y_BTD = jnp.einsum("BTF,DF->BTD", x_BTF, w_FD)', "DF"),
    ('y_BTF = jnp.einsum("BTD,DF->BTF", x_BTH, w_DF)', "x_BTH"),
    ('y_BTF = jnp.einsum("BTD,DF->BTF", x, weight("w_FD", 1))', "w_FD"),
    ('y_BTF = jnp.einsum("BTD,DF->BTF", x, p["w_FD"])', "w_FD"),
    ('y_BTF = jnp.einsum("BTD,DF->BFT", x, w).astype(f)', "BFT"),
    ('y_BTF += jnp.einsum("BTD,DF->BFT", x, w)', "BFT"),
    ('f(y_BTF=-jnp.einsum("BTD,DF->BFT", x, w))', "BFT"),
    ('y_BTF = jnp.einsum("...D,DF->...F", x_BDT, w)', "x_BDT"),
    ('y = jnp.einsum("btd,df->btf", x, w)', "notation"),
    ('y = jnp.einsum("BTD,DO->BTO", x, w)', "notation"),
    ('y = jnp.einsum(equation, x, w)', "literal"),
    ('y = jnp.einsum("BTD,DF", x, w)', "literal"),
    ('x_BTO = x', "notation"),
    ('def f(x_BTO): pass', "notation"),
])
def test_refuses(source, word):
  assert any(word in problem for problem in problems(source))
