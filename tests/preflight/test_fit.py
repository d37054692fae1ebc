"""Fit, roofline and what would help: arithmetic, by hand."""

from __future__ import annotations

import pytest

from tpupipe.hardware.facts import generation_facts
from tpupipe.preflight.fit import GIB, Consumer, Layout, Memory, hbm_bytes, largest, remedies, roofline


def test_donated_arguments_count_once():
    """State of 10 in and out in place, batch of 1, 5 of activations, 1 of code."""
    assert Memory(argument=11, output=10, temporary=5, alias=10, code=1).total == 17


def test_a_chip_with_two_devices_gives_each_half():
    assert hbm_bytes(generation_facts("v7x"), 2) == 96 * GIB
    assert hbm_bytes(generation_facts("v5e"), 1) == 16 * GIB


def test_the_longer_of_the_two_bounds():
    """v6e: 918 TFLOP/s and 1638 GB/s."""
    facts = generation_facts("v6e")
    busy = roofline(918e12, 1638e9 / 2, facts, 1)
    assert (busy.compute_s, busy.memory_s, busy.step_s, busy.bound) == (1.0, 0.5, 1.0, "compute")
    waiting = roofline(918e12 / 4, 1638e9 / 2, facts, 1)
    assert (waiting.step_s, waiting.bound) == (0.5, "memory")
    assert roofline(918e12, 0, facts, 2).step_s == 2.0


def test_largest_three():
    found = largest([Consumer("a", 1), Consumer("b", 4), Consumer("c", 3), Consumer("d", 4)])
    assert [each.what for each in found] == ["b", "d", "c"]


def layout(**options):
    return Layout(
        **{"state_bytes": 12 * GIB, "ways": 4, "sharding": "replicated", "batch": 64, "train": True} | options
    )


def test_fsdp_helps_a_replicated_state():
    """12 GiB over 4 devices and 6 GiB beside them: 9 GiB."""
    found = remedies(layout(), 18 * GIB, 16 * GIB)
    assert "fsdp" in found[0]
    assert "9.00 GiB per device, which about fits" in found[0]
    assert any("batch of about 40 rows instead of 64" in each for each in found)


def test_rematerialisation_helps_where_activations_are_most():
    found = remedies(layout(state_bytes=GIB, sharding="fsdp"), 20 * GIB, 16 * GIB)
    assert any("rematerialisation" in each for each in found)
    assert not any("fsdp" in each for each in found)


def test_inference_is_not_told_of_training():
    found = " ".join(remedies(layout(train=False, state_bytes=GIB), 20 * GIB, 16 * GIB))
    assert "fsdp" not in found
    assert "rematerialisation" not in found
    assert "batch" in found


def test_there_is_always_something_to_do():
    assert remedies(layout(state_bytes=20 * GIB, ways=1, train=False), 20 * GIB, 16 * GIB) == [
        "a slice with more chips, or chips with more HBM"
    ]


@pytest.mark.parametrize(("needed", "available"), [(18, 16), (100, 16), (17, 16.9)])
def test_a_smaller_batch_is_smaller_and_divides(needed, available):
    for each in remedies(layout(state_bytes=2 * GIB), int(needed * GIB), int(available * GIB)):
        if each.startswith("a batch"):
            rows = int(each.split()[4])
            assert 0 < rows < 64
            assert rows % 4 == 0
