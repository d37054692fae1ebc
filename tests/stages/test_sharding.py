"""Meshes, what divides over them, and which rows a process feeds."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpupipe.errors import JobError
from tpupipe.hardware.mesh import check_batch, mesh_shape

ROOT = Path(__file__).parents[2]


@given(st.lists(st.integers(1, 6), min_size=1, max_size=4), st.integers(0, 4), st.integers(1, 6))
def test_the_rest_is_filled_in(sizes, position, rest):
    """A -1 anywhere becomes what makes the product the number of devices, and order is kept."""
    mesh = {f"a{i}": size for i, size in enumerate(sizes)}
    items = list(mesh.items())
    items.insert(min(position, len(items)), ("rest", -1))
    shape = mesh_shape(dict(items), math.prod(sizes) * rest)
    assert list(shape.items()) == [(axis, rest if size == -1 else size) for axis, size in items]


@pytest.mark.parametrize(
    ("mesh", "devices"),
    [
        ({"data": 4}, 8),
        ({"data": 16}, 8),
        ({"data": -1, "model": 3}, 8),
        ({"data": -1, "model": 16}, 8),
        ({"data": -1}, 0),
    ],
)
def test_a_mesh_that_does_not_cover_the_devices_is_refused(mesh, devices):
    """Left-over devices would idle, missing ones do not exist."""
    with pytest.raises(JobError, match=f"does not cover {devices} devices"):
        mesh_shape(mesh, devices)


@given(st.integers(1, 100), st.integers(1, 8), st.integers(1, 8))
def test_a_batch_divides_over_its_axes(batch_size, data, model):
    """Exactly the multiples pass; the error names the multiples on both sides."""
    mesh = {"data": data, "model": model}
    for axes, ways in ((("data",), data), (("data", "model"), data * model)):
        if batch_size % ways == 0:
            check_batch(batch_size, mesh, axes)
        else:
            with pytest.raises(JobError) as caught:
                check_batch(batch_size, mesh, axes)
            near = {int(word) for word in caught.value.hint.replace(".", "").replace(":", "").split() if word.isdigit()}
            assert batch_size + ways - batch_size % ways in near
            assert all(n % ways == 0 and n > 0 for n in near)


_CODE = """
import json, warnings
warnings.simplefilter("error")
import jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from tpupipe.errors import JobError
from tpupipe.hardware.mesh import mesh_shape
from tpupipe.programs.sharding import RowRange, global_array, make_mesh, row_range, state_shardings

answers = {}
assert len(jax.devices()) == 8

# One process holds all rows, however they are split or repeated.
ranges = []
for axes, spec in (({"data": -1}, P("data")), ({"data": 4, "model": 2}, P("data")), ({"model": 8}, P()), ({"a": 2, "b": 4}, P(("a", "b")))):
    sharding = NamedSharding(make_mesh(mesh_shape(axes, 8), jax.devices()), spec)
    r = row_range(sharding, 16)
    ranges.append([r.start, r.stop, r.own_start, r.own_stop])
answers["ranges"] = ranges

# Several processes, as their devices say: stand-ins with the two attributes that are looked at.
class Device:
    def __init__(self, id, process_index):
        self.id, self.process_index = id, process_index

class Sharding:
    def __init__(self, rows_of):
        self.rows_of = rows_of
    def devices_indices_map(self, shape):
        return {Device(i, p): (slice(*rows),) for i, (p, rows) in enumerate(self.rows_of)}

def as_process(me, rows_of, batch):
    jax.process_index = lambda: me
    try:
        r = row_range(Sharding(rows_of), batch)
        return [r.start, r.stop, r.own_start, r.own_stop]
    except JobError as error:
        return error.message

split = [(0, (0, 2)), (0, (2, 4)), (1, (4, 6)), (1, (6, 8))]
shared = [(0, (0, 4)), (1, (0, 4)), (0, (4, 8)), (1, (4, 8))]
half = [(0, (0, 4)), (1, (0, 4)), (2, (4, 8)), (3, (4, 8))]
interleaved = [(0, (0, 2)), (1, (2, 4)), (0, (4, 6)), (1, (6, 8))]
real = jax.process_index
answers["split"] = [as_process(p, split, 8) for p in (0, 1)]
answers["shared"] = [as_process(p, shared, 8) for p in (0, 1)]
answers["half"] = [as_process(p, half, 8) for p in range(4)]
answers["interleaved"] = as_process(0, interleaved, 8)
jax.process_index = real

# A global array is the rows, wherever they lie.
sharding = NamedSharding(make_mesh({"data": 4, "model": 2}, jax.devices()), P("data"))
rows = np.arange(16 * 3, dtype=np.int64).reshape(16, 3)
made = global_array(sharding, 16, 0, rows)
answers["array"] = [made.shape == (16, 3), str(made.dtype), bool((np.asarray(made) == rows).all()), made.sharding == sharding]

# Shardings of a state.
mesh = make_mesh({"data": 4, "model": 2}, jax.devices())
tree = {"w": jax.ShapeDtypeStruct((3, 8, 12), "float32"), "b": jax.ShapeDtypeStruct((6,), "float32"), "n": jax.ShapeDtypeStruct((), "int32"), "e": jax.ShapeDtypeStruct((0, 4), "float32")}
def specs(rule):
    parts = {k: tuple(s.spec) for k, s in state_shardings(tree, mesh, rule, ("data",)).items()}
    return {k: [a if a is None or isinstance(a, str) else a[0] for a in spec] for k, spec in parts.items()}
answers["replicated"] = specs("replicated")
answers["fsdp"] = specs("fsdp")
seen = []
own = state_shardings(tree, mesh, lambda path, shape, m: seen.append((path, shape, m is mesh)) or P(), ("data",))
answers["own"] = sorted(seen)
print(json.dumps(answers))
"""


@pytest.fixture(scope="module")
def answers() -> dict:
    """What a process with eight devices says."""
    done = subprocess.run(
        [sys.executable, "-c", _CODE],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env={
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
            "PYTHONPATH": str(ROOT),
        },
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)


def test_one_process_feeds_every_row(answers):
    """Split, repeated over a model axis, replicated or split over two axes: rows 0 to 16, all its own."""
    assert answers["ranges"] == [[0, 16, 0, 16]] * 4


def test_rows_split_over_processes(answers):
    """Each feeds its half and accounts for it."""
    assert answers["split"] == [[0, 4, 0, 4], [4, 8, 4, 8]]


def test_rows_that_several_processes_hold_count_once(answers):
    """All feed them, the lowest accounts for them: the parts add up to the batch."""
    assert answers["shared"] == [[0, 8, 0, 8], [0, 8, 0, 0]]
    assert answers["half"] == [[0, 4, 0, 4], [0, 4, 0, 0], [4, 8, 4, 8], [4, 8, 4, 4]]


def test_interleaved_hosts_are_refused(answers):
    """One process with rows 0-2 and 4-6 has no one block; the error says what it got."""
    assert "[(0, 2), (4, 6)]" in answers["interleaved"]


def test_a_global_array_holds_the_rows(answers):
    """Shape, values and sharding; 64-bit integers become JAX's 32."""
    assert answers["array"] == [True, "int32", True, True]


def test_state_shardings(answers):
    """Fsdp splits the largest dimension that divides, and leaves whole what has none; a function is asked per leaf."""
    assert answers["replicated"] == {"w": [], "b": [], "n": [], "e": []}
    assert answers["fsdp"] == {"w": [None, None, "data"], "b": [], "n": [], "e": [None, "data"]}
    shapes = {"b": [6], "e": [0, 4], "n": [], "w": [3, 8, 12]}
    assert answers["own"] == [[f"['{name}']", shape, True] for name, shape in shapes.items()]
