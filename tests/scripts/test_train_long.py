# SPDX-License-Identifier: Apache-2.0
"""The comparison of training runs on long rows: a real run, and when curves count as equal."""

from pathlib import Path

import pytest
import train_long
import typer

CURVE = [5.5, 5.0, 4.0]


def test_a_run_is_that_of_the_command_line(tmp_path: Path) -> None:
    run = train_long.trained("blockwise", 48, 2, 3, tmp_path, ["--size", "tiny"])
    assert len(run.losses) == 3 and 4 < run.losses[-1] < run.losses[0] < 7
    # A process that holds jax is larger than 100 MiB, and this one trains next to nothing.
    assert 100 < run.peak < 4000 and run.speed > 0
    with pytest.raises(SystemExit, match="'nobody'"):
        train_long.trained("nobody", 48, 2, 3, tmp_path, ["--size", "tiny"])


@pytest.mark.parametrize(
    ("other", "inside"),
    [
        ([0, 0, 0], True),
        ([1e-6, 1e-5, 3e-3], True),  # 4 times the noise of 1e-3, and the loss's own rounding
        ([1e-5, 0, 0], False),  # no noise yet
        ([0, 0, 5e-3], False),
    ],
)
def test_curves_may_differ_by_what_rounding_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other: list[float], inside: bool
) -> None:
    moved = {"einsum": [0, 0, 0], "reference": [0, 1e-5, 1e-3], "blockwise": other}

    def trained(name: str, *_: object) -> train_long.Run:
        losses = [a + b for a, b in zip(CURVE, moved[name], strict=True)]
        return train_long.Run(name, losses, 100.0, 1.0)

    monkeypatch.setattr(train_long, "trained", trained)
    if inside:
        train_long.main(output=tmp_path)
    else:
        with pytest.raises(typer.Exit):
            train_long.main(output=tmp_path)
    assert (tmp_path / "long-2048.json").exists()
