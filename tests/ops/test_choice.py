# SPDX-License-Identifier: Apache-2.0
"""Who computes a call, and what a caller reads whose call does not fit."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv.ops import api
from jaxkv.ops.api import attention, explain
from tests.ops.suite import ELSEWHERE, IMPLEMENTATIONS, KERNELS, operands

ONES = np.ones


def test_every_implementation_is_under_test():
    tested = [*ELSEWHERE, *KERNELS, *IMPLEMENTATIONS]
    assert sorted(tested) == sorted(i.name for i in api.IMPLEMENTATIONS)


def test_explain_lists_who_serves_and_why_not():
    small = explain(**operands())
    assert small["einsum"] == "serves"
    assert small["blockwise"] == "serves, but has one tile"
    assert small["reference"] == "serves, but slow: it is what the others are held to"
    large = explain(**operands(T=300, S=400))
    assert large["einsum"] == "serves, but holds all 300 x 400 scores of a head at once"
    assert large["blockwise"] == "serves"


@dataclasses.dataclass(frozen=True)
class Marked:
    """Answers with its mark, or refuses."""

    name: str
    mark: float
    reason: str | None = None
    late: str | None = None

    def refuses(self, operands):
        return self.reason

    def yields(self, operands):
        return self.late

    def run(self, operands):
        B, T, N, _ = operands.query.shape
        return jnp.full((B, T, N, 1), self.mark), jnp.zeros((B, T, N))


@pytest.fixture
def marked(monkeypatch):
    table = (Marked("fast", 1.0, "no such chip"), Marked("good", 2.0), Marked("plain", 3.0))
    monkeypatch.setattr(api, "IMPLEMENTATIONS", table)

    def chosen(implementation):
        return attention(**operands(), implementation=implementation)[0, 0, 0, 0].item()

    return chosen


def test_none_takes_the_first_that_serves(marked):
    assert marked(None) == 2.0


def test_none_passes_over_one_that_yields_but_a_name_does_not(monkeypatch, marked):
    table = (Marked("good", 2.0, late="another suits it better"), Marked("plain", 3.0))
    monkeypatch.setattr(api, "IMPLEMENTATIONS", table)
    assert marked(None) == 3.0
    assert marked(["good", "plain"]) == 2.0
    monkeypatch.setattr(api, "IMPLEMENTATIONS", table[:1])
    assert marked(None) == 2.0


def test_one_of_your_own_serves(marked):
    assert marked(Marked("mine", 7.0)) == 7.0
    assert marked(["fast", Marked("mine", 7.0)]) == 7.0


def test_a_sequence_is_tried_in_its_own_order(marked):
    assert marked(["plain", "good"]) == 3.0
    assert marked(("fast", "good")) == 2.0
    assert marked("plain") == 3.0


@pytest.mark.parametrize("names", ["fast", ["fast"]])
def test_a_name_fails_with_the_reason(marked, names):
    with pytest.raises(ValueError, match="cannot serve this call: {'fast': 'no such chip'}"):
        marked(names)


def test_unknown_names_fail_even_beside_known_ones(marked):
    with pytest.raises(ValueError, match=r"unknown implementation \['flash'\].*'fast', 'good'"):
        marked(["good", "flash"])


WRONG = {
    "rank": ({"query": ONES((2, 3, 8), np.float32)}, "query \\(2, 3, 8\\).*want \\[B, T, N, H\\]"),
    "key width": ({"key": ONES((2, 5, 2, 7), np.float32)}, "key \\(2, 5, 2, 7\\).*H=8"),
    "rows": ({"query": ONES((3, 3, 4, 8), np.float32)}, "query \\(3, 3, 4, 8\\).*same B, K, S"),
    "slots": ({"value": ONES((2, 4, 2, 3), np.float32)}, "value \\(2, 4, 2, 3\\).*same B, K, S"),
    "kv heads": ({"value": ONES((2, 5, 4, 3), np.float32)}, "same B, K, S"),
    "both places": (
        {"offset": 1, "query_order": ONES((1, 3), np.int32)},
        "offset and query_order both place",
    ),
    "offset rows": ({"offset": ONES(3, np.int32)}, "offset int32\\(3,\\): want int32 \\(\\) or"),
    "offset dtype": ({"offset": 1.5}, "offset float.*: want int32 \\(\\) or \\(2,\\)"),
    "query order": ({"query_order": ONES((2, 5), np.int32)}, "query_order int32\\(2, 5\\).*2, 3"),
    "key order": ({"key_order": ONES((2, 5), np.float32)}, "key_order float32\\(2, 5\\).*2, 5"),
    "one side's segments": (
        {"query_segments": ONES((2, 3), np.int32)},
        "query_segments and key_segments belong together",
    ),
    "other side's segments": (
        {"key_segments": ONES((2, 5), np.int32)},
        "query_segments and key_segments belong together",
    ),
    "lengths beside key segments": (
        {"key_segments": ONES((2, 5), np.int32), "query_lengths": ONES(2, np.int32)},
        "key_segments without query_segments",
    ),
    "segment width": (
        {"query_segments": ONES((2, 4), np.int32), "key_segments": ONES((2, 5), np.int32)},
        "query_segments int32\\(2, 4\\).*2, 3",
    ),
    "length shape": ({"key_lengths": ONES((2, 1), np.int32)}, "key_lengths int32\\(2, 1\\)"),
    "length dtype": ({"key_lengths": ONES(2, np.float32)}, "key_lengths float32\\(2,\\)"),
    "length value": ({"key_lengths": np.array([6, 5])}, "key_lengths \\[6, 5\\]: want 0 to 5"),
    "bias width": ({"bias": ONES((3, 4), np.float32)}, "bias \\(3, 4\\) does not fit"),
    "window": ({"window": 0, "causal": True, "offset": 0}, "window=0: want W >= 1"),
}


@pytest.mark.parametrize(("given", "message"), WRONG.values(), ids=WRONG)
def test_calls_that_do_not_fit_say_what_does(given, message):
    arguments = {k: jnp.asarray(v) if isinstance(v, np.ndarray) else v for k, v in given.items()}
    with pytest.raises(ValueError, match=message):
        attention(**operands() | arguments)


def test_defaults_are_bidirectional_and_scaled_by_the_width():
    arrays = operands()
    np.testing.assert_array_equal(
        attention(**arrays), attention(**arrays, causal=False, scale=8**-0.5, soft_cap=None)
    )


def test_whole_numbers_are_refused():
    x = jnp.ones((1, 2, 1, 4), jnp.int32)
    with pytest.raises(ValueError, match="query, key and value are int32: want a float dtype"):
        attention(x, x, x)
    with pytest.raises(ValueError, match=r"unknown options \['casual'\] of attention: want of"):
        attention(x, x, x, casual=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scale": np.nan}, "scale=nan: want a finite number"),
        ({"scale": jnp.ones(2)}, r"scale has shape \(2,\): want a number"),
        ({"soft_cap": np.inf}, "soft_cap=inf: want a finite number above 0"),
        ({"dropout_key": 0, "dropout_rate": 0.5}, "dropout_key=0: want one PRNG key"),
        ({"dropout_key": jnp.zeros(2), "dropout_rate": 0.5}, "dropout_key=.*: want one PRNG key"),
        ({"implementation": ()}, r"implementation=\(\) names none: want of \['blockwise'"),
    ],
)
def test_options_that_mean_nothing_raise(options, message):
    with pytest.raises(ValueError, match=message):
        attention(**operands(), **options)


@pytest.mark.parametrize("name", ["scale", "soft_cap", "dropout_rate"])
def test_constants_that_are_traced_raise(name):
    with pytest.raises(ValueError, match=f"{name} is traced: it is a constant of the program"):
        jax.jit(lambda x: attention(**operands(), **{name: x}))(0.5)


def test_slopes_are_taken_as_alibi_slopes_gives_them():
    arrays, slopes = operands(), jaxkv.alibi_slopes(4)
    np.testing.assert_array_equal(
        attention(**arrays, alibi_slopes=slopes),
        attention(**arrays, alibi_slopes=jnp.asarray(slopes, jnp.float32)),
    )
