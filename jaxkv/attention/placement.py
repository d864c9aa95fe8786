# SPDX-License-Identifier: Apache-2.0
"""How a module's cache is laid out on the platform and the mesh that it runs on."""

from __future__ import annotations

import logging

from jaxkv.core.platform import target_platform
from jaxkv.core.sharding import axis_size

logger = logging.getLogger("jaxkv")


def default_lanes() -> int:
    """Chooses the lane multiple for the platform in use: 128 on TPU, else 1."""
    return 128 if target_platform() == "tpu" else 1


def kv_replicas(num_heads: int, kv_heads: int, name: str) -> int:
    """Counts how often each KV head is stored on the current mesh.

    Query heads that do not divide over the devices are not split, and KV heads with them.

    Raises:
      ValueError: If query heads are split, but neither KV heads nor devices divide the other.
    """
    devices = axis_size("kv_heads")
    if kv_heads % devices == 0:
        return 1
    if num_heads % devices:
        logger.warning(
            "%s: %d query heads do not divide over %d tensor devices: each keeps all KV heads.",
            name,
            num_heads,
            devices,
        )
        return 1
    if devices % kv_heads:
        raise ValueError(f"{name}: {kv_heads} KV heads do not fit {devices} tensor devices.")
    copies = devices // kv_heads
    logger.warning(
        "%s: %d KV heads on %d tensor devices: every head is kept by %d of them.",
        name,
        kv_heads,
        devices,
        copies,
    )
    return 1 if kv_heads == 1 else copies
