# SPDX-License-Identifier: Apache-2.0
"""The slopes of ALiBi, against the sequences that papers and models state."""

import json
from pathlib import Path

import numpy as np
import pytest

from jaxkv.core.alibi import alibi_slopes

HF = json.loads(
    (Path(__file__).parents[1] / "fixtures" / "alibi" / "huggingface.json").read_text("utf-8")
)


def test_sixteen_heads_have_the_sequence_of_the_paper() -> None:
    # Section 3: for 16 heads 1/2^0.5, 1/2^1, 1/2^1.5, ..., 1/2^8.
    want = [2.0 ** -(n / 2) for n in range(1, 17)]
    np.testing.assert_allclose(alibi_slopes(16), want, rtol=1e-12)


@pytest.mark.parametrize("heads", HF["slopes"])
@pytest.mark.parametrize("model", ["bloom", "mpt"])
def test_slopes_are_those_of_models(model: str, heads: str) -> None:
    want = HF["slopes"][heads][model]
    np.testing.assert_allclose(alibi_slopes(int(heads)), want, rtol=1e-6)


def test_one_head_and_none() -> None:
    assert alibi_slopes(1) == (2.0**-8,)
    with pytest.raises(ValueError, match="num_heads=0"):
        alibi_slopes(0)
