# SPDX-License-Identifier: Apache-2.0
"""How far two ways to the same result may lie apart, and how they are compared."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

# Outputs of the suite's modules are of size 1, and every sum is float32. Two paths differ in the
# order of sums of some tens of terms (1e-6), and 16-bit ones round results besides (2 ** -8).
AGREEMENT = {"float32": 1e-5, "bfloat16": 2e-2, "float16": 2e-3}


def agreement(*dtypes: DTypeLike) -> float:
    """Finds the tolerance of a computation that goes through all these formats.

    >>> agreement(jnp.float32, jnp.bfloat16)
    0.02
    """
    return max(AGREEMENT[jnp.dtype(dtype).name] for dtype in dtypes)


def assert_close(got: ArrayLike, want: ArrayLike, limit: float = 1e-5, what: str = "") -> None:
    """Fails unless two arrays have one shape, are finite, and differ by at most `limit`.

    The limit is relative to the largest entry of `want`, where that is above 1.
    """
    got, want = np.asarray(got).astype(np.float64), np.asarray(want).astype(np.float64)
    assert got.shape == want.shape, f"{what}: shape {got.shape}, want {want.shape}"
    assert np.isfinite(want).all(), f"{what}: what is wanted is not finite"
    assert np.isfinite(got).all(), f"{what}: not finite at {np.argwhere(~np.isfinite(got))[0]}"
    if want.size == 0:
        return
    error, size = np.abs(got - want), max(1.0, np.abs(want).max())
    worst = np.unravel_index(error.argmax(), error.shape)
    assert error[worst] <= limit * size, (
        f"{what}: off by {error[worst]:.3g} at {[int(i) for i in worst]}, limit {limit * size:.3g}"
    )


def assert_trees_close(got: Any, want: Any, limit: float = 1e-5) -> None:
    """Fails unless two trees have the same structure and close arrays."""
    for path, a, b in paired_leaves(got, want):
        assert_close(a, b, limit, path)


def assert_trees_equal(got: Any, want: Any) -> None:
    """Fails unless two trees have the same structure and the same bits."""
    for path, a, b in paired_leaves(got, want):
        a, b = np.asarray(a), np.asarray(b)
        assert a.dtype == b.dtype and a.shape == b.shape, f"{path}: {a.dtype}{a.shape} {b.shape}"
        assert a.tobytes() == b.tobytes(), f"{path}: differs in {(a != b).sum()} places"


def paired_leaves(got: Any, want: Any) -> list[tuple[str, Any, Any]]:
    """Lists the leaves of two trees of one structure with their paths."""
    left, structure = jax.tree.flatten_with_path(got)
    right, other = jax.tree.flatten(want)
    assert structure == other, f"{structure} is not {other}"
    return [(jax.tree_util.keystr(path), a, b) for (path, a), b in zip(left, right, strict=True)]
