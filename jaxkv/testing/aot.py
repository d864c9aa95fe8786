# SPDX-License-Identifier: Apache-2.0
"""Compiling for TPU chips that are not there: libtpu's compiler runs on any x86-64 Linux."""

from __future__ import annotations

import functools
import importlib.util
import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import pytest
from jax.experimental import topologies
from jax.experimental.layout import Format, Layout
from jax.sharding import Mesh, NamedSharding, PartitionSpec

# Chip -> a topology of eight devices.
TOPOLOGIES = {"v5e": "v5e:2x4", "v6e": "v6e:2x4", "v5p": "v5p:2x2x2", "tpu7x": "tpu7x:2x2x1"}

# Without these libtpu asks the network for its machine, complains on stderr that it finds none,
# and lets one process load it.
_NO_MACHINE = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_MIN_LOG_LEVEL": "3",
    "TPU_LOG_DIR": "disabled",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


def require_tpu_compiler() -> None:
    """Skips the test that calls it where the TPU compiler is not installed."""
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("no TPU compiler: `pip install jax[tpu]` (Linux, x86-64) brings libtpu.")


def tpu_mesh(chip: str, axes: Mapping[str, int] | None = None) -> Mesh:
    """Builds a mesh of chips that need not be there.

    Args:
      chip: A name of `TOPOLOGIES`.
      axes: Name -> devices of each axis, eight devices at most; default one device.

    Returns:
      A mesh to compile for; no array can be put on it.

    Raises:
      ValueError: If the chip is unknown or has fewer devices.
    """
    axes = axes if axes is not None else {"data": 1}
    devices = _devices(chip)
    wanted = math.prod(axes.values())
    if wanted > len(devices):
        raise ValueError(f"{dict(axes)} is {wanted} devices: {chip} has {len(devices)} here.")
    return Mesh(np.array(devices[:wanted]).reshape(*axes.values()), tuple(axes))


def compile_for_tpu(
    fn: Callable[..., Any],
    args: Sequence[Any],
    mesh: Mesh,
    *,
    donate: int | Sequence[int] = (),
    options: Mapping[str, Any] | None = None,
    free_layouts: bool = False,
) -> Any:
    """Compiles `fn(*args)` with the TPU compiler; nothing is allocated and nothing runs.

    The result's `memory_analysis()` and `as_text()` tell what the chip would do. A program that
    does not fit the chip's memory fails to compile.

    Args:
      fn: A function to be given to `jax.jit`.
      args: Trees of arrays or `jax.ShapeDtypeStruct`; an array without a sharding on the mesh is
        whole on every device.
      mesh: Of `tpu_mesh`. It is the ambient mesh while `fn` is traced.
      donate: Positions of donated arguments.
      options: Compiler options.
      free_layouts: Let the compiler choose how arguments and results lie in memory, as it does for
        arrays inside of a program; else they are row-major, and copied where they are not to be.

    Returns:
      A `jax.stages.Compiled`.
    """
    whole = NamedSharding(mesh, PartitionSpec())

    def placed(x: Any) -> jax.ShapeDtypeStruct:
        given = getattr(x, "sharding", None)
        there = isinstance(given, NamedSharding) and given.mesh == mesh
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=given if there else whole)

    shapes = jax.tree.map(placed, tuple(args))
    layouts: dict[str, Any] = {}
    if free_layouts:
        given = jax.tree.map(lambda x: Format(Layout.AUTO, x.sharding), shapes)
        layouts = {"in_shardings": given, "out_shardings": Format(Layout.AUTO)}
    with jax.set_mesh(mesh):
        lowered = jax.jit(fn, donate_argnums=donate, **layouts).lower(*shapes)
        return lowered.compile(compiler_options=dict(options) if options else None)


@functools.cache
def _devices(chip: str) -> list[Any]:
    if chip not in TOPOLOGIES:
        raise ValueError(f"chip {chip!r}: want one of {sorted(TOPOLOGIES)}.")
    if jax.default_backend() != "tpu":
        for name, value in _NO_MACHINE.items():
            os.environ.setdefault(name, value)
    topology = topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGIES[chip])
    return list(topology.devices)
