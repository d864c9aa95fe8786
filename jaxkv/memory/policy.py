# SPDX-License-Identifier: Apache-2.0
"""Which layout each layer is given: what a layer keeps is a choice."""

from __future__ import annotations

import abc
import dataclasses
import functools
import math
import re
from collections.abc import Callable, Iterator, Sequence

from jaxkv.cache.contiguous import Contiguous
from jaxkv.cache.evicting import Evicting
from jaxkv.cache.index import Layout
from jaxkv.cache.paged import Paged
from jaxkv.cache.policies import POLICIES, pyramid_budgets
from jaxkv.cache.ring import Ring
from jaxkv.models.geometry import LayerSpec

PINNED = 4  # first tokens that `sinks` keeps, as many as its source does
# A number of a policy's text: at least 1, of up to 12 digits.
NUMBER = "0*([1-9][0-9]{0,11})"
WINDOWS = (
    "Window layers are counted with their window only, as a ring keeps it; a contiguous cache "
    "keeps every token (full)."
)


class SlotPolicy(abc.ABC):
    """Says which layout each layer is given; a frozen, hashable dataclass. One class each.

    >>> from jaxkv.cache.spec import KVSpec
    >>> windowed = LayerSpec("window", 8, KVSpec(8, 64, 64), window=128)
    >>> texts = ("window", "full", "pages:16", "ring:64", "ring:512")
    >>> [SlotPolicy.parse(text).slots(windowed, 8190) for text in texts]
    [128, 8190, 8192, 64, 128]
    >>> full = LayerSpec("full", 8, KVSpec(8, 64, 64))
    >>> [SlotPolicy.parse(text).slots(full, 8190) for text in ("h2o:1024", "snapkv:1024+256")]
    [1024, 1280]
    """

    @classmethod
    def parse(cls, text: str) -> SlotPolicy:
        """Reads one of the forms of `FORMS`, such as `window`, `pages:16x300` or `snapkv:512+64`.

        Raises:
          ValueError: If it is none of these.
        """
        for form, make in FORMS.items():
            match = re.fullmatch(re.sub("[A-Z]", NUMBER, re.escape(form)), text)
            if match is not None:
                return make(*map(int, match.groups()))
        name = _name(text)
        near = [form for form in FORMS if _name(form) == name]
        raise ValueError(
            f"window policy {text!r}: want {', '.join(near or FORMS)}, with a number for each "
            "capital letter, as in pages:16."
        )

    @abc.abstractmethod
    def choose(self, layers: Sequence[LayerSpec]) -> Sequence[Layout]:
        """Chooses a layout for each of a model's layers that keep tokens."""

    def layouts(self, layers: Sequence[LayerSpec]) -> tuple[Layout | None, ...]:
        """Gives each layer of a model its layout, and `None` to one that keeps no tokens."""
        chosen = iter(self.choose([layer for layer in layers if layer.spec is not None]))
        return tuple(
            None if layer.spec is None else next(chosen).fitted(layer.spec) for layer in layers
        )

    def slots(self, layer: LayerSpec, context: int) -> int:
        """Counts the slots that the only layer of a model gives one row of `context` tokens."""
        return row_slots(self.of_row().layouts((layer,))[0], context)

    def of_row(self) -> SlotPolicy:
        """Gives the policy that counts what one row takes for itself."""
        return self

    def divided(self, data: int) -> SlotPolicy:
        """Gives the policy of one of `data` devices that rows are divided over.

        Raises:
          ValueError: If something that all rows share does not divide.
        """
        del data
        return self

    def keeping_all(self) -> SlotPolicy:
        """Gives the policy by which every layer keeps every token."""
        return Full()

    def holds(self, rows: int, context: int) -> bool:
        """Tells whether so many rows of so many tokens have slots."""
        del rows, context
        return True

    def notes(self, layers: Sequence[LayerSpec], context: int, data: int) -> Iterator[str]:
        """Says what a reader of a plan should know, a sentence each."""
        del layers, context, data
        yield from ()


@dataclasses.dataclass(frozen=True)
class Rings(SlotPolicy):
    """Keeps the last tokens: all layers `window` of them, or window layers those of their own.

    A layer with a smaller window of its own keeps that, and nothing pinned, since its queries see
    no more in a larger ring either (`Ring.narrowed`).

    Args:
      window: W, tokens that any layer keeps at most; `None`: layers without a window keep all.
      spare: Slots beside these, for deeper rollbacks.
      pinned: First tokens that are kept beside the last `window`.
    """

    window: int | None = None
    spare: int = 0
    pinned: int = 0

    def choose(self, layers: Sequence[LayerSpec]) -> Sequence[Layout]:
        """Gives rings, of the smaller window."""
        return [self._of(layer.window) for layer in layers]

    def _of(self, own: int | None) -> Layout:
        if own is not None and (self.window is None or own <= self.window):
            return Ring(own, spare=self.spare)
        if self.window is None:
            return Contiguous()
        return Ring(self.window, self.pinned, self.spare)

    def notes(self, layers: Sequence[LayerSpec], context: int, data: int) -> Iterator[str]:
        """Says what is forgotten."""
        windows = _has_windows(layers)
        if self.window is None and windows:
            yield WINDOWS
        if self.window is not None:
            first = f" and its first {self.pinned}" if self.pinned else ""
            smaller = "; one with a smaller window of its own keeps that" if windows else ""
            yield f"Every layer keeps its last {self.window:,} tokens{first}{smaller}."
        if self.spare and (windows or self.window is not None):
            yield f"A ring has {self.spare:,} spare slots, by which rollbacks may go deeper."

    def __str__(self) -> str:
        name = "window" if self.window is None else "sinks" if self.pinned else "ring"
        size = "" if self.window is None else f":{self.window}"
        return f"{name}{size}{_more(self.spare)}"


@dataclasses.dataclass(frozen=True)
class Full(SlotPolicy):
    """Keeps every token of every layer, in slots of each row's own."""

    def choose(self, layers: Sequence[LayerSpec]) -> Sequence[Layout]:
        """Gives every layer the contiguous layout."""
        return [Contiguous()] * len(layers)

    def __str__(self) -> str:
        return "full"


@dataclasses.dataclass(frozen=True)
class Pages(SlotPolicy):
    """Keeps every token of every layer on pages.

    Args:
      size: Z, tokens of a page.
      pages: P, pages of a pool that all rows share; `None`: enough for the context of each.
    """

    size: int
    pages: int | None = None

    def choose(self, layers: Sequence[LayerSpec]) -> Sequence[Layout]:
        """Gives every layer the same pages."""
        return [Paged(self.size, self.pages)] * len(layers)

    def of_row(self) -> SlotPolicy:
        """Counts the pages that a row holds, not the pool."""
        return Pages(self.size)

    def divided(self, data: int) -> SlotPolicy:
        """Gives each device its share of the pool."""
        if self.pages is None:
            return self
        if self.pages % data:
            raise ValueError(f"{self.pages} pages on {data} data devices: want a multiple of them.")
        return Pages(self.size, self.pages // data)

    def keeping_all(self) -> SlotPolicy:
        """Every token is kept as it is."""
        return self

    def holds(self, rows: int, context: int) -> bool:
        """Tells whether the pool has so many pages."""
        return self.pages is None or rows * self._each(context) <= self.pages

    def _each(self, context: int) -> int:
        return -(-context // self.size)

    def notes(self, layers: Sequence[LayerSpec], context: int, data: int) -> Iterator[str]:
        """Says what the pages are enough for."""
        index = "The table of pages and their reference counts are in nbytes."
        if self.pages is None:
            yield (
                f"Every row has whole pages of {self.size} tokens for its context; none is "
                f"shared. {index}"
            )
        else:
            rows = data * (self.pages // data // self._each(context))
            yield (
                f"All rows share a pool of {self.pages:,} pages of {self.size} tokens: room for "
                f"{rows:,} rows of {context:,} tokens that have no page in common. {index}"
            )
        if _has_windows(layers):
            yield "Window layers keep every token on pages: those behind the window are not freed."

    def __str__(self) -> str:
        return f"pages:{self.size}" + ("" if self.pages is None else f"x{self.pages}")


@dataclasses.dataclass(frozen=True)
class Budgets(SlotPolicy):
    """Keeps chosen tokens in layers without a window, and their window in the others.

    Budgets that differ by head take the slots of the largest, which is the one to be given here.

    Args:
      name: Who chooses, a name of `POLICIES`.
      budget: Tokens of a row that stay, on average over layers.
      room: Slots beside these, for what follows a prompt where the policy compresses that alone.
      pyramid: Whether lower layers keep more than higher ones (`pyramid_budgets`).
    """

    name: str
    budget: int
    room: int = 0
    pyramid: bool = False

    def choose(self, layers: Sequence[LayerSpec]) -> Sequence[Layout]:
        """Gives a budget to each layer without a window."""
        budgets, policy = iter(self._budgets(layers)), POLICIES[self.name]()
        return [
            Evicting(next(budgets), policy, self.room)
            if layer.window is None
            else Ring(layer.window)
            for layer in layers
        ]

    def _budgets(self, layers: Sequence[LayerSpec]) -> list[int]:
        count = sum(layer.window is None and layer.spec is not None for layer in layers)
        if not self.pyramid or not count:
            return [self.budget] * count
        return pyramid_budgets(self.budget, count)

    def notes(self, layers: Sequence[LayerSpec], context: int, data: int) -> Iterator[str]:
        """Says who keeps how many, and what a row has room for."""
        if _has_windows(layers):
            yield WINDOWS
        budgets = self._budgets(layers)
        if self.pyramid and budgets:
            yield (
                f"Budgets fall from {budgets[0]:,} tokens in the first layer that has one to "
                f"{budgets[-1]:,} in the last, and are {self.budget:,} on average."
            )
        if self.room and budgets:
            yield (
                "A prompt is compressed once; tokens that may follow it before a row is full: "
                f"{self.room:,}."
            )

    def __str__(self) -> str:
        pyramid = "/pyramid" if self.pyramid else ""
        return f"{self.name}:{self.budget}{_more(self.room)}{pyramid}"


def row_slots(layout: Layout | None, context: int) -> int:
    """Counts the slots that a layout gives one row of `context` tokens."""
    return 0 if layout is None else math.prod(layout.storage(1, context))


def _has_windows(layers: Sequence[LayerSpec]) -> bool:
    return any(layer.window is not None for layer in layers)


def _more(slots: int) -> str:
    return f"+{slots}" if slots else ""


def _name(text: str) -> str:
    return re.split("[^a-z0-9]", text, maxsplit=1)[0]


def _budget_forms(name: str) -> dict[str, Callable[..., SlotPolicy]]:
    # What evicts nothing while decoding needs room for what is decoded.
    form = f"{name}:Z" if POLICIES[name]().evicts(1) else f"{name}:Z+R"
    make = functools.partial(Budgets, name)
    return {form: make, f"{form}/pyramid": functools.partial(make, pyramid=True)}


# A capital letter stands for a number; each is an argument, in their order. A new form is one line.
FORMS: dict[str, Callable[..., SlotPolicy]] = {
    "window": Rings,
    "full": Full,
    "pages:Z": Pages,
    "pages:ZxP": Pages,
    "window+S": functools.partial(Rings, None),
    "ring:W": Rings,
    "ring:W+S": Rings,
    "sinks:W": functools.partial(Rings, pinned=PINNED),
    "sinks:W+S": functools.partial(Rings, pinned=PINNED),
    **{form: make for name in POLICIES for form, make in _budget_forms(name).items()},
}
