# SPDX-License-Identifier: Apache-2.0
"""Runs the tests of this folder with every implementation."""

import pytest

from tests.ops.suite import IMPLEMENTATIONS


@pytest.fixture(params=list(IMPLEMENTATIONS))
def implementation(request: pytest.FixtureRequest) -> str:
    """Names the implementation under test."""
    return request.param
