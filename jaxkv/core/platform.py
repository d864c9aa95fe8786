# SPDX-License-Identifier: Apache-2.0
"""Which devices a program that is traced now is meant for."""

from __future__ import annotations

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
    device = jax.sharding.get_abstract_mesh().abstract_device or jax.config.jax_default_device
    if device is None:
        return jax.default_backend()
    platform = device if isinstance(device, str) else device.platform
    return "gpu" if platform in _GPUS else platform
