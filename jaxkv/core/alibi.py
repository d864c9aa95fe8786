# SPDX-License-Identifier: Apache-2.0
"""ALiBi: the slopes by which each head's scores fall with distance."""

from __future__ import annotations

from jaxkv.core.trees import check_sizes


def alibi_slopes(num_heads: int) -> tuple[float, ...]:
    """Gives each head its slope: a geometric sequence from 2 ** (-8 / N) down to 2 ** -8.

    Where N is no power of two, the sequence of the next lower power is followed by every second
    slope of twice that many heads, as in the paper's code, BLOOM and MPT (whose `alibi_bias_max`
    is 8; for another one, raise each slope to that number over 8).

    Args:
      num_heads: N, query heads.

    Returns:
      N slopes, per token of distance.

    Raises:
      ValueError: If there is no head.

    Source: Press et al. 2022, "Train Short, Test Long" (arXiv:2108.12409), section 3.

    >>> [1 / slope for slope in alibi_slopes(8)]
    [2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0]
    >>> alibi_slopes(3)
    (0.0625, 0.00390625, 0.25)
    """
    check_sizes(num_heads=num_heads)
    low = 1 << (num_heads.bit_length() - 1)
    return _geometric(low) + _geometric(2 * low)[::2][: num_heads - low]


def _geometric(count: int) -> tuple[float, ...]:
    return tuple(2.0 ** (-8 * n / count) for n in range(1, count + 1))
