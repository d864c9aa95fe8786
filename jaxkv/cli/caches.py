# SPDX-License-Identifier: Apache-2.0
"""The caches that a comparison offers by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp

from jaxkv.cache import (
    H2O,
    TOVA,
    Evicting,
    Float8,
    Int4,
    Int8,
    Kivi,
    Layout,
    ModelCache,
    Paged,
    Raw,
    Ring,
    SnapKV,
)
from jaxkv.cache.codecs import Codec
from jaxkv.cache.contiguous import Contiguous
from jaxkv.cache.pairs import check_pair
from jaxkv.cli.variants import pick
from jaxkv.memory.policy import PINNED
from jaxkv.models.decoder import Decoder

DEFAULT = "default"
LARGEST = 2**20


@dataclasses.dataclass(frozen=True)
class CacheChoice:
    """A layout and a codec; `None` is the default one: contiguous, and the compute dtype."""

    layout: Layout | None = None
    codec: Codec | None = None

    def make(self, model: Decoder, batch: int, capacity: int, prompt: int = 0) -> ModelCache:
        """Makes an empty cache of a model for `batch` rows of `capacity` tokens.

        If a prompt of so many tokens is compressed, what follows it needs room.
        """
        layout = self.layout
        if isinstance(layout, Evicting) and self.needs_prompts and prompt:
            layout = dataclasses.replace(layout, room=capacity - prompt)
        return model.init_cache(batch, capacity, layout=layout, codec=self.codec)

    @property
    def needs_prompts(self) -> bool:
        """Whether it keeps to its size only where many tokens come in one call."""
        policy = self.layout.policy if isinstance(self.layout, Evicting) else None
        return policy is not None and not policy.evicts(1)


class Part(NamedTuple):
    """What a name stands for.

    Attributes:
      size: What the number after its colon counts; `None` if it takes none.
      make: Called with that number, or without one.
    """

    size: str | None
    make: Callable[..., CacheChoice]


# A new name is one line here.
PARTS = {
    "ring": Part("last tokens kept", lambda window=256: CacheChoice(Ring(window))),
    "sinks": Part("last tokens kept", lambda window=256: CacheChoice(Ring(window, PINNED))),
    "contiguous": Part(None, lambda: CacheChoice(Contiguous())),
    "paged": Part("tokens of a page", lambda size=64: CacheChoice(Paged(size))),
    "h2o": Part("tokens kept", lambda budget=256: CacheChoice(Evicting(budget, H2O()))),
    "tova": Part("tokens kept", lambda budget=256: CacheChoice(Evicting(budget, TOVA()))),
    "snapkv": Part("tokens kept", lambda budget=256: CacheChoice(Evicting(budget, SnapKV()))),
    "bfloat16": Part(None, lambda: CacheChoice(codec=Raw(jnp.bfloat16))),
    "int8": Part("channels of a scale", lambda group=None: CacheChoice(codec=Int8(group))),
    "int4": Part("channels of a scale", lambda group=None: CacheChoice(codec=Int4(group))),
    "float8": Part("channels of a scale", lambda group=None: CacheChoice(codec=Float8(group))),
    "kivi": Part("tokens of a group", lambda group=32: CacheChoice(codec=Kivi(4, group))),
    "kivi2": Part("tokens of a group", lambda group=32: CacheChoice(codec=Kivi(2, group))),
}
HELP = (
    f"Caches to set beside the default one, comma-separated: {', '.join(PARTS)}; with a size, "
    "as ring:256 or int4:32; layout and codec together, as paged:16+int8."
    " snapkv compresses prompts: in a comparison, the first half of the text."
)


def parse_caches(text: str) -> dict[str, CacheChoice]:
    """Reads names of caches.

    Args:
      text: Names, comma-separated. Each is a layout, a codec, or both with a `+` between them; a
        colon and a number give the size of either.

    Returns:
      Name -> choice, in the order given.

    Raises:
      ValueError: Naming what cannot be read and what there is.

    >>> parse_caches("paged:16+int8")["paged:16+int8"]
    CacheChoice(layout=Paged(size=16, pages=None), codec=Int8(group=None))
    """
    names = [name.strip().lower() for name in text.split(",") if name.strip()]
    choices = {name: _parse_cache(name) for name in names}
    if not names or len(set(choices.values())) != len(names):
        raise ValueError(f"--cache {text!r}: want each cache once, at least one.")
    return choices


def _parse_cache(name: str) -> CacheChoice:
    chosen: dict[str, Layout | Codec] = {}
    for part in name.split("+"):
        made = _parse_part(part.strip())
        for field in dataclasses.fields(made):
            value = getattr(made, field.name)
            if value is None:
                continue
            if field.name in chosen:
                raise ValueError(f"cache {name!r}: want one {field.name}, not two.")
            chosen[field.name] = value
    choice = CacheChoice(**chosen)  # type: ignore[arg-type]
    if choice.codec is not None:
        check_pair(choice.layout or Contiguous(), choice.codec)
    return choice


def _parse_part(part: str) -> CacheChoice:
    word, colon, number = part.partition(":")
    size, make = PARTS[pick(word, PARTS, "cache")]
    if not colon:
        return make()
    if size is None:
        raise ValueError(f"cache {part!r}: {word} takes no size.")
    if not (number.isascii() and number.isdecimal() and 1 <= int(number) <= LARGEST):
        raise ValueError(f"cache {part!r}: want 1 to {LARGEST} {size} after the colon.")
    return make(int(number))
