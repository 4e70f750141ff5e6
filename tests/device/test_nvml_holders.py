"""Which processes hold memory of a GPU."""

from headroom.device.nvml import Nvml, find_holders
from tests.device.machines import make_driver

NVML = make_driver(
    {"GPU-other": [(1, "none of ours", 1)], "GPU-1": [(7,), (42, "python", 3 << 30)]}
)


def test_holders_are_those_of_the_gpu_that_was_asked_about():
    assert [h.pid for h in find_holders("GPU-1", NVML)] == [7, 42]
    assert find_holders("GPU-9", NVML) == find_holders(None, Nvml(error="no driver")) == ()
