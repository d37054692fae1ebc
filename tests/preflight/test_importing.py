"""A job's module must not wake JAX when it is imported: looked at in a process of its own."""

from __future__ import annotations

import json

import pytest

from tpupipe.preflight.importing import import_alone
from tpupipe.resolve import jax_is_awake


@pytest.fixture
def module(world):
    """Writes a job module that begins with some code; gives its name."""
    return lambda before: world.job(before=before)


def test_jax_may_be_imported(module):
    """Importing it is harmless; looking for devices is what counts."""
    report = import_alone(module("import jax\n"))
    assert (report.error, report.jax_imported, report.jax_awake) == ("", True, False)
    assert report.seconds > 0


@pytest.mark.parametrize("call", ["jax.devices()", "jax.random.key(0)"])
def test_touching_jax_at_import_is_an_error_that_explains_the_order(world, module, call):
    """The number of devices would silently be the driver's; status 3, this process's JAX stays as it was.

    https://github.com/jax-ml/jax/issues/17188
    """
    awake = jax_is_awake()
    done = world.check(module(f"import jax\nN = {call}\n"), "--json", "--only", "job", "--only", "topology")
    assert done.exit_code == 3
    findings = {f["check"]: f for f in json.loads(done.stdout)["findings"]}
    assert findings["job.import"]["status"] == "failure"
    assert (
        "made JAX look for devices in the driver, before the slice's processes exist"
        in findings["job.import"]["message"]
    )
    assert "Move jax.devices(), jax.random" in findings["job.import"]["hint"]
    assert findings["job.map"]["status"] == findings["topology.mesh"]["status"] == "skipped"
    assert findings["topology.slice"]["status"] == "ok"  # what needs no job is looked at all the same
    assert jax_is_awake() is awake


def test_what_the_module_prints_is_not_the_report(module):
    """Lines on stdout at import, also JSON."""
    report = import_alone(module("print('{}')\n"))
    assert (report.error, report.jax_awake) == ("", False)


def test_an_import_that_hangs_is_an_error(module):
    """Bounded, and the bound is told."""
    report = import_alone(module("import threading\nthreading.Event().wait()\n"), timeout_s=2.0)
    assert "did not end in 2 s" in report.error
    assert not report.usage
