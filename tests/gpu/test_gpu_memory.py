"""NVML on a real GPU: what it says, and memory that is taken and comes back. Needs torch with CUDA."""

import subprocess
import sys

import pytest

from runner.serving import checks, gpu
from runner.serving.checks import Verdict
from runner.serving.memory import Memory

pytestmark = pytest.mark.gpu

HOLD = (
    "import sys, torch\n"
    "held = torch.empty(8 * 2**30, dtype=torch.uint8, device='cuda:0')\n"
    "print('held', flush=True)\n"
    "sys.stdin.read()\n"
)


def test_every_gpu_is_seen() -> None:
    """Names, sizes and a driver, and an idle GPU counts as free."""
    found = gpu.gpus()
    assert found
    assert all(one.name and one.total_gib > 1 for one in found)
    assert gpu.driver_version()
    assert all(check.verdict is not Verdict.WRONG for check in checks.graphics(wanted=True))
    if len(found) > 1:
        assert gpu.topology().split(",")[0] in ("NVLink", "PCIe only")


def test_memory_is_seen_to_go_and_to_come_back() -> None:
    """The level before, 8 GiB more while another process holds them, and the level again after its end."""
    memory = Memory(("0",), wait_s=30.0)
    memory.await_room(lambda: None)
    before = memory.now_gib()["0"]
    with subprocess.Popen(
        [sys.executable, "-c", HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline().strip() == "held"
        assert memory.now_gib()["0"] > before + 7.9
        holder.kill()
    assert memory.await_release() == ()
    assert memory.now_gib()["0"] < before + 0.5
