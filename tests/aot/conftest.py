# SPDX-License-Identifier: Apache-2.0
"""Every test here needs the TPU compiler and compiles with the precision that users have."""

from collections.abc import Iterator
from pathlib import Path

import jax
import pytest

from jaxkv.testing.aot import require_tpu_compiler

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.tpu_aot)


@pytest.fixture(autouse=True)
def as_users_have_it() -> Iterator[None]:
    require_tpu_compiler()
    with jax.default_matmul_precision("default"):
        yield


@pytest.fixture(scope="module", autouse=True)
def compiled_in_haste() -> None:
    """Overrides the root's fixture: these tests compile with the effort that users get."""
