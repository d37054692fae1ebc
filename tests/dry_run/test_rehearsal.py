"""What a dry run changes, decided without running anything."""

from __future__ import annotations

from typing import Any

import pytest

from tpupipe import Every, Infer, Job, JsonLines, Preprocess, Train
from tpupipe.config import Config
from tpupipe.dry_run.rehearsal import HOST_BYTES, Machine, rehearsal, smallest_like
from tpupipe.errors import ConfigError, UsageError
from tpupipe.hardware.slices import SliceSpec
from tpupipe.store.uri import StoreURI

LAPTOP = Machine(cores=2, memory_bytes=24 << 30)
LARGE = Machine(cores=64, memory_bytes=512 << 30)


def job(inputs: str = "in/*.jsonl", **train: Any) -> Job:
    source = JsonLines(inputs)
    options = {"steps": 2000, "checkpoint": Every(steps=100)} | train
    return Job(
        "j",
        [
            Preprocess("p", source=source, map=dict),
            Train("t", data="p", init=abs, step=lambda s, b: (s, b), batch_size=16, **options),
            Infer("i", data=source, params="t", apply=lambda params, _: {"x": params}),
        ],
    )


def production(dry_run: dict[str, Any] | None = None, **cluster: Any) -> Config:
    slices = {"kind": "tpu", "generation": "v6e", "topology": "4x4"} | cluster
    return Config.model_validate(
        {"store": {"uri": "gs://team/runs"}, "cluster": slices, "dry_run": dry_run or {}, "mode": "full"}
    )


def test_the_same_shape_where_it_fits_and_the_smallest_of_several_hosts_where_not():
    """A 16x16 is 64 hosts; on two cores two of them are left, with four chips each."""
    same = rehearsal(production(), job(), LARGE)
    assert str(same.config.cluster.slice_spec()) == "v6e 4x4 (16 chips, 4 hosts)"
    assert same.notes[0] == "a faked v6e 4x4 (16 chips, 4 hosts), the same shape"
    small = rehearsal(production(topology="16x16"), job(), LAPTOP)
    assert str(small.config.cluster.slice_spec()) == "v6e 2x4 (8 chips, 2 hosts)"
    assert "instead of v6e 16x16 (256 chips, 64 hosts)" in small.notes[0]
    assert small.config.cluster.kind == "fake"


def test_a_machine_holds_as_many_hosts_as_its_cores_and_its_memory():
    spec = SliceSpec("v6e", "4x4")
    assert Machine(2, 4 * HOST_BYTES).fits(spec)
    assert not Machine(1, 4 * HOST_BYTES).fits(spec)
    assert not Machine(2, 4 * HOST_BYTES - 1).fits(spec)


@pytest.mark.parametrize(
    ("spec", "small"),
    [
        (SliceSpec("v5e", "16x16"), "v5e 2x4 (8 chips, 2 hosts)"),
        (SliceSpec("v4", "4x4x8"), "v4 2x2x2 (8 chips, 2 hosts)"),
        (SliceSpec("v6e", "4x4", slices=4), "2 x v6e 2x2 (8 chips, 2 hosts)"),
        (SliceSpec("v6e", "1x1"), "v6e 1x1 (1 chips, 1 hosts)"),
    ],
)
def test_the_smallest_shape_keeps_the_chips_of_a_host(spec: SliceSpec, small: str):
    assert str(smallest_like(spec)).replace("host)", "hosts)").replace("1 chip,", "1 chips,") == small
    assert smallest_like(spec).chips_per_host == spec.chips_per_host


def test_steps_sample_and_store_are_small_and_said():
    """24 steps instead of 2,000, with a checkpoint every 8, of which one comes before the failure."""
    found = rehearsal(production(), job(), LARGE)
    assert found.config.sample == "1%"
    assert (found.config.store.uri, found.config.store.embedded) == ("gs://tpupipe-local/runs", True)
    assert found.shares == {"t": (24, 2000)}
    settings = found.config.stages["t"]
    assert settings.steps == 24
    assert settings.checkpoint is not None
    assert settings.checkpoint.steps == 8
    assert "t: 24 steps instead of 2000 steps" in found.notes
    assert found.config.dry_run == {}


def test_what_the_section_says_is_kept():
    """Steps, sample, topology and job parameters of ``dry_run`` win over the defaults."""
    given = {
        "sample": "5%",
        "cluster": {"topology": "2x2", "kind": "fake"},
        "stages": {"t": {"steps": 6, "checkpoint": {"steps": 2}}},
        "job": {"width": 8},
    }
    found = rehearsal(production(given), job(), LARGE)
    assert found.config.sample == "5%"
    assert found.config.cluster.topology == "2x2"
    assert (found.config.stages["t"].steps, found.config.stages["t"].checkpoint.steps) == (6, 2)
    assert found.config.job == {"width": 8}
    assert "other job parameters: width" in found.notes


def test_a_job_that_saves_often_enough_keeps_its_policy():
    """Every 10 steps of 24 is soon enough; epochs become steps."""
    found = rehearsal(production(), job(steps=None, epochs=3, checkpoint=Every(steps=10)), LARGE)
    assert found.config.stages["t"].checkpoint is None
    assert found.shares == {"t": (24, None)}
    assert "t: 24 steps instead of 3 epochs" in found.notes


def test_inputs_in_cloud_storage_are_read_there():
    """The embedded store would stand in for the real one, so the store is a folder then."""
    found = rehearsal(production(), job("gs://bucket/in/*.jsonl"), LARGE)
    assert not found.config.store.embedded
    assert StoreURI.parse(found.config.store.uri).scheme == "file"


def test_an_address_in_production_is_not_connected_to():
    assert rehearsal(production(address="ray-head:6379"), job(), LARGE).config.cluster.address is None


def test_what_cannot_be_rehearsed_is_refused():
    """A GPU has no faked slice; a machine without room says how much it has; a bad section names its key."""
    gpu = Config.model_validate({"store": {"uri": "gs://team/runs"}, "cluster": {"kind": "gpu", "gpus": 4}})
    with pytest.raises(ConfigError, match=r"dry_run\.cluster\.generation"):
        rehearsal(gpu, job(), LARGE)
    with pytest.raises(UsageError, match="needs a faked slice"):
        rehearsal(production({"cluster": {"kind": "tpu"}}), job(), LARGE)
    with pytest.raises(UsageError, match="1 cores, 1 GiB"):
        rehearsal(production(), job(), Machine(1, 1 << 30))
