# SPDX-License-Identifier: Apache-2.0
"""Runs the tests of this folder with every implementation."""

from typing import Any

import pytest

from tests.ops.suite import IMPLEMENTATIONS, KERNELS

IN_FULL = [pytest.param(name, marks=pytest.mark.full) for name in KERNELS]


@pytest.fixture(params=[*IMPLEMENTATIONS, *IN_FULL])
def implementation(request: pytest.FixtureRequest) -> Any:
    """Gives the implementation under test."""
    return (IMPLEMENTATIONS | KERNELS)[request.param]
