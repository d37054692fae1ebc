"""Reading, merging and checking configuration files."""

from __future__ import annotations

import pickle
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict

from tpupipe.config import (
    MISSING,
    Config,
    Problem,
    canonical,
    config_hash,
    dry_run_config,
    environment,
    job_parameters,
    load_config,
    sample_text,
)
from tpupipe.errors import ConfigError, UsageError

WORLD = """
store: gs://bucket/prefix
cluster: {kind: fake, generation: v6e, topology: 2x4, chips_per_vm: 4}
"""


@pytest.fixture
def write(tmp_path):
    def write(text: str, name: str = "config.yaml") -> Path:
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return path

    return write


def problems_of(*args, **kwargs) -> dict[str, Problem]:
    with pytest.raises(ConfigError) as caught:
        load_config(*args, **kwargs)
    assert caught.value.exit_status == 2
    return {problem.path: problem for problem in caught.value.data["problems"]}


def test_a_small_world_has_the_documented_defaults(write):
    """Store and cluster are enough; everything else has a default."""
    config = load_config([write(WORLD)])
    assert config.store.uri == "gs://bucket/prefix"
    assert not config.store.embedded
    assert config.sample == "100%"
    assert config.cluster.timeout_s == 600
    assert config.cluster.slice_spec().hosts == 2
    assert config.budgets.model_dump() == {
        "worker_failures": 3,
        "host_failures": 3,
        "slice_failures": 3,
        "preemptions": 16,
        "app_errors": 0,
        "store_failures": 8,
        "stalls": 3,
        "unit_failures": 3,
    }


def test_every_problem_of_every_section_is_in_one_error(write):
    """Unknown keys, wrong values and missing sections of all sections, each with its path, come together."""
    text = """
    stor: gs://x
    topology: 4x4
    cluster: {kind: fakee, generaton: v6e, timeout_s: 0}
    stages: {lm: {stepss: 3, batch_size: -1, checkpoint: {keeep: 3}}}
    budgets: {worker_failures: many}
    logs: {format: jsn}
    """
    found = problems_of([write(text)])
    assert set(found) == {
        "store",
        "stor",
        "topology",
        "cluster.kind",
        "cluster.generaton",
        "cluster.timeout_s",
        "stages.lm.stepss",
        "stages.lm.batch_size",
        "stages.lm.checkpoint.keeep",
        "budgets.worker_failures",
        "logs.format",
    }
    assert found["stor"].nearest == ("store",)
    assert found["topology"].nearest == ("cluster.topology",)
    assert found["cluster.generaton"].nearest == ("generation",)
    assert found["stages.lm.stepss"].nearest == ("steps",)
    assert found["stages.lm.checkpoint.keeep"].nearest[0] == "keep"
    assert found["cluster.kind"].nearest == ("fake",)
    assert found["logs.format"].allowed == "text, json"
    assert found["cluster.timeout_s"].value == 0


def test_the_message_names_path_value_nearest_and_source(write):
    """A reader of the message needs nothing else to mend the file; the error survives pickling."""
    path = write(WORLD + "smaple: 1%\n")
    with pytest.raises(ConfigError) as caught:
        load_config([path])
    message = str(caught.value)
    for part in ("smaple", "'1%'", "nearest: sample", str(path)):
        assert part in message
    copy = pickle.loads(pickle.dumps(caught.value))
    assert copy.data == caught.value.data


def test_a_config_without_a_store_is_refused(write):
    """No store, no run."""
    found = problems_of([write("cluster: {kind: gpu, gpus: 1}")])
    assert list(found) == ["store"]
    assert found["store"].value is MISSING
    assert "needs a store" in found["store"].message


@pytest.mark.parametrize(
    "store", ["''", "null", "gs://", "s3://bucket", "{embedded: true}", "{uri: /x, embedded: true}"]
)
def test_a_store_that_is_none_is_refused(write, store):
    """A store URI is gs://, file:// or a path, and only gs:// can be embedded."""
    found = problems_of([write(f"store: {store}\ncluster: {{kind: gpu, gpus: 1}}")])
    assert all(path.startswith("store") for path in found)


def test_later_files_lie_over_earlier_ones_key_by_key(write):
    """Mappings merge, scalars and lists replace, --set comes last and reads its value as YAML."""
    first = write(WORLD + "labels: {team: a, tier: x}\njob: {sizes: [1, 2], lr: 3e-4, day: 2026-01-01}\n", "a.yaml")
    second = write("cluster: {timeout_s: 5}\nlabels: {team: b}\njob: {sizes: [3]}\n", "b.yaml")
    config = load_config([first, second], ["cluster.topology=4x4", "job.on=off", "store.embedded=true"])
    assert config.cluster.timeout_s == 5
    assert config.cluster.topology == "4x4"
    assert config.labels == {"team": "b", "tier": "x"}
    assert config.job == {"sizes": [3], "lr": 3e-4, "day": "2026-01-01", "on": False}
    assert config.store.embedded
    assert config.store.uri == "gs://bucket/prefix"


def test_a_new_store_string_does_not_inherit_that_it_is_embedded(write):
    """The short form is the whole section: a real bucket is never served by the embedded server by accident."""
    path = write("store: {uri: gs://a, embedded: true}\ncluster: {kind: gpu, gpus: 1}")
    assert not load_config([path], ["store=gs://b"]).store.embedded


def test_empty_sections_say_nothing(write):
    """A heading whose keys are all commented out is no mistake."""
    config = load_config([write(WORLD + "labels:\nbudgets:\nstages:\n  lm:\n")])
    assert config.labels == {}
    assert config.stages["lm"].steps is None


def test_what_cannot_be_read_is_a_problem_with_its_place(write, tmp_path):
    """Missing file, bad YAML, duplicate keys, a list, non-string keys, an override without '=': all in one error."""
    with pytest.raises(ConfigError) as caught:
        load_config(
            [
                tmp_path / "missing.yaml",
                write("a: [1", "bad.yaml"),
                write("store: a\ncluster:\n  kind: fake\n  kind: tpu\n", "twice.yaml"),
                write("- a\n", "list.yaml"),
                write("job: {on: 1}\n", "key.yaml"),
                write("job: &a {b: *a}\n", "loop.yaml"),
                write("job: {x: !!python/object:os.system {}}\n", "tag.yaml"),
            ],
            ["sample"],
        )
    text = str(caught.value)
    assert len(caught.value.data["problems"]) == 8
    for part in (
        "missing.yaml' does not exist",
        "bad.yaml",
        "line 4, column 3: duplicate key 'kind'",
        "the file is a list",
        "not a string",
        "contains itself",
        "tag.yaml",
        "--set 'sample' is not key=value",
    ):
        assert part in text


@pytest.mark.parametrize(
    ("cluster", "path"),
    [
        ("{kind: fake, generation: v6e, topology: 3x5}", "cluster.topology"),
        ("{kind: tpu, generation: v4, topology: 4x4}", "cluster.topology"),
        ("{kind: tpu, generation: v6e}", "cluster.topology"),
        ("{kind: tpu, topology: 4x4}", "cluster.generation"),
        ("{kind: tpu, generation: v9, topology: 4x4}", "cluster.generation"),
        ("{kind: gpu}", "cluster.gpus"),
        ("{kind: gpu, gpus: 1, topology: 2x2}", "cluster.topology"),
        ("{kind: tpu, generation: v6e, topology: 4x4, gpus: 1}", "cluster.gpus"),
        ("{kind: fake, generation: v6e, topology: 4x4, timeout_s: .inf}", "cluster.timeout_s"),
        ("{kind: fake, generation: v6e, topology: 4x4, slices: true}", "cluster.slices"),
    ],
)
def test_a_cluster_that_cannot_be_is_refused(write, cluster, path):
    """Slices that cannot exist, keys of another kind, waits without an end."""
    assert list(problems_of([write(f"store: /s\ncluster: {cluster}")])) == [path]


def test_a_problem_across_keys_is_found_beside_others(write):
    """A topology that does not fit is reported even when the same section has an unknown key."""
    text = "store: /s\ncluster: {kind: fake, generation: v6e, topology: 3x5, adress: x}"
    assert set(problems_of([write(text)])) == {"cluster.topology", "cluster.adress"}


def test_steps_and_epochs_exclude_each_other(write):
    """One of them decides how long training is."""
    assert set(problems_of([write(WORLD)], ["stages.lm={steps: 3, epochs: 1}"])) == {"stages.lm.steps"}


def test_the_dry_run_section_is_checked_as_what_it_makes_of_the_config(write):
    """Its problems carry its path, and only those it adds."""
    text = WORLD + "dry_run: {smaple: 1%, cluster: {topology: 3x5}, dry_run: {}}\n"
    assert set(problems_of([write(text)])) == {"dry_run.smaple", "dry_run.cluster.topology", "dry_run.dry_run"}


def test_a_dry_run_overlays_its_section(write):
    """A real slice becomes a faked one on one percent."""
    text = """
    store: gs://real/bucket
    cluster: {kind: tpu, generation: v6e, topology: 4x4, timeout_s: 30}
    stages: {lm: {steps: 1000, seed: 3}}
    dry_run:
      sample: 1%
      store: {embedded: true}
      cluster: {kind: fake, topology: 2x2}
      stages: {lm: {steps: 20}}
    """
    dry = dry_run_config(load_config([write(text)]))
    assert (dry.cluster.kind, dry.cluster.topology, dry.cluster.timeout_s) == ("fake", "2x2", 30)
    assert (dry.sample, dry.store.embedded, dry.store.uri) == ("1%", True, "gs://real/bucket")
    assert (dry.stages["lm"].steps, dry.stages["lm"].seed) == (20, 3)
    assert dry.dry_run == {}


class Inner(BaseModel):
    depth: int = 1


class Params(BaseModel):
    width: int = 8
    inner: Inner = Inner()


class StrictParams(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)
    width: int = 8
    inner: Inner = Inner()


@pytest.mark.parametrize("model", [Params, StrictParams])
def test_the_job_section_is_typed_and_unknown_keys_are_refused(write, model):
    """Also by a model that would drop them silently, at any depth, beside wrong values."""
    good = load_config([write(WORLD)], ["job.width=16"])
    assert job_parameters(good, model) == model(width=16)
    bad = load_config([write(WORLD)], ["job={wdth: 3, width: x, inner: {dept: 2}}"])
    with pytest.raises(ConfigError) as caught:
        job_parameters(bad, model)
    found = {problem.path: problem for problem in caught.value.data["problems"]}
    assert set(found) == {"job.wdth", "job.width", "job.inner.dept"}
    assert found["job.wdth"].nearest == ("width",)
    assert found["job.inner.dept"].nearest == ("depth",)


def test_job_problems_join_the_others_when_the_model_is_known(write):
    """One error for the world and the job together."""
    found = problems_of([write(WORLD + "smaple: 1%\n")], ["job.wdth=3"], job_model=Params)
    assert set(found) == {"smaple", "job.wdth"}


def test_a_job_without_parameters_refuses_them(write):
    """No model: an empty section is fine, a key is not."""
    assert job_parameters(load_config([write(WORLD)]), None) is None
    with pytest.raises(ConfigError, match="takes no parameters"):
        job_parameters(load_config([write(WORLD)], ["job.width=1"]), None)


@pytest.mark.parametrize(
    ("given_text", "spelling"),
    [("1%", "1%"), (0.01, "1%"), ("1/50", "2%"), (1, "100%"), ("2/3", "2/3"), ("0.5 %", "0.5%")],
)
def test_a_sample_has_one_spelling(given_text, spelling):
    """Equal fractions are written equally, so they are one identity."""
    assert sample_text(given_text) == spelling


@pytest.mark.parametrize("sample", ["0%", "101%", "-1%", "x", "", True, None, "1/0", 1.5, "1e999999999", [1]])
def test_a_sample_that_is_none_is_refused(sample):
    """Nothing, more than everything, and nonsense."""
    with pytest.raises(ValueError, match="not a sample"):
        sample_text(sample)


@given(st.fractions(min_value=Fraction(1, 10**6), max_value=1, max_denominator=10**6))
def test_a_sample_keeps_its_value(fraction):
    """Whatever the spelling, the fraction is exact, and the spelling is a fixed point."""
    text = sample_text(str(fraction))
    exact = Fraction(text[:-1]) / 100 if text.endswith("%") else Fraction(text)
    assert exact == fraction
    assert sample_text(text) == text


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    ),
    st.randoms(use_true_random=False),
)
def test_the_hash_does_not_depend_on_the_order_of_keys(value, random):
    """Mappings with equal items have equal hashes, at every depth."""

    def shuffled(item):
        if isinstance(item, dict):
            pairs = [(key, shuffled(inner)) for key, inner in item.items()]
            random.shuffle(pairs)
            return dict(pairs)
        return [shuffled(inner) for inner in item] if isinstance(item, list) else item

    assert config_hash({"v": value}) == config_hash({"v": shuffled(value)})


def test_a_default_written_out_hashes_like_one_left_out(write):
    """Identity is what the configuration means, not how it is written."""
    short = load_config([write(WORLD)])
    long = load_config([write(WORLD)], ["sample=1.0", "budgets.app_errors=0", "cluster.slices=1"])
    assert config_hash(short) == config_hash(long)
    assert config_hash(short) != config_hash(load_config([write(WORLD)], ["sample=1%"]))
    assert canonical({"cluster": short.cluster})["cluster"]["topology"] == "2x4"


def test_a_value_without_a_canonical_form_is_refused():
    """An object whose text is its address would make every hash a new one."""
    with pytest.raises(TypeError, match="no canonical form"):
        config_hash({"x": object()})


def test_the_configuration_is_frozen(write):
    """Nothing changes it after it was checked."""
    config = load_config([write(WORLD)])
    with pytest.raises(ValueError, match="frozen"):
        config.cluster.slices = 2
    assert pickle.loads(pickle.dumps(config)) == config
    assert isinstance(config, Config)


def test_the_environment_is_read_as_given():
    """Empty variables count as not set; the storage variables are collected for the workers."""
    read = environment(
        {"RAY_ADDRESS": " ", "STORAGE_EMULATOR_HOST": "http://127.0.0.1:9/", "PATH": "/bin", "HOME": "/x"}
    )
    assert read.ray_address is None
    assert read.emulator == "http://127.0.0.1:9"
    assert read.storage == {"STORAGE_EMULATOR_HOST": "http://127.0.0.1:9/"}
    assert read.path == "/bin"


def test_lists_of_faults_are_read_by_their_grammars(write):
    """Every text that cannot be read is a problem of its own, beside all others, with the file and what is allowed."""

    def grammar(text: str) -> str:
        if "@" not in text:
            raise UsageError(f"{text!r} has no '@'.", hint="ACTION@POINT")
        return text

    grammars = {"faults": grammar, "store_faults": grammar}
    good = load_config([write(WORLD + "faults: [a@b]\nstore_faults: [c@d, e@f]\n")], grammars=grammars)
    assert (good.faults, good.store_faults) == (["a@b"], ["c@d", "e@f"])
    bad = write(WORLD + "faults: [a@b, typo]\nstore_faults: [3]\ntpyo: 1\ndry_run: {faults: [also]}\n", "bad.yaml")
    found = problems_of([bad], grammars=grammars)
    assert set(found) == {"faults.1", "store_faults.0", "tpyo", "dry_run.faults.0"}
    assert str(found["faults.1"]).startswith("faults.1 = 'typo': 'typo' has no '@'.; allowed: ACTION@POINT (in ")
    assert load_config([write(WORLD)]).faults == []
    assert load_config([write(WORLD + "faults:\n")]).faults == []
