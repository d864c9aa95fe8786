# SPDX-License-Identifier: Apache-2.0
"""Leaves for `-m full` what one variant's suite would only show again."""

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks the tests that a class names in `in_full`, by the start of their names."""
    for item in items:
        named = getattr(getattr(item, "cls", None), "in_full", ())
        if named and item.name.startswith(tuple(named)):
            item.add_marker(pytest.mark.full)
