"""``tpupipe plan``: the table, JSON, the page, and what is refused."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.preflight.test_plan import failed, row
from tpupipe import cli
from tpupipe.cli_plan import HEADINGS, cells, lines_of
from tpupipe.preflight import aot
from tpupipe.preflight.plan import Plan, SaveCost, checkpoint_plan

ROOT = Path(__file__).parents[2]
JOB = "tests.preflight.aot_jobs"


@pytest.fixture
def plan(tmp_path, monkeypatch):
    """Runs the command on the test job."""
    monkeypatch.chdir(ROOT)
    for name in "abc":
        (tmp_path / f"{name}.txt").write_text("text", encoding="utf-8")
    config = tmp_path / "c.yaml"
    cluster = {"kind": "tpu", "generation": "v6e", "topology": "2x2"}
    told = {"store": f"file://{tmp_path}/s", "cluster": cluster, "job": {"folder": str(tmp_path)}}
    config.write_text(json.dumps(told), encoding="utf-8")
    return lambda *more: CliRunner().invoke(cli.app, ["plan", JOB, "-c", str(config), *more])


@pytest.mark.skipif(not aot.compiler_installed(), reason="libtpu is not installed: pip install 'tpupipe[tpu]'")
def test_a_grid_with_a_target_that_fails(plan):
    """v5e 2x2 is too small for it, which is a row with its reason; the rest is compared."""
    options = ("--set", "job.width=2048", "--set", "job.layers=512", "--save-s", "0.5", "--mtbf-hours", "6", "--json")
    result = plan("--targets", "v5e:2x2,v5p:2x2x1", "--batches", "16,32", *options)
    assert result.exit_code == 0, result.stderr
    told = json.loads(result.stdout)
    assert [(each["target"], each["batch"], each["fits"]) for each in told["rows"]] == [
        ("v5e:2x2", 16, False), ("v5e:2x2", 32, False), ("v5p:2x2x1", 16, True), ("v5p:2x2x1", 32, True),
    ]  # fmt: skip
    assert "15.75 GiB is available" in told["rows"][0]["reason"]
    assert told["best"]["fit"]["cheapest"] == {"target": "v5p:2x2x1", "batch": 32}
    assert told["rows"][2]["usd_per_million_samples"] > told["rows"][3]["usd_per_million_samples"] > 0
    assert told["checkpoints"]["interval_s"] == pytest.approx((2 * 0.5 * 6 * 3600) ** 0.5, rel=0.01)
    work = {each["stage"]: each for each in told["work"]}
    assert work["rows"]["units"] == 1
    assert (work["fit"]["steps"], work["fit"]["rows"]) == (10, 3)
    assert told["estimates"][0]["steps"] == 20


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--targets", "v9:2x2"), "allowed: v2, v3, v4, v5e, v5p, v6e, v7x"),
        (("--targets", "v6e"), "generation:topology"),
        (("--targets", ","), "names no slice"),
        (("--batches", "64,none"), "whole numbers of at least 1"),
        (("--save-s", "0"), "no checkpoint interval"),
        (("--save-s", "1", "--events", "x/y/z"), "give one of them"),
        (("--events", "run"), "is not a run"),
        (("--html", "/no/such/folder/p.html"), "there is no folder"),
    ],
)
def test_what_is_refused_ends_with_2(plan, options, said):
    result = plan(*options)
    assert result.exit_code == 2
    assert said in result.stderr


def test_the_page_needs_nothing_else():
    """One file: the plot is inside as SVG, nothing is fetched, and what is shown is what the table has."""
    pytest.importorskip("matplotlib")
    from tpupipe.preflight.plan_html import plan_html

    rows = (row("v6e:4x4", usd=1.8), row("v5e:2x2", batch=50), failed())
    made = Plan("a <job>", rows, "not known", checkpoint_plan(SaveCost(2.0, "assumed"), None), 1.0)
    page = plan_html(made, (HEADINGS, [cells(each) for each in made.rows]), lines_of(made))
    svg = page[page.index("<svg") : page.index("</svg>") + len("</svg>")]
    assert ET.fromstring(svg).tag.endswith("svg")
    assert "a &lt;job&gt;" in page
    assert "src=" not in page
    assert "<link" not in page
    assert page.count("<tr") == 1 + len(rows)
    assert "USD per million samples" in page or "<svg" in page
