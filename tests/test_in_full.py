# SPDX-License-Identifier: Apache-2.0
"""The list of tests that are left for `-m full` names tests that are there."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LINES = [
    line
    for line in (ROOT / "tests" / "in_full.txt").read_text().splitlines()
    if not line.startswith("#")
]


def test_each_line_stands_once() -> None:
    assert sorted(set(LINES)) == LINES


@pytest.mark.parametrize("path", sorted({line.split("::")[0] for line in LINES}))
def test_what_is_listed_is_there(path: str) -> None:
    tests = (ROOT / path).read_text()
    for line in LINES:
        file, *names = line.split("[")[0].split("::")
        if file == path and not names[0].startswith("Test"):  # a suite's tests stand elsewhere
            assert f"def {names[-1]}(" in tests, line
        elif file == path:
            assert f"class {names[0]}(" in tests, line
