# SPDX-License-Identifier: Apache-2.0
"""Ways to set memory aside for a request whose length is not known."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from allocation.lengths import Mix

from jaxkv.cache import Contiguous, Layout, Paged


@dataclasses.dataclass(frozen=True)
class Policy:
    """One way to give out a pool.

    Args:
      name: What the tables call it.
      layout: Where tokens go.
      rows: Rows of the cache: requests that may run at a time.
      claim: Slots that a request with so many tokens of prompt and output needs before it starts;
        without pages it keeps them to its end.
    """

    name: str
    layout: Layout
    rows: int
    claim: Callable[[int, int], int]


def policies(mix: Mix, pages: tuple[int, ...]) -> list[Policy]:
    """Lists the policies of the vLLM paper (section 6.1), and pages of some sizes.

    The maximal reservation is the library's contiguous layout as it is: a row's slots are there
    from the start. The library has no layout for the next two, which know what nobody knows: rows
    of the contiguous layout stand for them, and what each would set aside is counted. The power of
    two is that of the output. No holes between reservations are counted against them.
    """

    def maximal(prompt: int, output: int) -> int:
        del prompt, output
        return mix.longest

    def doubled(prompt: int, output: int) -> int:
        return min(prompt + 2 ** (output - 1).bit_length(), mix.longest)

    def exact(prompt: int, output: int) -> int:
        return prompt + output

    out = [
        Policy("longest", Contiguous(), mix.pool // mix.longest, maximal),
        Policy("power of two", Contiguous(), mix.rows, doubled),
        Policy("oracle", Contiguous(), mix.rows, exact),
    ]
    for size in pages:
        layout = Paged(size, pages=mix.pool // size)
        out.append(Policy(f"pages of {size}", layout, mix.rows, _on_pages(size)))
    return out


def _on_pages(size: int) -> Callable[[int, int], int]:
    def claim(prompt: int, output: int) -> int:
        del output
        return -(-prompt // size) * size

    return claim
