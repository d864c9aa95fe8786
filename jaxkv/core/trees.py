# SPDX-License-Identifier: Apache-2.0
"""Helpers for the frozen dataclasses that go through `jit` as pytrees."""

from __future__ import annotations

import dataclasses
from typing import Any

from jax.core import Tracer


def static(**kwargs: Any) -> Any:
    """Declares a dataclass field that belongs to the tree structure, not to its leaves."""
    return dataclasses.field(metadata={"static": True}, **kwargs)


def is_known(x: Any) -> bool:
    """Says whether an array's values can be looked at: outside `jit`, `vmap` and `grad`."""
    return not isinstance(x, Tracer)
