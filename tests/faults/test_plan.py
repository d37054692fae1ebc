"""What faults can be asked for, and how a typing mistake is answered."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpupipe.errors import UsageError
from tpupipe.faults.plan import Action, parse_fault, parse_faults
from tpupipe.faults.points import POINTS


@given(
    st.sampled_from(list(Action)),
    st.sampled_from(sorted(POINTS)),
    st.one_of(st.none(), st.integers(0, 10**6)),
    st.dictionaries(st.sampled_from(["stage", "unit"]), st.text("abc019-.", min_size=1), max_size=2),
    st.integers(1, 99),
    st.integers(1, 99),
)
def test_every_action_at_every_point(action, point, value, facts, times, seconds):
    """ACTION@POINT[=VALUE][,key=value]… is read as written, for all of them."""
    text = f"{action}@{point}" + ("" if value is None else f"={value}")
    text += "".join(f",{key}={fact}" for key, fact in facts.items()) + f", times={times},seconds={seconds}"
    fault = parse_fault(text)
    own = () if value is None else ((POINTS[point].fact, str(value)),)
    assert (fault.action, fault.point, fault.times, fault.seconds) == (action, point, times, seconds)
    assert fault.when == (*own, *facts.items())
    assert fault.text == text


def test_defaults():
    """Once, anywhere, one second."""
    fault = parse_fault("slow@train.step")
    assert (fault.when, fault.times, fault.seconds) == ((), 1, 1.0)


@pytest.mark.parametrize("typo", ["train.stp", "trainstep", "train", "", "nowhere", "step"])
def test_an_unknown_point_lists_all_points(typo):
    """The error names every fault point there is."""
    with pytest.raises(UsageError) as caught:
        parse_fault(f"kill-worker@{typo}=3")
    assert all(name in caught.value.hint for name in POINTS)


def test_a_near_miss_names_the_nearest():
    """train.stp: train.step was meant."""
    with pytest.raises(UsageError) as caught:
        parse_fault("kill-worker@train.stp=3")
    assert caught.value.hint.startswith("Did you mean train.step?")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "no '@'"),
        ("kill-worker", "no '@'"),
        ("explode@train.step=1", "kill-worker, kill-driver, kill-host, raise, hang, slow"),
        ("@train.step", "kill-worker, kill-driver, kill-host, raise, hang, slow"),
        ("slow@train.step,second=2", "seconds"),
        ("slow@train.step,2", "key=value"),
        ("slow@train.step,", "key=value"),
        ("slow@train.step,index=2", "step, rank, stage, unit"),
        ("slow@train.step,times=many", "'many' is not a number"),
        ("slow@train.step,times=1.5", "'1.5' is not a number"),
        ("slow@train.step,seconds=long", "'long' is not a number"),
    ],
)
def test_what_cannot_be_read_is_refused(text, says):
    """Exit status 2, and the message or its hint says what there is."""
    with pytest.raises(UsageError) as caught:
        parse_fault(text)
    assert says in str(caught.value)
    assert caught.value.exit_status == 2


@pytest.mark.parametrize(
    "text",
    [
        "slow@train.step,times=0",
        "slow@train.step,times=-1",
        "slow@train.step,seconds=-1",
        "slow@train.step,seconds=nan",
        "slow@train.step=",
        "kill-worker@train.step=soon",
        "kill-worker@train.step=-1",
        "kill-worker@train.step=1,rank=",
    ],
)
def test_a_fault_that_could_never_fire_is_refused(text):
    """A drill that injects nothing must not look like one that was survived."""
    with pytest.raises(UsageError):
        parse_fault(text)


def test_matching():
    """The point, and every fact that was named, compared as text; other facts do not matter."""
    fault = parse_fault("raise@train.step=40,rank=1,stage=lm")
    facts = {"step": 40, "rank": 1, "stage": "lm", "unit": "x"}
    assert fault.matches("train.step", facts)
    assert not fault.matches("train.updated", facts)
    for other in ({"step": 4}, {"rank": 0}, {"stage": "l"}):
        assert not fault.matches("train.step", facts | other)
    assert not fault.matches("train.step", {"step": 40, "stage": "lm"})


def test_a_fault_without_conditions_matches_everywhere():
    """raise@unit.read is the first unit, whichever it is."""
    assert parse_fault("raise@unit.read").matches("unit.read", {})


def test_several_keep_their_order():
    """Their place is what counting goes by."""
    assert [f.point for f in parse_faults(["raise@unit.read", "slow@train.step"])] == ["unit.read", "train.step"]


def test_every_point_says_what_it_is():
    """A fact, the process that passes it, and one line of meaning."""
    for info in POINTS.values():
        assert info.fact
        assert info.where in ("driver", "worker")
        assert info.meaning
