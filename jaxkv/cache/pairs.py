# SPDX-License-Identifier: Apache-2.0
"""Which layouts and codecs do not fit each other: one table of refusals."""

from __future__ import annotations

from typing import Any

from jaxkv.cache.codecs import Codec
from jaxkv.cache.contiguous import Contiguous
from jaxkv.cache.grouped import Grouped
from jaxkv.cache.index import Layout
from jaxkv.cache.paged import Paged


def _of_groups(layout: Layout, codec: Grouped) -> str | None:
    """A group of consecutive tokens has to lie side by side for as long as the row has them."""
    if isinstance(layout, Contiguous):
        return None
    if not isinstance(layout, Paged):
        return f"it does not keep whole groups of {codec.group} tokens, which the codec encodes"
    if layout.size % codec.group:
        return f"a page is no whole number of groups of {codec.group} tokens"
    return None


# (kind of codec, says of a layout and a codec why they do not fit or `None`, what does fit)
REFUSALS = ((Grouped, _of_groups, "Contiguous(), and Paged of a multiple of the codec's group"),)


def check_kinds(layout: Any, codec: Any) -> None:
    """Checks that a layout is one and a codec is one, where they are given.

    Raises:
      ValueError: Naming what was passed and what fits.
    """
    if layout is not None and (isinstance(layout, type) or not hasattr(layout, "storage")):
        raise ValueError(f"layout={layout!r}: want a layout such as Contiguous() or Paged(16).")
    if codec is not None and (isinstance(codec, type) or not hasattr(codec, "planes")):
        raise ValueError(f"codec={codec!r}: want a codec such as Raw() or Int8().")


def refusal(layout: Layout, codec: Codec) -> str | None:
    """Says why a layout and a codec do not fit each other, and what does; `None` if they do."""
    for kind, reason_of, fits in REFUSALS:
        reason = reason_of(layout, codec) if isinstance(codec, kind) else None
        if reason is not None:
            return f"{layout} with {codec}: {reason}; {codec} fits {fits}."
    return None


def check_pair(layout: Layout, codec: Codec) -> None:
    """Checks that a layout and a codec fit each other.

    Raises:
      ValueError: Naming both, why they do not, and what fits.
    """
    reason = refusal(layout, codec)
    if reason is not None:
        raise ValueError(reason)
