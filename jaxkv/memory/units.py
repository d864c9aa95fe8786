# SPDX-License-Identifier: Apache-2.0
"""Bytes in words, with the unit always the right one: GiB is 2**30 bytes, GB is 10**9."""

from __future__ import annotations

import re

BINARY = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
DECIMAL = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def format_bytes(count: float, units: dict[str, int] = BINARY, places: int | None = None) -> str:
    """Writes a number of bytes in the largest unit that it fills.

    Args:
      count: Bytes.
      units: `BINARY` or `DECIMAL`.
      places: Digits after the point; `None` is one for kilo, two for mega, three from giga on.

    >>> format_bytes(2**30), format_bytes(2**30, DECIMAL), format_bytes(70_272)
    ('1.000 GiB', '1.074 GB', '68.6 KiB')
    """
    name = max((u for u in units if units[u] <= max(count, 1)), key=lambda u: units[u])
    if places is None:
        places = min(list(units).index(name), 3)
    return f"{count / units[name]:,.{places}f} {name}"


def parse_bytes(text: str) -> int:
    """Reads a size such as `60.8GiB`, `65 GB` or a plain number of bytes.

    Raises:
      ValueError: If it is no such size.

    >>> parse_bytes("1.5 GiB"), parse_bytes("65GB")
    (1610612736, 65000000000)
    """
    match = re.fullmatch(r"\s*([0-9][0-9_]*(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", text)
    units = {name.lower(): size for name, size in (BINARY | DECIMAL).items()} | {"": 1}
    if match is None or match[2].lower() not in units:
        raise ValueError(f"size {text!r}: want a number with a unit such as 60.8GiB or 65GB.")
    return int(float(match[1].replace("_", "")) * units[match[2].lower()])
