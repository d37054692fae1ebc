"""What faults can be asked for, and how a typing mistake is answered."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
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
    assume(POINTS[point].where == "worker" or action not in ("kill-host", "drain-host", "lose-slice"))
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
    assert (fault.rate, fault.deadline_s, fault.how) == (1.0, 15.0, "flip")
    assert parse_fault("drain-host@train.step=3,deadline_s=20").deadline_s == 20
    assert parse_fault("corrupt-checkpoint@restore.start,how=delete").how == "delete"


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
        ("explode@train.step=1", ", ".join(Action)),
        ("@train.step", ", ".join(Action)),
        ("slow@train.step,second=2", "seconds"),
        ("slow@train.step,2", "key=value"),
        ("slow@train.step,", "key=value"),
        ("slow@train.step,index=2", "step, rank, stage, unit"),
        ("slow@train.step,times=many", "'many' is not a number"),
        ("slow@train.step,times=1.5", "'1.5' is not a number"),
        ("slow@train.step,seconds=long", "'long' is not a number"),
        ("kill-host@run.reserved", "passed by the driver"),
        ("drain-host@stage.manifest=fit", "Points of workers: unit.read"),
        ("lose-slice@lease.beat=3", "passed by the driver"),
        ("slow@train.step,deadline_s=3", "step, rank, stage, unit, seconds, times, rate, seed"),
        ("drain-host@train.step,how=flip", "deadline_s"),
        ("drain-host@train.step,deadline_s=0", "deadline_s=0: a number of at least 1"),
        ("drain-host@train.step,deadline_s=inf", "at least 1"),
        ("corrupt-checkpoint@train.step,how=burn", "allowed: flip, truncate, delete"),
        ("kill-worker@train.step,rate=0", "above 0, up to 1"),
        ("kill-worker@train.step,rate=1.5", "above 0, up to 1"),
        ("kill-worker@train.step,rate=nan", "above 0, up to 1"),
        ("kill-worker@train.step,rate=often", "'often' is not a number"),
        ("kill-worker@train.step,seed=3", "there is no rate="),
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
        "kill-worker@train.step=²",
        "kill-worker@train.step=soon",
        "kill-worker@train.step=-1",
        "kill-worker@train.step=1,rank=",
    ],
)
def test_a_fault_that_could_never_fire_is_refused(text):
    """A drill that injects nothing must not look like one that was survived."""
    with pytest.raises(UsageError):
        parse_fault(text)


@pytest.mark.parametrize("text", ["raise@train.step=040,rank=00", "raise@train.step=40,rank=0"])
def test_numbers_are_compared_as_numbers(text):
    """Points give 40, however it was written; the text stays as it was."""
    fault = parse_fault(text)
    assert fault.matches("train.step", {"step": 40, "rank": 0})
    assert fault.text == text


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


def passes(fault, position=0, steps=2000):
    """The steps of rank 0 at which the fault is drawn."""
    return [n for n in range(steps) if fault.drawn(position, {"step": n, "rank": 0, "stage": "fit"})]


def test_a_rate_draws_about_so_many_and_always_the_same():
    """A tenth of 2,000 passes; the same ones each time and in every process, others for another seed, place or rank."""
    fault = parse_fault("kill-worker@train.step,rate=0.1,seed=7,times=3")
    drawn = passes(fault)
    assert 140 < len(drawn) < 260
    assert drawn[:5] == [5, 9, 12, 18, 21], "stored: the draw must not change from version to version"
    assert passes(parse_fault("slow@train.step,rate=0.1,seed=7")) == drawn
    assert passes(parse_fault("kill-worker@train.step,rate=0.1,seed=8")) != drawn
    assert passes(fault, position=1) != drawn
    assert [n for n in range(2000) if fault.drawn(0, {"step": n, "rank": 1, "stage": "fit"})] != drawn
    assert passes(parse_fault("kill-worker@train.step"), steps=5) == list(range(5))


def test_numbers_and_their_texts_draw_the_same():
    """Facts are compared as text everywhere: by a worker with numbers, by a log with words."""
    fault = parse_fault("slow@train.step,rate=0.5")
    assert all(fault.drawn(0, {"step": n}) == fault.drawn(0, {"step": str(n)}) for n in range(50))


def test_times_bounds_and_a_drawn_pass_is_not_hit_twice():
    """With a rate, a step that is repeated after a restart passes; without one it is hit until `times` is used up."""
    drawn, always = parse_fault("kill-worker@train.step,rate=0.5,times=2"), parse_fault("slow@train.step,times=2")
    first, second, third = ({"step": str(n)} for n in range(3))
    assert drawn.may_fire([], first)
    assert not drawn.may_fire([first], first)
    assert drawn.may_fire([first], second)
    assert not drawn.may_fire([first, second], third)
    assert always.may_fire([first], first)
    assert not always.may_fire([first, first], second)
