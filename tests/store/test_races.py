"""Many processes at once, and processes that die in the middle."""

import contextlib
import random
import signal
import subprocess

import google_crc32c
import pytest

from tpupipe.errors import ObjectExistsError

SIZE = 24 << 20


def test_twenty_processes_create_one_object(place, race):
    """Twenty simultaneous creates: one winner, nineteen told that it exists, and the content is the winner's."""
    answers = race(
        f"store = {place.code}\ndef attempt(me):\n    store.create('x/one', str(me).encode() * 1000)\n    return 'won'",
        20,
    )
    assert sorted(answers) == ["ObjectExistsError"] * 19 + ["won"]
    assert place.open().read("x/one") == str(answers.index("won")).encode() * 1000


def test_twenty_processes_make_one_bucket(place, race):
    """Twenty first users of a place that does not exist yet all get it."""
    answers = race(f"store = {place.code}\ndef attempt(me):\n    return store.create(str(me), b'1').size", 20)
    assert answers == [1] * 20
    assert len(list(place.open().list())) == 20


@pytest.mark.parametrize("seed", range(3))
def test_a_writer_killed_in_the_middle_leaves_nothing_half_made(place, process, seed):
    """SIGKILL at any moment of creating: what is listed is complete, and the missing one can be created."""
    store = place.open()
    writer = process(
        f"from tpupipe.store.objects import open_store\nstore = {place.code}\ndata = bytes({SIZE})\n"
        "for number in range(1000):\n    print(number)\n    store.create(f'd/{number}', data)\n"
    )
    assert writer.stdout.readline() == "0\n"
    ends = random.Random(seed).uniform(0.0, 0.4)
    with pytest.raises(subprocess.TimeoutExpired):
        writer.wait(ends)
    writer.send_signal(signal.SIGKILL)
    assert writer.wait() == -signal.SIGKILL

    expected = google_crc32c.value(bytes(SIZE))
    listed = list(store.list("d/"))
    assert [info.size for info in listed] == [SIZE] * len(listed)
    assert {store.checksum(info.name) for info in listed} <= {expected}
    # A request that had arrived whole is carried out after its sender's death: there by now, or ours to create.
    with contextlib.suppress(ObjectExistsError):
        store.create(f"d/{len(listed)}", bytes(SIZE))
    assert store.checksum(f"d/{len(listed)}") == expected
    assert store.delete_prefix("d") == len(listed) + 1
    assert list(store.list()) == []
