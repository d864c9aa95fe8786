# SPDX-License-Identifier: Apache-2.0
"""Who may import whom, how long a file may get, and what `import jaxkv` may load."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LAYERS = (
    *("core", "kernels", "ops", "cache", "attention", "models"),
    *("convert", "generation", "serving", "training", "memory", "cli"),
)
BELOW_FLAX = ("core", "kernels", "ops", "cache")
TEST_TOOLS = ("chex", "hypothesis", "pytest")
HEAVY = ("chex", "matplotlib", "orbax", "rich", "tokenizers", "typer")
LONGEST_FILE = 500
LONGEST_KERNEL = 800


def imports(source: str, package: str) -> Iterator[str]:
    """Yields each imported dotted name, relative ones resolved against `package`."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".")
            base = ".".join(parts[: len(parts) - node.level + 1]) if node.level else ""
            stem = ".".join(filter(None, (base, node.module)))
            yield from (f"{stem}.{alias.name}" for alias in node.names)


def faults(path: str, source: str) -> list[str]:
    """Lists what is wrong with the imports of one file, `path` relative to the repository."""
    package = path.split("/")[:-1]
    layer = package[1] if len(package) > 1 else ""
    if layer and layer not in (*LAYERS, "testing"):
        return [f"{path} is in no layer: {LAYERS}"]
    found = []
    for name in imports(source, ".".join(package)):
        top, *rest = name.split(".")
        if top == "flax" and layer in BELOW_FLAX:
            found.append(f"{path} imports {name}: Flax begins with attention")
        if top in TEST_TOOLS and layer != "testing":
            found.append(f"{path} imports {name}: only testing may")
        if top != "jaxkv" or layer == "testing":
            continue
        target = rest[0] if rest else ""
        if target == "testing":
            found.append(f"{path} imports {name}: nothing imports testing")
        elif layer and target not in LAYERS and layer != "cli":
            found.append(f"{path} imports {name}: name the layer, not the whole package")
        elif layer and target in LAYERS and LAYERS.index(target) > LAYERS.index(layer):
            found.append(f"{path} imports {name}: {target} lies above {layer}")
    return found


def library() -> Iterator[tuple[str, str]]:
    for path in sorted((ROOT / "jaxkv").rglob("*.py")):
        yield path.relative_to(ROOT).as_posix(), path.read_text("utf-8")


def test_library_imports_downwards_only() -> None:
    assert [fault for path, source in library() for fault in faults(path, source)] == []


@pytest.mark.parametrize(
    ("path", "source", "word"),
    [
        ("jaxkv/core/a.py", "from jaxkv.ops import api", "above core"),
        ("jaxkv/core/a.py", "from jaxkv import ops", "above core"),
        ("jaxkv/core/a.py", "import jaxkv.cache.spec", "above core"),
        ("jaxkv/core/a.py", "from ..ops.api import attention", "above core"),
        ("jaxkv/core/a.py", "def f():\n    from jaxkv.cli import main", "above core"),
        ("jaxkv/models/families/a.py", "from ... import memory", "above models"),
        ("jaxkv/ops/a.py", "import jaxkv", "whole package"),
        ("jaxkv/cli/a.py", "import jaxkv.testing", "nothing imports testing"),
        ("jaxkv/__init__.py", "from jaxkv.testing import suite", "nothing imports testing"),
        ("jaxkv/cache/a.py", "from flax import nnx", "Flax begins"),
        ("jaxkv/memory/a.py", "import chex", "only testing may"),
        ("jaxkv/extra/a.py", "", "in no layer"),
    ],
)
def test_lint_sees_each_fault(path: str, source: str, word: str) -> None:
    assert word in " ".join(faults(path, source))


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("jaxkv/ops/a.py", "from jaxkv.core import numerics\nfrom .merge import merge"),
        ("jaxkv/attention/a.py", "from flax import nnx\nfrom ..cache import spec"),
        ("jaxkv/testing/a.py", "import chex\nimport jaxkv\nfrom jaxkv.cli import main"),
        ("jaxkv/__init__.py", "from jaxkv.generation import generate"),
        ("jaxkv/core/__init__.py", "from . import numerics\nfrom .numerics import Numerics"),
    ],
)
def test_lint_lets_good_imports_pass(path: str, source: str) -> None:
    assert faults(path, source) == []


def test_files_stay_short() -> None:
    long = {}
    for path, source in library():
        limit = LONGEST_KERNEL if path.startswith("jaxkv/kernels/") else LONGEST_FILE
        if len(source.splitlines()) > limit:
            long[path] = len(source.splitlines())
    assert long == {}


def test_import_loads_nothing_heavy_of_its_own() -> None:
    """Names the heavy packages that a fresh interpreter has after each statement."""
    statements = ["from flax import nnx", "import jaxkv", "import rich"]
    found = f"print(*(n for n in {HEAVY!r} if n in sys.modules))"
    code = "import sys\n" + "\n".join(f"{line}\n{found}" for line in statements)
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert run.returncode == 0, run.stderr
    flax, ours, rich = (set(line.split()) for line in run.stdout.splitlines())
    assert ours <= flax and "rich" in rich
