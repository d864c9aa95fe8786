# SPDX-License-Identifier: Apache-2.0
"""How much memory a chip has, in its maker's own unit, and whether it pads arrays to tiles."""

from __future__ import annotations

import dataclasses
import difflib

from jaxkv.memory.units import BINARY, DECIMAL

LANES = 128


@dataclasses.dataclass(frozen=True)
class Chip:
    """Describes an accelerator's memory.

    Args:
      name: Name in commands.
      amount: Memory of the chip, in `unit`.
      unit: `"GiB"` or `"GB"`, as its maker writes it.
      source: Where the figure stands.
      devices: JAX devices that the chip's memory is shared by.
      tiled: Whether arrays are padded to tiles of 128 lanes (TPU).

    >>> CHIPS["tpu7x"].device_bytes == 96 * 2**30
    True
    """

    name: str
    amount: int
    unit: str
    source: str
    devices: int = 1
    tiled: bool = False

    @property
    def device_bytes(self) -> int:
        """Memory of one JAX device, in bytes."""
        return self.amount * (BINARY | DECIMAL)[self.unit] // self.devices

    @property
    def lanes(self) -> int:
        """Multiple that a cache pads its minor widths to on this chip."""
        return LANES if self.tiled else 1

    @property
    def label(self) -> str:
        """Names the chip with its memory."""
        split = f", as {self.devices} devices" if self.devices > 1 else ""
        return f"{self.name} ({self.amount} {self.unit}{split})"


_CLOUD = "Google Cloud TPU system architecture pages"
_NVIDIA = "NVIDIA data sheet"

# Google's newest page writes GiB for v5p, v6e and TPU7x; v5e's 16 is of the same kind.
CHIPS = {
    chip.name: chip
    for chip in (
        Chip("v5e", 16, "GiB", _CLOUD, tiled=True),
        Chip("v5p", 95, "GiB", _CLOUD, tiled=True),
        Chip("v6e", 32, "GiB", _CLOUD, tiled=True),
        Chip("tpu7x", 192, "GiB", _CLOUD, devices=2, tiled=True),
        Chip("t4", 16, "GB", f"{_NVIDIA}, T4"),
        Chip("l4", 24, "GB", f"{_NVIDIA}, L4"),
        Chip("a100-40", 40, "GB", f"{_NVIDIA}, A100 40GB"),
        Chip("a100-80", 80, "GB", f"{_NVIDIA}, A100 80GB"),
        Chip("h100", 80, "GB", f"{_NVIDIA}, H100 SXM"),
        Chip("h200", 141, "GB", f"{_NVIDIA}, H200"),
        Chip("b200", 180, "GB", f"{_NVIDIA}, DGX B200: 1,440 GB on 8"),
    )
}


def find_chip(name: str) -> Chip:
    """Finds a chip by name.

    Raises:
      ValueError: If it is not in the table.
    """
    found = CHIPS.get(name.lower())
    if found is None:
        close = difflib.get_close_matches(name.lower(), CHIPS, n=3, cutoff=0.4)
        near = [*close, *(chip for chip in CHIPS if chip not in close)]
        raise ValueError(f"unknown chip {name!r}; known are {', '.join(near)}.")
    return found
