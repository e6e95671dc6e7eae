"""Runs a Triton kernel on numpy arrays through Triton's interpreter.

The interpreter wants torch tensors; `Tensor` is the part of their interface
that it touches, over numpy. bfloat16 matmuls do not work there: use float32.
"""
import os

import jax
import numpy as np


class Tensor:
  """A numpy array that looks like a contiguous CPU torch tensor."""

  def __init__(self, array):
    self.array = array
    self.dtype = array.dtype

  def data_ptr(self):
    return self.array.ctypes.data

  def untyped_storage(self):
    return self

  def cpu(self):
    return self

  def copy_(self, other):
    del other  # the same memory

  def new_empty(self, size, device):
    del size, device
    return Tensor(self.array)

  def set_(self, storage, offset, size, stride):
    del offset, size, stride
    self.array = storage.array

  def storage_offset(self):
    return 0

  def size(self):
    return self.array.shape

  def stride(self):
    return ()


def launch(kernel, arrays, outputs, grid, *, warps, stages=1, alias=None,
           **constants):
  """In place of triton.launch; outputs start as NaN, apart from all inputs."""
  del warps, stages, alias
  from triton.runtime.interpreter import InterpretedFunction
  if "ASSEMBLY" in constants:
    constants["ASSEMBLY"] = False

  def call(*arrays):
    arrays = [np.ascontiguousarray(x).copy() for x in arrays]
    made = [np.full(x.shape, np.nan, x.dtype) for x in outputs]
    assert isinstance(kernel, InterpretedFunction), "set TRITON_INTERPRET=1"
    with np.errstate(all="ignore"):
      kernel[grid](*map(Tensor, arrays + made), **constants)
    return tuple(made)

  return jax.pure_callback(call, tuple(outputs), *arrays)


def interpreting():
  return os.environ.get("TRITON_INTERPRET") == "1"
