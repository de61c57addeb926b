"""Checks every family of Hugging Face and makes the table of docs/families.md.

    python tools/families_table.py           # prints it
    python tools/families_table.py --write   # puts it into the page

A cell is a test of tests/models/test_families.py, run here (some minutes on two cores). The exit status is 1 if one
fails.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from xml.etree import ElementTree

from megalite.files import replace_text
from megalite.models import FAMILIES

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "families.md"
BEGIN, END = "<!-- made by tools/families_table.py -->", "<!-- end -->"
CHECKS = ("from_hf", "to_hf", "logits", "gradients", "tp2", "pp2")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="replace the tables of docs/families.md")
    arguments = parser.parse_args(argv)
    results = run_checks()
    text = f"{checks_table(results)}\n\n{lines_table()}"
    print(text)
    if arguments.write:
        before, _, rest = PAGE.read_text().partition(BEGIN)
        replace_text(PAGE, f"{before}{BEGIN}\n{text}\n{END}{rest.partition(END)[2]}")
    return 0 if all(results.values()) else 1


def run_checks() -> dict[tuple[str, str], bool]:
    """(family, check) -> whether its test passed."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        names = " or ".join(f"test_{check}[" for check in CHECKS)
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "tests/models/test_families.py",
            "-m",
            "full or not full",
            "-k",
            names,
        ]
        subprocess.run([*command, f"--junit-xml={report}"], cwd=ROOT, check=False, stdout=sys.stderr)
        return parse(report.read_text())


def parse(report: str) -> dict[tuple[str, str], bool]:
    """The same, from a JUnit report."""
    found: dict[tuple[str, str], bool] = {}
    for case in ElementTree.fromstring(report).iter("testcase"):
        match = re.fullmatch(rf"test_({'|'.join(CHECKS)})\[(\w+)\]", case.get("name", ""))
        if match is not None:
            found[match[2], match[1]] = not list(case)
    return found


def checks_table(results: Mapping[tuple[str, str], bool]) -> str:
    """Families by checks."""
    words = {True: "yes", False: "**no**", None: "not run"}
    rows = [
        f"| {family} | {' | '.join(words[results.get((family, check))] for check in CHECKS)} |" for family in FAMILIES
    ]
    return "\n".join([f"| model_type | {' | '.join(CHECKS)} |", "|---" * (1 + len(CHECKS)) + "|", *rows])


def lines_table() -> str:
    """How long the files of the architectures are."""
    files = sorted((ROOT / "megalite" / "models").glob("*.py"))
    rows = [f"| `{file.name}` | {len(file.read_text().splitlines())} |" for file in files if file.name != "__init__.py"]
    return "\n".join(["| megalite/models | lines |", "|---|---|", *rows])


if __name__ == "__main__":
    sys.exit(main())
