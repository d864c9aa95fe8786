# SPDX-License-Identifier: Apache-2.0
"""Helpers for the frozen dataclasses that go through `jit` as pytrees."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from jax.core import Tracer


def static(**kwargs: Any) -> Any:
    """Declares a dataclass field that belongs to the tree structure, not to its leaves."""
    return dataclasses.field(metadata={"static": True}, **kwargs)


def check_arrays(**arrays: Any) -> None:
    """Checks that arguments are arrays, or `None` where one was left out.

    Raises:
      ValueError: Naming the argument that is something else.

    >>> check_arrays(lengths=[3, 5])
    Traceback (most recent call last):
    ValueError: lengths is a list: want an array, such as jnp.asarray(lengths).
    """
    for name, x in arrays.items():
        if x is not None and not (hasattr(x, "shape") and hasattr(x, "dtype")):
            raise ValueError(
                f"{name} is a {type(x).__name__}: want an array, such as jnp.asarray({name})."
            )


def check_sizes(**sizes: Any) -> None:
    """Checks that sizes are whole numbers of at least 1, or `None` where one was left out.

    Raises:
      ValueError: Naming the size that is something else.

    >>> check_sizes(num_heads=2, head_dim=0.5)
    Traceback (most recent call last):
    ValueError: head_dim=0.5: want an int of at least 1.
    """
    for name, size in sizes.items():
        whole = isinstance(size, (int, np.integer)) and not isinstance(size, bool)
        if size is not None and not (whole and size >= 1):
            raise ValueError(f"{name}={size!r}: want an int of at least 1.")


def check_constants(**numbers: Any) -> None:
    """Checks that numbers are known when a program is traced, or `None` where one was left out.

    Raises:
      ValueError: Naming the one that is traced, or no number.
    """
    for name, x in numbers.items():
        if not is_known(x):
            raise ValueError(f"{name} is traced: it is a constant of the program, so pass a float.")
        if x is not None and np.ndim(x):
            raise ValueError(f"{name} has shape {np.shape(x)}: want a number.")


def is_known(x: Any) -> bool:
    """Says whether an array's values can be looked at: outside `jit`, `vmap` and `grad`."""
    return not isinstance(x, Tracer)
