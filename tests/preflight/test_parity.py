"""The check of whole stages from real inputs: what passes, what fails and what it names."""

from __future__ import annotations

import dataclasses
import inspect
import json
from pathlib import Path

import numpy as np
import pytest

from jobs import digits, stdlib_lm
from tpupipe import Buckets, Files, Infer, Job, JsonLines, Preprocess, Pretrained, Train
from tpupipe.config import Config, ParityConfig
from tpupipe.preflight.findings import Status
from tpupipe.preflight.parity import judge, parity_findings
from tpupipe.preflight.parity_data import Inputs, inference_batches, training_batches
from tpupipe.preflight.parity_measure import (
    Difference,
    LevelReport,
    Measured,
    StageReport,
    fitted_growth,
    metric_differences,
    output_difference,
)
from tpupipe.preflight.parity_operations import Operation
from tpupipe.preflight.parity_precision import Level

CONFIG = Config.model_validate({"store": {"uri": "/nowhere"}, "cluster": {"kind": "gpu", "gpus": 1}})
QUICK = ParityConfig(batches=1, rows=8, steps=5)


def check(job, options=QUICK, **more):
    found = parity_findings(job, CONFIG, options=options, **more)
    assert json.dumps([finding.facts for finding in found], allow_nan=False)
    return {finding.check: finding for finding in found}


@pytest.fixture
def lines(tmp_path: Path) -> JsonLines:
    """Rows with 16 numbers and a target, and a ragged list."""
    rng = np.random.default_rng(0)
    rows = [{"x": rng.normal(size=16).tolist(), "y": float(rng.normal()), "t": [1.5] * (i % 7 + 1)} for i in range(40)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return JsonLines(f"{tmp_path}/*.jsonl")


def numbers(batch):
    return {"x": np.stack(batch["x"]).astype(np.float32), "y": np.asarray(batch["y"], np.float32)}


def init(key):
    import jax

    return {"w": jax.random.normal(key, (16, 8)) / 4, "v": jax.random.normal(key, (8,))}


def predicted(params, x):
    import jax.numpy as jnp

    return jnp.tanh(x @ params["w"]) @ params["v"]


def centred(params, x):
    """As ``predicted``, of rows that were shifted far away and back: by a product, which takes the shift out again."""
    import jax.numpy as jnp

    far = jnp.concatenate([x + 3000, jnp.full_like(x, -3000)], axis=1)
    back = far @ jnp.concatenate([params["w"], params["w"]])  # the planted one
    return jnp.tanh(back) @ params["v"]


def stepping(model, rate=0.05):
    def step(params, batch):
        import jax

        def loss(params):
            return ((model(params, batch["x"]) - batch["y"]) ** 2 * batch["mask"]).sum() / batch["mask"].sum()

        value, gradients = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - rate * g, params, gradients), {"loss": value}

    return step


def job_of(source, step=None, **inference):
    stages = [
        Preprocess("rows", source, map=numbers),
        Train("fit", "rows", init, step or stepping(predicted), batch_size=8, steps=20),
    ]
    if inference:
        stages.append(Infer("score", "rows", **{"params": "fit", **inference}))
    return Job("job", stages)


def line_of(function, text):
    source, first = inspect.getsourcelines(function)
    return first + next(i for i, each in enumerate(source) if text in each)


def test_a_well_conditioned_job_passes(lines):
    """Training and inference are fine, and say by how much they are off, and from what parameters."""
    found = check(job_of(lines, apply=lambda p, b: {"score": predicted(p, b["x"])}))
    assert {name: each.status for name, each in found.items()} == {"parity.fit": Status.OK, "parity.score": Status.OK}
    assert "loss is 0." in found["parity.fit"].message
    assert "init" in found["parity.score"].message
    levels = found["parity.fit"].facts["levels"]
    errors = [levels[name]["differences"]["loss"]["relative"] for name in ("default", "high")]
    assert 1e-2 > errors[0] > 10 * errors[1]
    assert levels["default"]["cosine"] > 0.999
    assert len(found["parity.fit"].facts["growth"]["series"]) == 5


def test_a_planted_cancellation_fails_with_its_line(lines):
    """In training and in inference: the product, its file and line, and how much is cancelled."""
    found = check(job_of(lines, stepping(centred), apply=lambda p, b: {"score": centred(p, b["x"])}))
    place = f"test_parity.py:{line_of(centred, 'the planted one')}"
    for each in found.values():
        assert each.status is Status.FAILURE
        assert f"{place} (centred)" in each.message
        assert 'precision="highest"' in each.hint
        default = each.facts["levels"]["default"]
        assert place in default["first"]["where"]
        assert place in default["worst_products"][0]["where"]
        assert default["worst_products"][0]["condition"] > 1000


def test_it_passes_with_the_precision_that_the_hint_names(lines):
    """precision="highest" on that product, or the context manager around all of it, mends the job."""
    import jax

    def mended(params, x):
        with jax.default_matmul_precision("highest"):
            return centred(params, x)

    assert check(job_of(lines, stepping(mended)))["parity.fit"].status is Status.OK


def test_a_cancellation_outside_a_product_is_the_first_operation(lines):
    """Two good products whose difference cancels: the metric fails, and the subtraction's line is named as the first."""

    def subtracted(params, x):
        shifted = (x + 1000) @ params["w"]
        return (shifted - 1000 * params["w"].sum(0)) @ params["v"]  # cancels

    [found] = check(job_of(lines, stepping(subtracted, 1e-6))).values()
    assert found.status is Status.FAILURE
    first = found.facts["levels"]["default"]["first"]
    assert first["operation"] == "sub"
    assert f"test_parity.py:{line_of(subtracted, '# cancels')}" in first["where"]
    assert first["where"] in found.message


def test_a_difference_that_grows_fails():
    """Each step of this training triples whatever it is given; the factor over the steps is told."""
    report = StageReport(
        "lm", (LevelReport(Level.DEFAULT, (), (Difference("loss", 0.001, 0.01),), 0.99),),
        fitted_growth([1e-4 * 3**t for t in range(8)]),
    )  # fmt: skip
    found = judge(report, ParityConfig())
    assert found.status is Status.FAILURE
    assert "grows 2.19e+03-fold over 8 steps" in found.message
    small = dataclasses.replace(report, growth=fitted_growth([1e-7 * 3**t for t in range(8)]))
    assert judge(small, ParityConfig()).status is Status.WARNING
    assert judge(report, ParityConfig(growth=1e4)).status is Status.OK


def test_chaos_is_seen_over_the_steps(lines):
    """A state that goes on by itself, x -> 3.9 x (1 - x): single steps agree, two trainings part company."""

    def chaotic(params, batch):
        import jax.numpy as jnp

        mixed = jnp.eye(8) @ params["v"]
        after = 3.9 * mixed * (1 - mixed)
        return {"w": params["w"], "v": after}, {"mean": after.mean() + batch["x"].sum() * 0}

    job = Job(
        "job", [job_of(lines).stages[0], Train("fit", "rows", lambda _: start(), chaotic, batch_size=8, steps=30)]
    )
    [found] = check(job, ParityConfig(batches=1, rows=8, steps=12, growth=5)).values()
    assert found.status is Status.FAILURE
    assert "steps" in found.message
    assert found.facts["growth"]["factor"] > 5


def start():
    import jax.numpy as jnp

    return {"w": jnp.zeros((1,)), "v": jnp.linspace(0.11, 0.87, 8)}


@pytest.mark.soak  # the same as the five-minute example below, on the larger model
def test_the_demo_model_passes():
    """The training step and the scoring of jobs.stdlib_lm, smaller, on real text: no failure, no warning."""
    job = stdlib_lm.build(stdlib_lm.Params(width=16, layers=2, heads=2, seq_len=32, batch_size=8))
    config = CONFIG.model_copy(update={"sample": "1%"})
    found = parity_findings(job, config, options=QUICK, levels=(Level.DEFAULT,))
    assert [(each.check, each.status) for each in found] == [("parity.lm", Status.OK), ("parity.nll", Status.OK)]
    worst = found[0].facts["levels"]["default"]["worst_products"][0]
    assert 1e-3 < worst["own_error"] < 1e-2
    assert "stdlib_lm.py:" in worst["where"]


def test_the_five_minute_example_passes():
    """jobs.digits: its digits are whole numbers, of which the share that differs counts."""
    found = check(digits.build(digits.Params()))
    assert {each.status for each in found.values()} == {Status.OK}
    differences = found["parity.classified"].facts["levels"]["default"]["differences"]
    assert differences["digit"]["share_of_values"] is True


def test_parameters_from_files(lines, tmp_path):
    """Pretrained parameters are loaded, and the finding does not speak of others."""
    np.save(tmp_path / "w.npy", np.eye(16, dtype=np.float32))
    params = Pretrained(str(tmp_path / "w.npy"), lambda data: np.frombuffer(data[-1024:], np.float32).reshape(16, 16))
    job = Job("job", [
        Preprocess("rows", lines, map=numbers),
        Infer("score", "rows", params=params, apply=lambda p, b: {"x": b["x"] @ p}),
    ])  # fmt: skip
    [found] = check(job).values()
    assert found.status is Status.OK
    assert found.facts["notes"] == []
    assert found.facts["levels"]["default"]["differences"]["x"]["relative"] == pytest.approx(0.0017, rel=0.5)


def test_batches_of_training_are_the_streams(lines):
    """The rows of the units in the order of the seed, with a mask; asked for more than there are, read again."""
    job = job_of(lines)
    inputs = Inputs(job, "100%", {})
    batches = training_batches(job.stage("fit"), inputs, rows=8, count=10)
    assert [set(batch) for batch in batches] == [{"x", "y", "mask"}] * 10
    values = np.concatenate([batch["y"] for batch in batches])
    assert len(set(values.tolist())) == 40
    assert sorted(values[:40]) == sorted(values[40:]) == sorted(set(values.tolist()))


def test_batches_of_inference_are_of_the_buckets(lines):
    """Ragged rows are padded to declared or chosen lengths, from the longest; each real row is as it was."""
    for buckets in (Buckets((4, 8), column="t"), Buckets.auto(max=2, multiple=4, column="t")):
        stage = Infer("s", lines, "fit", apply=lambda _, b: b, buckets=buckets, map=lambda b: {"t": b["t"]})
        batches = inference_batches(stage, Inputs(None, "100%", {}), rows=4, count=3)
        assert [batch["t"].shape[1] for batch in batches] == [8, 8, 4] or batches[0]["t"].shape == (4, 8)
        for batch in batches:
            assert batch["mask"].all()
            assert ((batch["t"] == 1.5).sum(1) == batch["lengths"]).all()


def test_what_cannot_be_compared_is_a_failure_or_skipped(lines):
    """A step that raises fails with its error; rows that only Ray can make are skipped; neither ends the check."""

    def wrong(*_):
        raise ZeroDivisionError("the job's own mistake")

    found = check(job_of(lines, wrong, apply=lambda p, b: {"score": predicted(p, b["x"])}))
    assert found["parity.fit"].status is Status.FAILURE
    assert "the job's own mistake" in found["parity.fit"].message
    assert found["parity.score"].status is Status.OK

    whole = Job("job", [
        Preprocess("rows", Files("*"), dataset=lambda ds: ds), Train("fit", "rows", init, stepping(predicted), 8, steps=2)
    ])  # fmt: skip
    assert check(whole)["parity.fit"].status is Status.SKIPPED


def measured(local=0.002, relative=0.002, name="dot_general", where="job.py:1 (f)"):
    return Measured(Operation(name, where, "", name == "dot_general", 1), local, 5.0, relative, 0.1)


@pytest.mark.parametrize(
    ("level", "status", "said"),
    [
        ({}, Status.OK, "the worst 0.2 % off"),
        ({"measured": (measured(local=0.06),)}, Status.FAILURE, "dot_general at job.py:1 (f) loses 6 %"),
        ({"measured": (measured(relative=0.3),)}, Status.WARNING, "dot_general at job.py:1 (f) is 30 % off"),
        ({"differences": (Difference("loss", 0.06, 1),)}, Status.FAILURE, "loss is 6 % off"),
        ({"differences": (Difference("digit", 0.06, 1, is_share=True),)}, Status.FAILURE, "6 % of digit's values"),
        ({"differences": (Difference("loss", float("inf"), 1),)}, Status.FAILURE, "loss is inf %"),
        ({"cosine": 0.9}, Status.FAILURE, "cosine between the updates is 0.900, 0.95 is allowed"),
    ],
)
def test_every_tolerance_is_judged(level, status, said):
    """Each by itself over the default, and within a wider one."""
    parts = {"measured": (measured(),), "differences": (), "cosine": 0.999} | level
    report = StageReport("lm", (LevelReport(Level.DEFAULT, **parts),), fitted_growth([0.01, 0.01, 0.01]))
    found = judge(report, ParityConfig())
    assert found.status is status
    assert said in found.message
    wide = ParityConfig(product=1, operation=1, metric=1, output=1, mismatch=1, cosine=0.5)
    assert judge(report, wide).status is (Status.FAILURE if "inf" in said else Status.OK)


def test_the_tolerances_come_from_the_configuration():
    """The parity section; a tolerance that allows nothing is refused with the other problems."""
    config = CONFIG.model_validate({**CONFIG.model_dump(), "parity": {"product": 0.2, "steps": 7}})
    assert (config.parity.product, config.parity.steps, config.parity.cosine) == (0.2, 7, ParityConfig().cosine)
    with pytest.raises(ValueError, match="greater than 0"):
        ParityConfig(metric=0)


def test_differences_of_metrics_and_outputs():
    """Relative to a metric's largest value; of outputs in norm over real rows; NaN in one lane only is infinitely far."""
    [loss] = metric_differences([({"loss": 2.0}, {"loss": 2.1}), ({"loss": 4.0}, {"loss": 4.0})])
    assert loss.relative == pytest.approx(0.025)
    [loss] = metric_differences([({"loss": 2.0}, {"loss": float("nan")})])
    assert loss.relative == np.inf
    ours, theirs = np.array([[3.0], [4.0], [9.0]]), np.array([[3.0], [4.5], [0.0]])
    real = np.array([True, True, False])
    assert output_difference("x", ours, theirs, real).relative == pytest.approx(0.1)
    assert output_difference("n", ours.astype(int), theirs.astype(int), real).relative == 0
    assert output_difference("x", ours, np.full_like(ours, np.nan), real).relative == np.inf


def test_no_difference_does_not_grow():
    """Zeros have a factor of 1; a series that is not finite an infinite one."""
    assert fitted_growth([0.0] * 5).factor == 1
    assert fitted_growth([0.1, float("inf")]).factor == np.inf
