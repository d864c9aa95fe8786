# SPDX-License-Identifier: Apache-2.0
"""Holds tests/CASES.md against the tests that are really there."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
NUMBERS = {
    "MSK": "01 02 04 05 08 09 10 11",
    "NAN": "01 02 03 06 07 09 10 11 12",
    "NUM": "01 03 04 05 06 07 10",
    "FLA": "01 02 05 07 09 10 11 12",
    "CAC": "01 03 04 05 06 08 10 11",
    "ROW": "01 04 05 06 08",
    "WIN": "01 04 05 06 08 09 10 13 14",
    "ROP": "01 03 06 08 09 10 11 12 13",
    "MLA": "01 02 03 04 05 08",
    "GQA": "01 03 05 06",
    "PAG": "01 03 05 06 09 10 11 12",
    "PFX": "01 02 04 05 06 08 10 11",
    "CHK": "01 03 04 06 07",
    "ZER": "01 03 05 06",
    "QNT": "01 03 05 07 09 10 11 12",
    "SHD": "01 02 05 07 08",
    "JAX": "01 02 04 05 06 07 09 11 12 14 16 17 19",
    "DRP": "01 03",
    "SCO": "01 02 04 06 07",
    "IMP": "01 02 04 06 09 10 11",
    "SPC": "01 03 05 06 07 08 09",
    "PAK": "01 03 05",
    "MEM": "01 02 03 05 06 09 11 13 14 15 17 19 20 21",
}
IDS = [f"{group}-{number}" for group, numbers in NUMBERS.items() for number in numbers.split()]
ROW = re.compile(r"\| ([A-Z]{3}-\d\d) \| ([^|]+) \| ([^|]+) \|")
CASE_TEST = re.compile(rf"test_({'|'.join(NUMBERS).lower()})_(\d\d)_\w+")


def listed() -> list[tuple[str, str]]:
    """Reads the rows of the list as pairs of id and last cell."""
    text = (ROOT / "tests" / "CASES.md").read_text("utf-8")
    return [(row[1], row[3].strip()) for line in text.splitlines() if (row := ROW.fullmatch(line))]


def defined() -> set[str]:
    """Finds the test functions and methods named after a case, here and in the public suite."""
    names = set()
    for folder in ("tests", "jaxkv/testing"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text("utf-8"))):
                if isinstance(node, ast.FunctionDef) and CASE_TEST.fullmatch(node.name):
                    names.add(node.name)
    return names


def case_of(test: str) -> str:
    """Turns `test_msk_01_decode` into `MSK-01`."""
    match = CASE_TEST.fullmatch(test)
    return f"{match[1].upper()}-{match[2]}" if match else ""


def test_every_case_is_listed_once_and_in_order() -> None:
    assert [case for case, _ in listed()] == IDS


def test_every_row_names_a_test_or_what_it_waits_for() -> None:
    pattern = re.compile(r"((`test_\w+`(, )?)+)?(; )?((open|not here): \S.+)?")
    assert [(case, cell) for case, cell in listed() if not pattern.fullmatch(cell)] == []


def test_list_and_tests_agree() -> None:
    in_list = {(case, test) for case, cell in listed() for test in re.findall(r"test_\w+", cell)}
    in_tests = {(case_of(test), test) for test in defined()}
    assert sorted(in_tests - in_list) == [], "add these tests to tests/CASES.md"
    assert sorted(in_list - in_tests) == [], "tests/CASES.md names tests that are not there"
