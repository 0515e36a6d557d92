"""Rules of the tree itself: nothing shadows the standard library, and the size limits hold."""

from __future__ import annotations

import ast
import importlib.metadata
import operator
import re
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ("operator", "worker_image", "tests", "benchmarks")
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
MAX_ARCHITECTURE_LINES = 100


def python_files() -> list[Path]:
    return [f for folder in SOURCES for f in sorted((ROOT / folder).rglob("*.py"))]


def functions(file: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def too_long_functions(file: Path) -> list[str]:
    return [
        f"{file.relative_to(ROOT)}:{f.lineno} {f.name}: {f.end_lineno - f.lineno + 1} lines"
        for f in functions(file)
        if f.end_lineno is not None and f.end_lineno - f.lineno + 1 > MAX_FUNCTION_LINES
    ]


def swallowed_exceptions(file: Path) -> list[str]:
    return [
        f"{file.relative_to(ROOT)}:{node.lineno}"
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.ExceptHandler)
        and len(node.body) == 1
        and isinstance(node.body[0], ast.Pass)
    ]


def test_operator_is_the_standard_librarys() -> None:
    assert Path(operator.__file__ or "").parent == Path(sysconfig.get_paths()["stdlib"])


def test_a_fresh_interpreter_in_the_root_finds_the_standard_library() -> None:
    program = "import operator, collections; print(operator.__file__)"
    found = subprocess.run(
        [sys.executable, "-S", "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert not Path(found.stdout.strip()).is_relative_to(ROOT / "operator")


@pytest.mark.parametrize("folder", ["operator", "worker_image"])
def test_no_module_lies_directly_in_a_source_root(folder: str) -> None:
    assert list((ROOT / folder).glob("*.py")) == []


def test_tests_are_no_package() -> None:
    assert list((ROOT / "tests").rglob("__init__.py")) == []


def test_no_file_is_too_long() -> None:
    long = {str(f.relative_to(ROOT)): len(f.read_text().splitlines()) for f in python_files()}
    assert {f: n for f, n in long.items() if n > MAX_FILE_LINES} == {}


def test_no_function_is_too_long() -> None:
    assert [line for f in python_files() for line in too_long_functions(f)] == []


def test_no_exception_is_swallowed() -> None:
    assert [line for f in python_files() for line in swallowed_exceptions(f)] == []


def test_every_module_says_what_it_is_for() -> None:
    missing = [
        str(f.relative_to(ROOT))
        for f in python_files()
        if f.read_text().strip() and not ast.get_docstring(ast.parse(f.read_text()))
    ]
    assert missing == []


def test_architecture_page_stays_short() -> None:
    lines = (ROOT / "docs/architecture.md").read_text().splitlines()
    assert len(lines) <= MAX_ARCHITECTURE_LINES


def test_changelogs_newest_version_is_the_packages() -> None:
    versions = re.findall(r"^## \[(\d[^\]]*)\]", (ROOT / "CHANGELOG.md").read_text(), re.M)
    version = importlib.metadata.version("tpinference")
    assert versions[:1] in ([], [version])
    assert "## [Unreleased]" in (ROOT / "CHANGELOG.md").read_text()
