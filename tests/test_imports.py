"""Importing the package is cheap, and rooms import downwards only."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def run_python(code: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()


def test_import_tpupipe_loads_neither_ray_nor_jax():
    """Nor what is as heavy: those are imported by the functions that use them."""
    heavy = {"ray", "jax", "jaxlib", "orbax", "tensorstore", "pyarrow", "pandas", "fsspec", "gcsfs", "google.cloud"}
    assert run_python(f"import sys, tpupipe; print(sorted({heavy!r} & set(sys.modules)))") == "[]"


def test_import_tpupipe_takes_less_than_a_third_of_a_second():
    """0.3 s of CPU time at most; the best of five, as a busy machine only ever adds."""
    code = "import time; start = time.process_time(); import tpupipe; print(time.process_time() - start)"
    best_s = min(float(run_python(code)) for _ in range(5))
    assert best_s < 0.3


def test_import_tpupipe_has_no_side_effects():
    """No thread is started, no environment variable changed, no logger configured, nothing printed."""
    code = """
import logging, os, threading
before = dict(os.environ), threading.active_count(), list(logging.getLogger().handlers)
import tpupipe
print((dict(os.environ), threading.active_count(), list(logging.getLogger().handlers)) == before)
"""
    assert run_python(code) == "True"


def environment_reads(tree: ast.AST) -> list[int]:
    """Line numbers that look a variable up; writing one, or handing all of them to a child, is not reading."""
    found = []
    for node in ast.walk(tree):
        looks_up = isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load)
        text = ast.unparse(node.value if looks_up else node.func) if looks_up or isinstance(node, ast.Call) else ""
        if (looks_up and text == "os.environ") or text in ("os.environ.get", "os.getenv", "os.environ.items"):
            found.append(node.lineno)
    return found


def test_only_the_configuration_reads_environment_variables():
    """One place knows every variable; the others take values as arguments."""
    readers = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in sorted((ROOT / "tpupipe").rglob("*.py"))
        if path.parent.name != "config"
        for line in environment_reads(ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert readers == []


def test_rooms_import_downwards_only():
    """The contracts in pyproject.toml hold: layers, who may import Ray, jobs use public names only."""
    lint = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run([lint, "--no-cache"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
