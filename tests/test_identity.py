"""What makes a run the same run, and what stops it."""

from __future__ import annotations

import functools
import importlib
import json
import sys
import uuid
from dataclasses import asdict, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpupipe.config import Config
from tpupipe.data.buckets import Buckets
from tpupipe.data.pretrained import Pretrained
from tpupipe.data.sources import Files, JsonLines, Parquet
from tpupipe.errors import DataError, RunChangedError, StoreDeniedError
from tpupipe.identity import code_fingerprint, differences, identify, settle_identity
from tpupipe.job import Infer, Job, Preprocess, Train
from tpupipe.local.server import embedded_store
from tpupipe.store.layout import RunPaths
from tpupipe.store.objects import open_store

PATHS = RunPaths("job", "a")
FAKE = {"kind": "fake", "generation": "v6e", "topology": "2x4"}


def double(batch):
    return batch


def init(key):
    return {"params": key}


def step(state, _):
    return state, {}


def apply(_, batch):
    return batch


def config(**changes) -> Config:
    return Config.model_validate({"store": {"uri": "gs://bucket/runs"}, "cluster": FAKE} | changes)


@pytest.fixture
def job(tmp_path) -> Job:
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text(name * 100)
    return Job(
        "job",
        [
            Preprocess("tokens", Files(f"{tmp_path}/*.txt", unit_bytes=100), map=double),
            Train("lm", "tokens", init=init, step=step, batch_size=8, steps=10),
            Infer("score", Files(f"{tmp_path}/b.txt"), params="lm", apply=apply, buckets=Buckets(lengths=(8, 16))),
        ],
    )


def identity(what, **changes):
    return identify(what, config(**changes), input_options={})


def changed(job, name, **changes):
    return Job(job.name, [replace(s, **changes) if s.name == name else s for s in job.stages])


# -- differences ---------------------------------------------------------------------------------

trees = st.recursive(
    st.one_of(st.integers(), st.text(max_size=3), st.none()),
    lambda inner: st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    max_leaves=8,
)
mappings = st.dictionaries(st.sampled_from("abc"), trees, max_size=3)


@given(mappings, mappings)
def test_differences_are_none_exactly_for_equal_trees(then, now):
    """No difference means equal, apart from a key that is absent in one and null in the other."""

    def bare(tree):
        return {k: bare(v) if isinstance(v, dict) else v for k, v in tree.items() if v is not None}

    assert differences(then, then) == {}
    if bare(then) != bare(now):
        assert differences(then, now)
    assert {path: [b, a] for path, (a, b) in differences(now, then).items()} == differences(then, now)


def test_differences_name_the_path_and_both_values():
    """Dotted path to [then, now], also where a section became a value."""
    then = {"a": {"b": 1, "c": 2}, "d": {"e": 1}, "f": 1}
    now = {"a": {"b": 1, "c": 3}, "d": 5, "g": 2}
    assert differences(then, now) == {"a.c": [2, 3], "d": [{"e": 1}, 5], "f": [1, None], "g": [None, 2]}


# -- what is in it -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {"cluster": FAKE | {"topology": "4x4"}},
        {"cluster": FAKE | {"slices": 2}},
        {"cluster": FAKE | {"kind": "tpu", "address": "ray://elsewhere:10001", "timeout_s": 7}},
        {"cluster": {"kind": "gpu", "gpus": 4}},
        {"store": {"uri": "gs://other/place", "timeout_s": 5, "attempts": 2}},
        {"budgets": {"app_errors": 3}, "labels": {"team": "x"}, "logs": {"level": "debug"}, "cost": {"spot": True}},
        {"sample": "1/1"},
        {"faults": ["slow@train.step=3"], "store_faults": ["503@create,rate=0.1"]},
    ],
)
def test_where_a_run_executes_is_no_part_of_it(job, changes):
    """Slice, store, budgets, labels, logs, prices and injected faults may change between attempts."""
    assert identity(job, **changes) == identity(job)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("tokens", {"chunk_rows": 7}),
        ("lm", {"batch_size": 16}),
        ("lm", {"steps": 11}),
        ("lm", {"steps": None, "epochs": 1}),
        ("lm", {"seed": 1}),
        ("lm", {"shuffle": False}),
        ("score", {"buckets": Buckets(lengths=(8, 32))}),
        ("score", {"buckets": Buckets.auto(max=4)}),
        ("score", {"buckets": None}),
        ("score", {"keep": ("text",)}),
        ("score", {"ragged_outputs": ("nll",)}),
    ],
)
def test_what_decides_a_result_is_part_of_it(job, name, changes):
    """Each of these gives another result, so another identity and another default name."""
    now = identity(changed(job, name, **changes))
    assert now != identity(job)
    assert now.default_run != identity(job).default_run


def test_saving_more_often_is_the_same_run(job):
    """When checkpoints are saved does not change what is trained."""
    from tpupipe.checkpoint.policy import Every

    assert identity(changed(job, "lm", checkpoint=Every(steps=3, keep=9))) == identity(job)


def test_job_parameters_and_sample_are_part_of_it(job):
    """Either gives another default name."""
    names = {
        identity(job, **changes).default_run
        for changes in ({}, {"job": {"width": 3}}, {"job": {"width": 4}}, {"sample": "50%"}, {"sample": "1/3"})
    }
    assert len(names) == 5


def test_one_sample_has_one_spelling(job):
    """1%, 0.01 and 1/100 are the same run."""
    assert len({identity(job, sample=text).default_run for text in ("50%", 0.5, "0.5", "1/2")}) == 1


def test_the_default_name_is_stable(job):
    """A name that users type: it does not change between processes, machines or versions."""
    assert identity(job).default_run == identity(job).default_run
    fixed = replace(
        identity(job), job="j", parameters={"b": 1, "a": [1, 2]}, stages={"s": {"kind": "train"}}, sample="100%"
    )
    assert fixed.default_run == "r-73af61216e"
    assert RunPaths("job", fixed.default_run).run == fixed.default_run


def test_a_changed_input_is_noticed_under_the_same_name(job, tmp_path):
    """One more byte in one file, and a new file: same default name, other inputs of the stages that read them."""
    before = identity(job)
    (tmp_path / "b.txt").write_text("b" * 501)
    after = identity(job)
    assert after.default_run == before.default_run
    assert after.inputs["tokens"] != before.inputs["tokens"]
    assert after.inputs["score"] != before.inputs["score"]
    (tmp_path / "c.txt").write_text("c")
    assert identity(job).inputs["tokens"] != after.inputs["tokens"]
    assert identity(job).inputs["score"] == after.inputs["score"]


def test_pretrained_parameters_are_inputs(job, tmp_path):
    """Other bytes are noticed under the same default name; the same bytes elsewhere are the same run."""
    (tmp_path / "model").write_bytes(b"one")
    (tmp_path / "moved").write_bytes(b"one")
    before = identity(changed(job, "score", params=Pretrained(tmp_path / "model", init)))
    assert identity(changed(job, "score", params=Pretrained(tmp_path / "moved", init))) == before
    (tmp_path / "model").write_bytes(b"two")
    after = identity(changed(job, "score", params=Pretrained(tmp_path / "model", init)))
    assert after.default_run == before.default_run
    assert list(differences(asdict(before), asdict(after))) == ["inputs.score.params"]
    with pytest.raises(DataError, match="no such"):
        identity(changed(job, "score", params=Pretrained(tmp_path / "no such", init)))


def test_no_input_is_an_error(job, tmp_path):
    """Before anything is reserved."""
    with pytest.raises(DataError):
        identity(changed(job, "tokens", source=Files(f"{tmp_path}/*.nothing")))


def test_how_an_input_is_read_is_part_of_it(job, tmp_path):
    """Text or bytes, and which columns: the same files give other rows."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    as_bytes = changed(job, "tokens", source=Files(f"{tmp_path}/*.txt", unit_bytes=100, mode="binary"))
    assert differences(vars(identity(job)), vars(identity(as_bytes)))
    pq.write_table(pa.table({"x": [1], "y": [2]}), tmp_path / "t.parquet")
    both = changed(job, "tokens", source=Parquet(f"{tmp_path}/t.parquet"))
    one = changed(job, "tokens", source=Parquet(f"{tmp_path}/t.parquet", columns=("x",)))
    assert differences(vars(identity(both)), vars(identity(one)))
    lines = changed(job, "tokens", source=JsonLines(f"{tmp_path}/*.txt", unit_bytes=100))
    assert differences(vars(identity(job)), vars(identity(lines)))


# -- code ----------------------------------------------------------------------------------------


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A job package of several files that can be edited and imported again."""
    name = f"jobs_{uuid.uuid4().hex[:8]}"
    folder = tmp_path / name
    (folder / "deep").mkdir(parents=True)
    monkeypatch.syspath_prepend(str(tmp_path))
    files = {
        "__init__.py": "",
        "main.py": "",
        "helper.py": "def clean(batch):\n    return batch\n",
        "unrelated.py": "X = 1\n",
        "deep/__init__.py": "",
        "deep/model.py": "def init(key):\n    return key\n",
    }

    def write(**changes):
        for path, text in (files | {k.replace("__", "/") + ".py": v for k, v in changes.items()}).items():
            (folder / path).write_text(text)
        for loaded in [m for m in sys.modules if m == name or m.startswith(name + ".")]:
            del sys.modules[loaded]
        importlib.invalidate_caches()

    def fingerprint(make="map=main.clean", **changes):
        write(**changes)
        main = importlib.import_module(f"{name}.main")
        given = eval(f"dict({make})", {"functools": functools, "main": main})
        return code_fingerprint(Job("job", [Preprocess("p", Files("/x"), **given)]))

    return name, fingerprint


BODY = "\ndef clean(batch):\n    return helper.clean(batch)\n"
EDITED = "def clean(batch):\n    return dict(batch)\n"


def test_an_edit_of_the_job_s_module_is_noticed(package):
    """One line of the module that the function comes from; the same text gives the same fingerprint."""
    _, fingerprint = package
    first = fingerprint(main="def clean(batch):\n    return batch\n")
    assert fingerprint(main="def clean(batch):\n    return batch\n") == first
    assert fingerprint(main=EDITED) != first


@pytest.mark.parametrize(
    "line",
    [
        "import {name}.helper as helper",
        "from {name}.helper import clean as other; import {name}.helper as helper",
        "from .helper import clean as _; from . import helper",
        "from . import helper",
        "from {name} import helper",
        "from . import unrelated, helper",
        "import json, {name}.helper as helper",
        "from . import (\n    helper,\n)",
    ],
)
def test_an_edit_of_a_helper_beside_it_is_noticed(package, line):
    """However it is imported."""
    name, fingerprint = package
    main = line.format(name=name) + BODY
    assert fingerprint(main=main) != fingerprint(main=main, helper=EDITED)


def test_an_edit_of_a_helper_s_helper_is_noticed(package):
    """Main imports helper, helper imports unrelated."""
    name, fingerprint = package
    main = f"import {name}.helper as helper{BODY}"
    helper = f"import {name}.unrelated\n{EDITED}"
    assert fingerprint(main=main, helper=helper) != fingerprint(main=main, helper=helper, unrelated="X = 2\n")


def test_an_edit_in_a_folder_of_the_job_s_package_is_noticed(package):
    """Main imports deep.model."""
    name, fingerprint = package
    main = f"from {name}.deep.model import init\n{EDITED}"
    assert fingerprint(main=main) != fingerprint(main=main, deep__model="def init(key):\n    return key + 1\n")


def test_another_job_s_file_is_no_part_of_it(package):
    """A module that nothing refers to may change, loaded or not."""
    name, fingerprint = package
    main = f"import {name}.helper as helper{BODY}"
    first = fingerprint(main=main)
    importlib.import_module(f"{name}.unrelated")
    assert fingerprint(main=main, unrelated="X = 2\n") == first


@pytest.mark.parametrize(
    "make",
    [
        "map=functools.partial(main.clean)",
        "map=main.Cleaner()",
        "map=main.Cleaner().run",
        "map=main.wrapped",
        "dataset=main.clean",
    ],
)
def test_an_edit_is_noticed_however_the_function_is_given(package, make):
    """A partial, a callable object, a bound method, a decorated function."""
    _, fingerprint = package
    main = (
        "import functools\n"
        "def clean(batch):\n    return batch\n"
        "class Cleaner:\n    def __call__(self, batch):\n        return batch\n    run = __call__\n"
        "@functools.cache\ndef wrapped(batch):\n    return batch\n"
    )
    assert fingerprint(make, main=main) != fingerprint(make, main=main + "X = 1\n")


def test_every_function_of_a_job_counts(job, package):
    """map, init, step, apply, and params, which decides what inference loads and what the digest is of."""
    name, fingerprint = package
    fingerprint(main="def clean(batch):\n    return batch\n")
    clean = importlib.import_module(f"{name}.main").clean
    first = code_fingerprint(job)

    def two(_, batch=None):
        return clean(batch), {}

    two.__module__ = clean.__module__
    for stage, changes in (
        ("tokens", {"map": clean}),
        ("lm", {"init": clean}),
        ("lm", {"step": two}),
        ("lm", {"params": clean}),
        ("score", {"apply": two}),
        ("score", {"map": clean}),
        ("score", {"params": Pretrained("model", clean)}),
    ):
        assert code_fingerprint(changed(job, stage, **changes)) != first, (stage, changes)


# -- the record ----------------------------------------------------------------------------------


@pytest.fixture(params=["file", "gs"])
def store(request, tmp_path, tmp_path_factory):
    """An empty store on each backend."""
    if request.param == "file":
        yield open_store(f"file://{tmp_path}/store")
        return
    with embedded_store(tmp_path_factory.mktemp("embedded")) as endpoint:
        yield open_store(f"gs://bucket-{uuid.uuid4().hex[:12]}/runs", endpoint=endpoint)


def settle(store, identity, allow_change=False):
    return settle_identity(store, PATHS, identity, allow_change=allow_change)


def test_a_run_is_recorded_and_recognised(store, job):
    """New, then known; the record is written once."""
    assert settle(store, identity(job)) is False
    before = store.read(PATHS.identity)
    assert settle(store, identity(job)) is True
    assert settle(store, identity(job), allow_change=True) is True
    assert store.read(PATHS.identity) == before
    assert list(store.list(PATHS.changes + "/")) == []


def test_what_differs_is_listed_and_stops_the_run(store, job):
    """Every difference with both values, exit status 2, and nothing is written."""
    settle(store, identity(job, job={"width": 3}))
    other = identity(changed(job, "lm", seed=5), job={"width": 4}, sample="50%")
    with pytest.raises(RunChangedError) as caught:
        settle(store, other)
    changes = caught.value.data["changes"]
    assert changes["parameters.width"] == [3, 4]
    assert changes["stages.lm.seed"] == [0, 5]
    assert changes["sample"] == ["100%", "50%"]
    assert "stages.lm.seed: was 0, is 5" in caught.value.message
    assert "--allow-change" in caught.value.hint
    assert caught.value.exit_status == 2
    assert list(store.list(PATHS.changes + "/")) == []


def test_an_allowed_change_is_recorded_and_holds_from_then_on(store, job):
    """The first is recorded with what differed; after it the changed job is the run, and the old one is not."""
    first, second, third = (identity(changed(job, "lm", seed=seed)) for seed in (0, 1, 2))
    settle(store, first)
    assert settle(store, second, allow_change=True) is True
    assert settle(store, second) is True
    with pytest.raises(RunChangedError):
        settle(store, first)
    settle(store, third, allow_change=True)
    assert settle(store, third) is True
    records = [json.loads(store.read(PATHS.change(number))) for number in (1, 2)]
    assert [r["changes"] for r in records] == [{"stages.lm.seed": [0, 1]}, {"stages.lm.seed": [1, 2]}]
    assert json.loads(store.read(PATHS.identity))["identity"]["stages"]["lm"]["seed"] == 0


def test_a_refusal_is_not_a_new_run(store, job):
    """403 on reading the record is raised, not taken for "no such run"."""
    settle(store, identity(job))

    class Refuses:
        def __getattr__(self, name):
            return getattr(store, name)

        def read(self, name):
            raise StoreDeniedError(f"read {name}: 403.", operation="read")

    with pytest.raises(StoreDeniedError):
        settle(Refuses(), identity(job))
