"""Which requests a store fault's ``name`` is about."""

from __future__ import annotations

import pytest

from tpupipe.faults.store_faults import StoreFault
from tpupipe.faults.store_requests import Operation, StoreRequest


@pytest.mark.parametrize(
    ("name", "prefix", "hit"),
    [
        ("checkpoints/", "runs/lm/a/stages/lm/checkpoints/", True),
        ("checkpoints/", "runs/lm/a/stages/lm/checkpoints/0000000020-000001/arrays/", True),
        ("checkpoints/$", "runs/lm/a/stages/lm/checkpoints/", True),
        ("checkpoints/$", "runs/lm/a/stages/lm/checkpoints/0000000020-000001/arrays/", False),
        ("/nll/checkpoints/$", "runs/lm/a/stages/lm/checkpoints/", False),
    ],
)
def test_a_name_is_a_part_or_with_a_dollar_the_end(name, prefix, hit):
    fault = StoreFault.parse(f"stale-list@list,seconds=60,name={name}")
    assert fault.matches(StoreRequest("GET", Operation.LIST, "b", prefix)) is hit
