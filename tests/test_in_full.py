# SPDX-License-Identifier: Apache-2.0
"""The list of tests that are left for `-m full` names tests that are there."""

from __future__ import annotations

import pytest


def test_each_line_stands_once_and_names_tests_that_are_there(
    in_full: list[tuple[str, list[str]]], pytestconfig: pytest.Config
) -> None:
    lines = [line for line, _ in in_full]
    assert sorted(set(lines)) == lines
    # Nothing is known of a file of which only some tests were asked for, or none.
    whole = [arg.rstrip("/") for arg in pytestconfig.args if "::" not in arg]
    missing = [line for line, tests in in_full if not tests and _within(line, whole)]
    assert missing == []


def _within(line: str, asked: list[str]) -> bool:
    path = line.split("::")[0]
    return any(arg in (".", path) or path.startswith(f"{arg}/") for arg in asked)
