# SPDX-License-Identifier: Apache-2.0
"""Which devices a program that is traced now is meant for."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax import lax

# JAX names GPUs by their maker in some places and "gpu" in others.
_GPUS = ("cuda", "rocm")


def target_platform() -> str:
    """Finds the platform that a program traced now will run on: "cpu", "gpu" or "tpu".

    The mesh in use comes first, since programs are also compiled ahead for devices that are not
    there; then `jax.default_device`; then JAX's own choice.

    >>> cpu = jax.make_mesh((1,), ("data",), devices=jax.devices("cpu")[:1])
    >>> with jax.set_mesh(cpu):
    ...     target_platform()
    'cpu'
    """
    device = jax.sharding.get_abstract_mesh().abstract_device or jax.config.jax_default_device
    if device is None:
        return jax.default_backend()
    platform = device if isinstance(device, str) else device.platform
    return "gpu" if platform in _GPUS else platform


def by_platform(fn: Callable[..., Any], on_cpu: Any, elsewhere: Any, *args: Any) -> Any:
    """Calls `fn(choice, *args)` with the choice of the platform a program is compiled for.

    Unlike `target_platform` this also holds for a program that is exported for another platform.
    What is chosen alike is traced once.
    """
    if on_cpu == elsewhere:
        return fn(on_cpu, *args)
    return lax.platform_dependent(
        *args, cpu=functools.partial(fn, on_cpu), default=functools.partial(fn, elsewhere)
    )
