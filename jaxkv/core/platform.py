# SPDX-License-Identifier: Apache-2.0
"""Which devices a program that is traced now is meant for."""

from __future__ import annotations

from typing import Any

import jax

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
    device = _named_device()
    if device is None:
        return jax.default_backend()
    platform = device if isinstance(device, str) else device.platform
    return "gpu" if platform in _GPUS else platform


def target_kind() -> str | None:
    """Finds the kind of device as its maker names it, for example "TPU v5 lite".

    It is `None` where only a platform was named.
    """
    device = _named_device() or jax.devices()[0]
    return None if isinstance(device, str) else device.device_kind


def _named_device() -> Any:
    """Finds the device that the mesh or the user names, if any."""
    return jax.sharding.get_abstract_mesh().abstract_device or jax.config.jax_default_device
