# SPDX-License-Identifier: Apache-2.0
"""Settings for every test and doctest; pytest loads this before any module makes an array."""

import gc
import itertools
import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from collections.abc import Iterator
from pathlib import Path

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_default_matmul_precision", "highest")

# The first example of a shape compiles: a time limit per example would measure the compiler.
hypothesis.settings.register_profile("jaxkv", deadline=None, derandomize=True)
hypothesis.settings.load_profile("jaxkv")


@pytest.fixture(autouse=True)
def doctest_names(doctest_namespace: dict[str, object]) -> None:
    """Gives docstring examples the three names that they all need."""
    doctest_namespace.update(jax=jax, jnp=jnp, np=np)


@pytest.fixture(scope="session")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Makes the folder where this process keeps what it compiled."""
    return tmp_path_factory.mktemp("programs")


@pytest.fixture(scope="module", autouse=True)
def compiled_in_haste(request: pytest.FixtureRequest, programs: Path) -> Iterator[None]:
    """Compiles with little effort and keeps what was compiled: most tests wait for the compiler.

    A module marked `as_shipped` looks at compiled programs and gets those that users get.
    """
    if request.node.get_closest_marker("as_shipped") is not None:
        yield
        jax.clear_caches()
        return
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
            jax.clear_caches()


@pytest.fixture(autouse=True)
def maps_left(tests_run: Iterator[int]) -> Iterator[None]:
    """Forgets programs, each with memory maps of its own, before Linux has no more to give.

    A process may have 65,530 maps, and crashes at the next; a long module comes that far.
    """
    yield
    maps = Path("/proc/self/maps")
    if next(tests_run) % 16 == 0 and maps.exists():
        with maps.open("rb") as lines:
            if sum(1 for _ in lines) > 20_000:
                jax.clear_caches()


@pytest.fixture(scope="session")
def tests_run() -> Iterator[int]:
    """Counts the tests of this process."""
    return itertools.count(1)


IN_FULL = pytest.StashKey[list[tuple[str, list[str]]]]()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Starts with the notebooks, one of which takes a minute that others can fill.

    What `tests/in_full.txt` lists is marked `full`.
    """
    lines = (Path(__file__).parent / "tests" / "in_full.txt").read_text().splitlines()
    found: list[tuple[str, list[str]]] = [(x, []) for x in lines if not x.startswith("#")]
    listed = tuple(line for line, _ in found)
    for item in items:
        if item.nodeid.startswith(listed):
            item.add_marker("full")
            for line, tests in found:
                if item.nodeid.startswith(line):
                    tests.append(item.nodeid)
    config.stash[IN_FULL] = found
    items.sort(key=lambda item: item.get_closest_marker("notebook") is None)


@pytest.fixture(scope="session")
def in_full(pytestconfig: pytest.Config) -> list[tuple[str, list[str]]]:
    """Lists the tests that were found for each line of `tests/in_full.txt`."""
    return pytestconfig.stash[IN_FULL]


def pytest_collection_finish() -> None:
    """Leaves what the imports made out of every later collection of garbage."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)
