# SPDX-License-Identifier: Apache-2.0
"""What a user reads when an extra is missing."""

import json
import sys
import tomllib
from pathlib import Path

import pytest

from jaxkv.core.extras import require


def test_installed_module_comes_back() -> None:
    assert require("json", extra="cli") is json


@pytest.mark.parametrize("module", ["jaxkv_no_such_module", "jaxkv_no_such_module.inner"])
def test_missing_module_names_its_install_line(module: str) -> None:
    with pytest.raises(ImportError) as caught:
        require(module, extra="cli")
    text = str(caught.value)
    assert module in text
    assert 'pip install "jaxkv[cli]"' in text


def test_missing_submodule_of_an_installed_package_names_the_install_line() -> None:
    with pytest.raises(ImportError, match=r"json\.no_such_part .*jaxkv\[train\]"):
        require("json.no_such_part", extra="train")


def test_fault_inside_an_installed_module_is_not_hidden(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "jaxkv_half_installed.py").write_text("import jaxkv_no_such_dependency\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ModuleNotFoundError, match="jaxkv_no_such_dependency") as caught:
        require("jaxkv_half_installed", extra="cli")
    assert "pip install" not in str(caught.value)
    assert "jaxkv_half_installed" not in sys.modules


def test_every_extra_named_in_the_code_exists() -> None:
    root = Path(__file__).parents[2]
    extras = tomllib.loads((root / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    for path in (root / "jaxkv").rglob("*.py"):
        for part in path.read_text().split('extra="')[1:]:
            assert part.split('"')[0] in extras, path
