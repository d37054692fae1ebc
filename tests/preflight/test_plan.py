"""Targets, prices, the best rows and the checkpoint interval."""

from __future__ import annotations

import math

import pytest

from tpupipe.config import CostConfig
from tpupipe.errors import SliceError, UsageError
from tpupipe.hardware.facts import tpu_price
from tpupipe.hardware.slices import SliceSpec
from tpupipe.preflight.fit import Memory
from tpupipe.preflight.hlo import HloCost
from tpupipe.preflight.plan import (
    ChipPrice,
    Plan,
    Row,
    SaveCost,
    cheapest,
    checkpoint_plan,
    chip_price,
    estimate,
    fastest,
    measured_save,
    parse_batches,
    parse_targets,
    young_daly_s,
)
from tpupipe.preflight.program import Program
from tpupipe.preflight.refusals import Reason, Refusal


def row(target="v6e:4x4", step_s=1.0, batch=100, usd=1.0, kind="train", **options):
    """A program that is bound by compute for so long."""
    spec = SliceSpec.parse(target)
    cost = HloCost(flops=spec.facts.bf16_tflops * 1e12 * step_s)
    program = Program(spec, "lm", kind, batch, 0, memory=Memory(1, 1, 1, 1, 1), cost=cost, **options)
    return Row(program, None if usd is None else ChipPrice(usd, "a test"))


def failed():
    refusal = Refusal(Reason.OUT_OF_MEMORY, "no", 20 * 2**30, 16 * 2**30)
    return Row(Program(SliceSpec.parse("v5e:2x2"), "lm", "train", 64, 0, refusal=refusal), ChipPrice(1.0, "a test"))


def test_dollars_per_million_samples_by_hand():
    """16 chips at 1.8 USD/h, 100 rows a second: 28.8 USD/h over 360,000 rows/h."""
    assert row(usd=1.8).usd_per_million == pytest.approx(80.0)


def test_each_host_has_an_inference_batch_of_its_own():
    assert row(kind="infer").program.samples_per_s == pytest.approx(400)


def test_best_and_fastest_ignore_what_does_not_fit_or_has_no_price():
    slow, fast, unpriced = row("v5e:2x2", usd=1.0), row("v6e:4x4", step_s=0.5), row("v6e:2x4", step_s=0.1, usd=None)
    rows = [failed(), slow, fast, unpriced]
    assert cheapest(rows) is slow
    assert fastest(rows) is unpriced
    assert cheapest([failed()]) is None


def test_the_configurations_own_price_is_for_its_own_generation():
    cost = CostConfig(usd_per_chip_hour=9.0, region="us-central1")
    assert chip_price("v6e", cost, "v6e") == ChipPrice(9.0, "cost.usd_per_chip_hour")
    listed = chip_price("v5e", cost, "v6e")
    assert listed is not None
    assert listed.usd_per_chip_hour == tpu_price("v5e", "us-central1").usd_per_chip_hour
    assert "us-central1" in listed.source


def test_a_price_from_another_region_says_which():
    found = chip_price("v4", CostConfig(region="europe-west4"), "v4")
    assert found is not None
    assert "us-central2" in found.source


@pytest.mark.parametrize("text", ["v9:2x2", "v6e", "v6e:3x3", "v5p:4x4", "v6e:0x4", "v6e:4x4:x"])
def test_targets_that_cannot_be(text):
    with pytest.raises(SliceError, match=r"allowed|such as|whole number"):
        parse_targets(f"v6e:4x4,{text}")


def test_no_target_and_wrong_batches():
    with pytest.raises(UsageError, match="names no slice"):
        parse_targets(" ,")
    for text in ("", "64,0", "64,x", "-1", "1.5"):
        with pytest.raises(UsageError, match="at least 1"):
            parse_batches(text)


def test_targets_and_batches_are_taken_once_in_order():
    assert [t.topology for t in parse_targets("v6e:4x4,v6e:2x4,v6e:4x4")] == ["4x4", "2x4"]
    assert parse_batches("128,64,128") == [128, 64]


def lost(interval_s, save_s, mtbf_s):
    """Expected time for one unit of work with exponential failures and no restart cost (Daly 2006, equation 20)."""
    return mtbf_s * (math.exp((interval_s + save_s) / mtbf_s) - 1) / interval_s


@pytest.mark.parametrize(("save_s", "mtbf_s"), [(2, 86_400), (60, 3600), (300, 1800), (0.1, 1e6)])
def test_the_interval_loses_least(save_s, mtbf_s):
    """Against the exact expected time: no interval on a fine grid is better by more than a thousandth."""
    best = min(lost(mtbf_s * k / 5000, save_s, mtbf_s) for k in range(1, 10_000))
    assert lost(young_daly_s(save_s, mtbf_s), save_s, mtbf_s) <= best * 1.001


def test_a_save_that_takes_longer_than_the_slice_lives():
    assert young_daly_s(100, 40) == 40


@pytest.mark.parametrize(("save_s", "mtbf_s"), [(0, 1), (-1, 1), (1, 0), (math.nan, 1), (1, math.inf)])
def test_intervals_that_make_no_sense(save_s, mtbf_s):
    with pytest.raises(UsageError, match="no checkpoint interval"):
        young_daly_s(save_s, mtbf_s)


def test_a_measured_save_is_the_mean_of_what_held_the_loop_up():
    events = [
        {"kind": "save", "stage": "lm", "blocked_s": 0.1},
        {"kind": "save", "stage": "lm", "blocked_s": 0.3},
        {"kind": "save", "stage": "other", "blocked_s": 9.0},
        {"kind": "checkpoint", "stage": "lm", "seconds": 5.0},
    ]
    found = measured_save(events, "lm", "r-1")
    assert found is not None
    assert found.save_s == pytest.approx(0.2)
    assert found.source == "measured: mean of 2 saves of r-1"
    assert measured_save(events[2:], "lm", "r-1") is None


def test_what_is_assumed_is_said_to_be():
    said = checkpoint_plan(SaveCost(2.0, "assumed"), None).sentence()
    assert said.count("assumed") == 2
    assert "(given)" in checkpoint_plan(SaveCost(2.0, "given"), 12).sentence()


def test_hours_and_dollars_of_a_run():
    """36,000 rows at 100 a second are 0.1 h of a slice at 16 USD/h; the dear end is five times that."""
    found = estimate(row(), {"steps": 360, "batch": 100})
    assert found is not None
    assert found.steps == 360
    assert found.hours == pytest.approx((0.1, 0.5))
    assert found.usd == pytest.approx((1.6, 8.0))
    assert estimate(row(), {"rows": None}) is None
    assert estimate(failed(), {"steps": 1, "batch": 1}) is None


def test_a_larger_batch_takes_fewer_steps_for_the_same_rows():
    found = estimate(row(batch=200), {"steps": 360, "batch": 100})
    assert found is not None
    assert found.steps == 180


def test_json_says_fits_or_why_not():
    told = Plan("j", (row(), failed()), "not known", None, 1.0).to_json()
    assert [each["fits"] for each in told["rows"]] == [True, False]
    assert told["rows"][1]["refusal"]["needed_bytes"] == 20 * 2**30
    assert told["best"]["lm"]["cheapest"] == {"target": "v6e:4x4", "batch": 100}
