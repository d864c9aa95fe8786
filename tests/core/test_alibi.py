# SPDX-License-Identifier: Apache-2.0
"""The slopes of ALiBi, against the sequences that papers and models state."""

import numpy as np
import pytest

from jaxkv.core.alibi import alibi_slopes


def test_sixteen_heads_have_the_sequence_of_the_paper() -> None:
    # Section 3: for 16 heads 1/2^0.5, 1/2^1, 1/2^1.5, ..., 1/2^8.
    want = [2.0 ** -(n / 2) for n in range(1, 17)]
    np.testing.assert_allclose(alibi_slopes(16), want, rtol=1e-12)


def test_112_heads_go_on_with_every_second_of_128() -> None:
    # BLOOM: its 112 heads are the 64 of 2 ** (-n / 8), then odd powers of 2 ** (-1 / 16).
    slopes = alibi_slopes(112)
    assert len(set(slopes)) == len(slopes) == 112
    np.testing.assert_allclose(slopes[:64], [2.0 ** (-n / 8) for n in range(1, 65)])
    np.testing.assert_allclose(slopes[64:], [2.0 ** (-n / 16) for n in range(1, 96, 2)])


def test_one_head_and_none() -> None:
    assert alibi_slopes(1) == (2.0**-8,)
    with pytest.raises(ValueError, match="num_heads=0"):
        alibi_slopes(0)
