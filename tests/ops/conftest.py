# SPDX-License-Identifier: Apache-2.0
"""Runs the tests of this folder with every implementation."""

from typing import Any

import pytest

from tests.ops.suite import IMPLEMENTATIONS


@pytest.fixture(params=list(IMPLEMENTATIONS))
def implementation(request: pytest.FixtureRequest) -> Any:
    """Gives the implementation under test."""
    return IMPLEMENTATIONS[request.param]
