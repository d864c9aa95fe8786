# SPDX-License-Identifier: Apache-2.0
"""Compiles in haste and keeps what was compiled: most tests train the same two models again."""

from collections.abc import Iterator
from pathlib import Path

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache


@pytest.fixture(scope="session")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("programs")


@pytest.fixture(scope="module", autouse=True)
def compiled_once(programs: Path) -> Iterator[None]:
    settings = {
        "jax_compilation_cache_dir": str(programs),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
        "jax_disable_most_optimizations": True,
    }
    before = {name: jax.config.values[name] for name in settings}
    for values in (settings, before):
        compilation_cache.reset_cache()
        for name, value in values.items():
            jax.config.update(name, value)
        if values is settings:
            yield
