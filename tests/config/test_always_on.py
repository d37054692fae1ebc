"""Checkpoints cannot be switched off, in any spelling, anywhere."""

from __future__ import annotations

import itertools

import pytest

from tpupipe.config import load_config
from tpupipe.errors import ConfigError

WORLD = "store: gs://bucket/prefix\ncluster: {kind: fake, generation: v6e, topology: 2x4}\n"

KEYS = ("checkpoint", "checkpoints", "checkpointing", "Checkpoint", "ckpt", "enable_checkpointing", "save_checkpoints",
        "checkpoint_every", "checkpoint-steps", "checkpointing_enabled")  # fmt: skip
OFF = ("false", "off", "no", "none", "None", "null", "~", "never", "NEVER", "0", "0.0", "disabled", "'false'", "'0'",
       "''", "[]", "'off '", "{enabled: false}", "{enable: 'no'}", "{disabled: true}", "{steps: 0}", "{every: never}",
       "{steps: none, keep: 3}", "{save: false}", "{keep: 0}")  # fmt: skip
PLACES = ("{}", "stages.lm.{}", "job.{}", "job.train.{}", "dry_run.stages.lm.{}", "cluster.{}")


@pytest.fixture
def world(tmp_path):
    path = tmp_path / "world.yaml"
    path.write_text(WORLD, encoding="utf-8")
    return path


def refusals(world, *overrides):
    with pytest.raises(ConfigError) as caught:
        load_config([world], overrides)
    return [p.path for p in caught.value.data["problems"] if p.message == "checkpoints cannot be switched off"]


@pytest.mark.parametrize("value", OFF)
@pytest.mark.parametrize("key", KEYS)
def test_every_spelling_is_refused(world, key, value):
    """Each name of the switch with each word for off is refused, and the problem names the key."""
    assert refusals(world, f"stages.lm.{key}={value}")[0].startswith(f"stages.lm.{key}")


@pytest.mark.parametrize(("place", "value"), list(itertools.product(PLACES, ["off", "{steps: 0}"])))
def test_it_is_refused_wherever_it_stands(world, place, value):
    """At the top, in a stage, in the job's own section, in the dry run: through a file or --set."""
    override = f"{place.format('checkpoint')}={value}"
    assert len(refusals(world, override)) == 1
    key, _, text = override.partition("=")
    nested = "".join(f"{'  ' * depth}{part}:\n" for depth, part in enumerate(key.split("."))).rstrip("\n")
    world.with_name("more.yaml").write_text(f"{nested} {text}\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="checkpoints cannot be switched off"):
        load_config([world, world.with_name("more.yaml")])


@pytest.mark.parametrize("key", ["no_checkpoint", "disable_checkpointing", "skip-checkpoints", "without_ckpt", "checkpointing_disabled", "noCheckpoint"])  # fmt: skip
@pytest.mark.parametrize("place", ["{}", "job.{}", "stages.lm.{}"])
def test_a_negated_switch_is_refused_when_it_is_on(world, key, place):
    """no_checkpoint: true is the same wish in other words."""
    assert refusals(world, f"{place.format(key)}=true") == [place.format(key)]


@pytest.mark.parametrize("key", ["save", "saving", "save_every", "save_steps", "no_save=true", "disable_saving=yes"])
def test_save_is_taken_for_the_switch_outside_the_job(world, key):
    """The framework saves only checkpoints, so its own sections may not say save: off."""
    override = key if "=" in key else f"{key}=off"
    assert refusals(world, f"stages.lm.{override}") == [f"stages.lm.{override.partition('=')[0]}"]


@pytest.mark.parametrize(
    "override",
    [
        "job.save=false",
        "job.init_checkpoint=null",
        "job.checkpoint_uri=null",
        "job.gradient_checkpointing=false",
        "job.checkpoint={steps: 5, minutes: null}",
        "job.no_checkpoint=false",
        "stages.lm.checkpoint={}",
        "stages.lm.checkpoint={steps: 100, minutes: null}",
        "stages.checkpoint={steps: 3}",
        "labels.checkpoint='off'",
        "labels={team: none}",
    ],
)
def test_what_is_no_switch_is_left_alone(world, override):
    """Names that only mention checkpoints, values that do not switch off, the user's own words."""
    load_config([world], [override])


def test_the_refusal_comes_with_every_other_problem(world):
    """It is one problem in the list, and goes before the bound that the same value breaks."""
    with pytest.raises(ConfigError) as caught:
        load_config([world], ["stages.lm.checkpoint.steps=0", "smaple=1%"])
    assert [(p.path, p.value) for p in caught.value.data["problems"]] == [
        ("smaple", "1%"),
        ("stages.lm.checkpoint.steps", 0),
    ]
