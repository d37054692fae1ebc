"""The real TPU compiler: jobs compiled for slices that are not here. Skipped where libtpu is not installed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tpupipe.config import Config, child_variables, load_config
from tpupipe.errors import CheckFailedError
from tpupipe.hardware.slices import SliceSpec
from tpupipe.preflight import aot
from tpupipe.preflight.aot import aot_findings, compile_programs
from tpupipe.preflight.findings import Status
from tpupipe.preflight.refusals import Reason
from tpupipe.preflight.told import status_of, told
from tpupipe.resolve import load_build, resolve

ROOT = Path(__file__).parents[2]
JOB = "tests.preflight.aot_jobs"
GIB = 2**30

real = pytest.mark.skipif(not aot.compiler_installed(), reason="libtpu is not installed: pip install 'tpupipe[tpu]'")


@pytest.fixture(autouse=True)
def _at_the_root(monkeypatch):
    monkeypatch.chdir(ROOT)


@pytest.fixture
def configured(tmp_path):
    """Configurations of the test job: ``configured("job.width=8")``."""
    folder = tmp_path / "in"
    folder.mkdir()
    for name in "abc":
        (folder / f"{name}.txt").write_text("text", encoding="utf-8")
    path = tmp_path / "c.yaml"
    text = {"store": f"file://{tmp_path}/s", "cluster": {"kind": "tpu", "generation": "v6e", "topology": "4x4"}}
    path.write_text(json.dumps({**text, "job": {"folder": str(folder)}}), encoding="utf-8")

    def make(*overrides: str) -> Config:
        return resolve(load_build(JOB), [path], overrides)[1]

    return make


DIRECT = """
import json, sys
import jax, numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from jobs.stdlib_lm import Params, TinyLM

params = Params()
model = TinyLM(params.width, params.layers, params.heads, params.steps)
mesh = Mesh(np.array(topologies.get_topology_desc("v6e:4x4", "tpu").devices), ("data",))
all, rows = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))
state = jax.eval_shape(model.init, jax.random.key(0))
state = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=all), state)
batch = {
    "tokens": jax.ShapeDtypeStruct((params.batch_size, params.seq_len + 1), np.uint8, sharding=rows),
    "mask": jax.ShapeDtypeStruct((params.batch_size,), bool, sharding=rows),
}
memory = jax.jit(model.train_step, donate_argnums=0, out_shardings=all).lower(state, batch).compile().memory_analysis()
json.dump({name: getattr(memory, name + "_size_in_bytes") for name in ("argument", "output", "temp", "alias")}, sys.stdout)
"""


@real
def test_the_demo_on_the_production_slice_agrees_with_the_compilers_own_analysis():
    """The findings name v6e 4x4 with 16 devices; memory is what JAX says of the same step, written out by hand."""
    config = resolve(load_build("jobs.stdlib_lm"), ["configs/v6e-16.yaml"])[1]
    train, infer = aot_findings("jobs.stdlib_lm", config)
    assert (train.check, train.status) == ("aot.lm", Status.OK)
    assert "v6e 4x4 (16 devices)" in train.message
    assert "a bound, not a prediction" in train.message
    [program] = train.facts["programs"]
    direct = subprocess.run(
        [sys.executable, "-c", DIRECT], check=True, capture_output=True, env=child_variables(aot.CHILD_VARIABLES)
    )
    memory = json.loads(direct.stdout)
    found = program["memory_bytes"]
    assert {name: found[name] for name in ("argument", "output", "alias")} == {
        name: memory[name] for name in ("argument", "output", "alias")
    }
    assert found["temporary"] == memory["temp"]
    assert program["hbm_share"] == found["total"] / (32 * GIB)
    # 6 x parameters x tokens and causal attention's two products, forward and twice backward: 2 rows of 128 each.
    parameters, tokens = 2 * 12 * 64 * 64 + 256 * 64, 2 * 128
    assert program["flops"] == 6 * parameters * tokens + 3 * 2 * 2 * (2 * tokens * 128 * 64)
    assert program["collectives"]["all-reduce"]["size_bytes"] > 4 * parameters
    assert infer.check == "aot.nll"
    assert [(p["batch"], p["length"], p["devices"]) for p in infer.facts["programs"]] == [
        (64, n, 4) for n in (32, 64, 128)
    ]


BIG = ("job.width=2048", "job.layers=512")  # 16 GiB of state


@real
def test_too_large_for_one_slice_and_right_for_another_with_fsdp(configured):
    """It fails naming what it needs and what there is, its largest leaves and fsdp; with fsdp on 16 devices it fits."""
    config = configured(*BIG, "cluster.generation=v5e", "cluster.topology=2x2")
    [small] = aot_findings(JOB, config)
    assert (small.check, small.status) == ("aot.fit", Status.FAILURE)
    assert "v5e 2x2 (4 devices)" in small.message
    assert "15.75 GiB is available" in small.message
    [program] = small.facts["programs"]
    assert program["refusal"]["reason"] == "out_of_memory"
    assert program["refusal"]["needed_bytes"] > program["refusal"]["available_bytes"] == round(15.75 * GIB)
    assert [each["what"] for each in program["largest"][:2]] == ["state['momentum']", "state['params']"]
    assert [each["size_bytes"] for each in program["largest"][:2]] == [8 * GIB, 8 * GIB]
    assert "fsdp" in small.hint

    [large] = aot_findings(JOB, configured(*BIG, "stages.fit.sharding=fsdp"))
    assert large.status is Status.OK
    [program] = large.facts["programs"]
    assert program["devices"] == 16
    assert program["state_bytes"] == 1 * GIB
    assert GIB <= program["memory_bytes"]["argument"] < 1.1 * GIB
    assert program["collectives"]["all-gather"]["count"] >= 1


@real
def test_an_operation_that_a_tpu_does_not_have_is_named_with_its_line(configured):
    [finding] = aot_findings(JOB, configured("job.operation=eig"))
    lines = (ROOT / "tests/preflight/aot_jobs.py").read_text(encoding="utf-8").splitlines()
    line = next(number for number, text in enumerate(lines, 1) if "jnp.linalg.eig(" in text)
    assert finding.status is Status.FAILURE
    assert f"operation eig at {ROOT}/tests/preflight/aot_jobs.py:{line}" in finding.message


@real
def test_a_compiler_that_aborts_does_not_take_the_others_with_it(configured):
    """The step makes it abort; both buckets of the stage after it are compiled all the same."""
    fit, score = aot_findings(JOB, configured("job.operation=abort", "job.infer=true"))
    assert fit.status is Status.FAILURE
    assert "SIGABRT: Check failed" in fit.message
    assert fit.facts["programs"][0]["refusal"]["operation"] == "cholesky"
    assert score.status is Status.OK
    assert [each["length"] for each in score.facts["programs"]] == [4, 8]


@real
def test_targets_batches_and_time_outs(configured):
    """Two slices: v7x has two devices a chip; a batch that does not divide is that row's own; then no time at all."""
    targets = [SliceSpec("v7x", "2x2x1"), SliceSpec("v6e", "1x1"), SliceSpec("v6e", "2x2", slices=2)]
    found = compile_programs(JOB, configured(), targets, batches=[12, 16]).programs
    assert [(p.batch, status_of(p)) for p in found] == [
        (12, Status.FAILURE), (16, Status.OK), (12, Status.OK), (16, Status.OK), (12, Status.FAILURE), (16, Status.OK),
    ]  # fmt: skip
    assert found[0].refusal.reason is Reason.TARGET
    assert "batch_size=12 does not divide over 8 devices" in told(found[0])
    assert (found[1].devices, found[1].devices_per_chip, found[1].hbm_bytes) == (8, 2, 96 * GIB)
    assert found[2].devices == 1
    assert (found[5].devices, found[5].processes) == (8, 2)
    assert "network between slices is not modelled" in found[5].notes[0]

    [program] = compile_programs(JOB, configured(), targets[1:2], compile_timeout_s=0.001).programs
    assert program.refusal.reason is Reason.TIMEOUT


@real
def test_a_job_that_cannot_be_loaded_or_fed(configured, tmp_path):
    config = configured()
    [finding] = aot_findings("tests.preflight.no_such_job", config)
    assert (finding.check, finding.status) == ("aot.job", Status.FAILURE)
    assert "no_such_job" in finding.message
    empty = config.model_copy(update={"job": {**config.job, "folder": str(tmp_path / "empty")}})
    with pytest.raises(CheckFailedError, match="empty"):
        compile_programs(JOB, empty, [SliceSpec("v6e", "1x1")])


def test_without_the_compiler_it_is_skipped(monkeypatch, configured):
    monkeypatch.setattr(aot, "compiler_installed", lambda: False)
    [finding] = aot_findings(JOB, configured())
    assert (finding.check, finding.status) == ("aot.compiler", Status.SKIPPED)
    assert "tpupipe[tpu]" in finding.hint


def test_gpus_have_no_tpu_compiler():
    [finding] = aot_findings(JOB, load_config([ROOT / "configs/gpu.yaml"]))
    assert (finding.check, finding.status) == ("aot.target", Status.SKIPPED)
