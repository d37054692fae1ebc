"""What the compiler says when it refuses, read into facts. The texts are the compiler's own, with other names."""

from __future__ import annotations

import pytest

from tpupipe.preflight.refusals import Reason, parse_size, read_crash, read_refusal

GIB = 2**30
EARLY = (
    "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries (17.13G) exceeds "
    "available HBM (15.75G)."
)
LISTED = """RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space hbm. Used 19.04G of 15.48G hbm. Exceeded hbm capacity by 3.55G.

Total hbm usage >= 19.55G:
    reserved        530.00M
    program          19.04G
    arguments            0B

Output size 0B; shares 0B with arguments.

Program hbm requirement 19.04G:
    global            36.0K
    HLO temp         19.04G (100.0% utilization: Unpadded (18.96G) Padded (18.96G), 0.4% fragmentation (72.26M))

  Largest program allocations in hbm:

  1. Size: 2.00G
     Operator: op_name="jit(step)/transpose(jvp)/dot_general" source_file="/jobs/model.py" source_line=41
     Shape: f32[32,4096,4096]{2,1,0:T(8,128)}
     Unpadded size: 2.00G
     XLA label: fusion.12 = fusion(...)
     Allocation type: HLO temp
     ==========================

  2. Size: 4.00G
     Shape: bf16[2048,1048576]{1,0}
     Unpadded size: 4.00G
     XLA label: copy.3 = copy(param.1)
     Allocation type: HLO temp
     ==========================
"""
VMEM = "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space vmem. Used 20.00M of 16.00M vmem. Exceeded vmem capacity by 4.00M."
ABORT = """E0000 00:00:1.2   1 a.cc:1] noise
F1130 13:42:24.161293    1909 shape.h:843] Check failed: buffer != nullptr ((null) vs. (null))
*** Check failure stack trace: ***
    @     0x7f7018e9bc54  absl::log_internal::LogMessage::SendToLog()
    @     0x7f7010c3138f  xla::jellyfish::cholesky_handler::SpmdPartitioningVisitor()
    @     0x7f700b8a27b4  xla::jellyfish::TpuSpmdPartitioningVisitor::HandleCustomCall()
"""


def test_out_of_memory_before_allocation():
    found = read_refusal("JaxRuntimeError", EARLY)
    assert found.reason is Reason.OUT_OF_MEMORY
    assert found.needed_bytes == pytest.approx(17.13 * GIB)
    assert found.available_bytes == pytest.approx(15.75 * GIB)
    assert found.allocations == ()


def test_out_of_memory_with_its_largest_buffers():
    """Largest first, with shape, and operation and line where they were given."""
    found = read_refusal("XlaRuntimeError", LISTED)
    assert found.needed_bytes == pytest.approx(19.04 * GIB)
    assert [each.size_bytes for each in found.allocations] == [4 * GIB, 2 * GIB]
    assert found.allocations[0].what == "bf16[2048,1048576]{1,0}, HLO temp"
    assert "/jobs/model.py:41" in found.allocations[1].what
    assert "f32[32,4096,4096]" in found.allocations[1].what


def test_the_memory_on_the_chip_is_told_apart():
    found = read_refusal("XlaRuntimeError", VMEM)
    assert (found.space, found.needed_bytes, found.available_bytes) == ("vmem", 20 * 2**20, 16 * 2**20)


def test_an_operation_without_a_rule_is_unsupported_and_named():
    text = "MLIR translation rule for primitive 'eig' not found for platform tpu"
    found = read_refusal("NotImplementedError", text)
    assert (found.reason, found.operation) == (Reason.UNSUPPORTED, "eig")


def test_metadata_names_the_line():
    text = 'UNIMPLEMENTED: no such thing: metadata={op_name="jit(step)/sort" source_file="/jobs/a.py" source_line=7}'
    found = read_refusal("JaxRuntimeError", text)
    assert (found.reason, found.operation, found.source) == (Reason.UNSUPPORTED, "jit(step)/sort", "/jobs/a.py:7")


def test_a_topology_that_the_compiler_does_not_have():
    text = 'INVALID_ARGUMENT: Topology layout "v6e:3x3" is not divisible by the given (or default) chips_per_host_bounds "2x2x1"'
    assert read_refusal("JaxRuntimeError", text).reason is Reason.TARGET


def test_an_abort_is_told_with_its_check_and_its_operation():
    found = read_crash("SIGABRT", ABORT)
    assert found.reason is Reason.CRASH
    assert "SIGABRT: Check failed: buffer != nullptr" in found.message
    assert "shape.h:843" in found.message
    assert found.operation == "cholesky"


def test_an_end_without_a_word():
    assert read_crash("SIGKILL", "").message == "The compiler's process ended with SIGKILL: it said nothing"


@pytest.mark.parametrize("text", ["", "12X", "G", "1.2.3G"])
def test_no_size(text):
    with pytest.raises(ValueError):
        parse_size(text)
