"""What is read from a compiled program's text: checked by hand on a recorded program, and on short loops."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpupipe.preflight.hlo import (
    Collective,
    convolution_multiplies,
    read_cost,
    read_module,
    read_shapes,
    trip_count,
)

# Six layers of 4096 x 4096 float32, 16 rows on each of four devices: forward, backward and update, compiled for v5e 2x2.
RECORDED = (Path(__file__).parent / "recorded/six_layers_v5e_2x2.hlo").read_text(encoding="utf-8")
ONE_PRODUCT = 2 * 16 * 4096 * 4096
STATE = 6 * 4096 * 4096 * 4


def test_products_of_a_loop_count_as_often_as_it_runs():
    """Three products a layer (forward, and two backward), six layers: not one layer, as the compiler itself says."""
    assert read_cost(RECORDED).flops == 6 * 3 * ONE_PRODUCT
    assert read_cost(RECORDED, loops=False).flops == 3 * ONE_PRODUCT


def test_collectives_by_kind_and_bytes():
    """The gradient of each layer is summed over the devices, once."""
    assert read_cost(RECORDED).collectives == {"all-reduce": Collective(6, STATE)}


def test_hbm_traffic_has_the_weights_at_least_as_often_as_they_must_be_read():
    """Forward and backward read the weights, the update reads and writes them; it is not many times that either."""
    assert 4 * STATE < read_cost(RECORDED).hbm_bytes < 20 * STATE


def test_no_loop_is_left_unknown():
    assert read_cost(RECORDED).unknown_loops == 0


def test_text_without_entry_is_refused():
    with pytest.raises(ValueError, match="ENTRY"):
        read_cost("HloModule x\n")


def loop(start, bound, step, direction, update="add", copied=False):
    """A module whose only loop counts as told, with a product of 2 * 4 * 4 * 4 operations in its body."""
    begin = "  %begin = s32[] copy(%start)\n" if copied else ""
    return f"""HloModule loop

%body (p: (s32[], f32[4,4])) -> (s32[], f32[4,4]) {{
  %p = (s32[], f32[4,4]{{1,0}}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %one = s32[] constant({step})
  %next = s32[] {update}(%i, %one)
  %x = f32[4,4]{{1,0:T(8,128)}} get-tuple-element(%p), index=1
  %y = f32[4,4]{{1,0:T(8,128)}} dot(%x, %x), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}
  ROOT %t = (s32[], f32[4,4]{{1,0}}) tuple(%next, %y)
}}

%condition (p.1: (s32[], f32[4,4])) -> pred[] {{
  %p.1 = (s32[], f32[4,4]{{1,0}}) parameter(0)
  %i.1 = s32[] get-tuple-element(%p.1), index=0
  %bound = s32[] constant({bound})
  ROOT %less = pred[] compare(%i.1, %bound), direction={direction}
}}

ENTRY %main (a: f32[4,4]) -> f32[4,4] {{
  %a = f32[4,4]{{1,0}} parameter(0)
  %start = s32[] constant({start})
{begin}  %init = (s32[], f32[4,4]{{1,0}}) tuple(%{"begin" if copied else "start"}, %a)
  %w = (s32[], f32[4,4]{{1,0}}) while(%init), condition=%condition, body=%body
  ROOT %out = f32[4,4]{{1,0}} get-tuple-element(%w), index=1
}}
"""


@given(
    start=st.integers(-9, 9),
    bound=st.integers(-9, 30),
    step=st.integers(1, 5),
    closed=st.booleans(),
    copied=st.booleans(),
)
def test_trip_counts_upwards_and_downwards(start, bound, step, closed, copied):
    """As often as Python's own loop would run."""
    wanted = len(range(start, bound + closed, step))
    up = read_cost(loop(start, bound, step, "LE" if closed else "LT", copied=copied))
    down = read_cost(loop(-start, -bound, step, "GE" if closed else "GT", update="subtract"))
    assert (up.flops, down.flops) == (wanted * 128, wanted * 128)
    assert up.unknown_loops == down.unknown_loops == 0


@pytest.mark.parametrize("direction", ["NE", "GT"])
def test_a_loop_that_cannot_be_counted_is_counted_once_and_told(direction):
    cost = read_cost(loop(0, 10, 1, direction))
    assert (cost.flops, cost.unknown_loops) == (128, 1)


def test_a_count_that_the_compiler_wrote_down_wins():
    text = loop(0, 10, 1, "NE").replace("body=%body", 'body=%body, backend_config={"known_trip_count":{"n":"7"}}')
    module = read_module(text)
    assert trip_count(module, "main", module.computations["main"]["w"]) == 7


def test_precision_counts_passes():
    """A float32 product in six bfloat16 passes takes the matrix unit six times as long."""
    text = loop(0, 3, 1, "LT").replace(
        "rhs_contracting_dims={0}", "rhs_contracting_dims={0}, operand_precision={highest,highest}"
    )
    assert read_cost(text).flops == 3 * 6 * 128


@pytest.mark.parametrize(
    ("left", "right", "out", "attributes", "multiplies"),
    [
        # [4*128, 64] x [64, 192]
        ((4, 128, 64), (64, 192, 1), (4, 128, 192), "window={size=1}, dim_labels=0bf_io0->0bf", 4 * 128 * 64 * 192),
        # Attention scores: a batch of 4 x 4 as dilated spatial dimensions, [128, 16] x [16, 128] each.
        (
            (4, 128, 4, 16),
            (4, 128, 4, 16),
            (4, 4, 128, 128),
            "window={size=4x4 stride=3x3 lhs_dilate=4x4}, dim_labels=0b1f_0o1i->01bf",
            4 * 4 * 128 * 16 * 128,
        ),
        # An image: 3 x 3 kernel, "same" padding: the border's positions outside do not count.
        (
            (2, 8, 8, 3),
            (3, 3, 3, 5),
            (2, 8, 8, 5),
            "window={size=3x3 pad=1_1x1_1}, dim_labels=b01f_01io->b01f",
            2 * 3 * 5 * 22 * 22,
        ),
        # Depthwise.
        ((1, 8, 6), (3, 1, 6), (1, 6, 6), "window={size=3}, dim_labels=b0f_0io->b0f, feature_group_count=6", 6 * 3 * 6),
    ],
)
def test_multiplies_of_convolutions(left, right, out, attributes, multiplies):
    assert convolution_multiplies(left, right, out, attributes) == multiplies


def test_shapes_know_their_memory_and_size():
    """VMEM is not HBM; four-bit numbers take half a byte."""
    on_chip, half = read_shapes("(f32[8,128]{1,0:T(8,128)S(1)}, s4[7]{0})")
    assert (on_chip.size_bytes, on_chip.hbm_bytes, half.size_bytes) == (4096, 0, 4)
