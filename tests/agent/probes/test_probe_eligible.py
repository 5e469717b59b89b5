"""Which GPUs may be probed, by nvidia-ml-py on the stand-in for NVML, with real processes as holders."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from drover_agent.probes import eligible, trying
from drover_agent.probes.eligible import DriverError, Found, Gpu, Guard, choose, look
from drover_agent.probes.runner import End, GpuRef, Request, Runner
from testbed.nvml import FakeNvml
from testbed.waiting import wait_until

CHILD = Path(__file__).resolve().parents[2] / "testbed/probe_child.py"
IDLE = [sys.executable, "-c", "import sys; sys.stdin.read()"]


@pytest.fixture
def free(fake_nvml: FakeNvml) -> FakeNvml:
    """Eight GPUs that nobody holds."""
    with fake_nvml.batch():
        for gpu in range(8):
            fake_nvml.hold(gpu)
    return fake_nvml


@pytest.fixture
def job() -> Iterator[int]:
    """A process in a session of its own."""
    process = subprocess.Popen(IDLE, stdin=subprocess.PIPE, start_new_session=True)
    yield process.pid
    process.communicate()


def test_all_gpus_that_nobody_holds_may_be_probed(free: FakeNvml) -> None:
    gpus, left_out = choose(look(), [])
    assert [gpu.slot for gpu in gpus] == list(range(8))
    assert gpus[3].uuid == "GPU-00000003-0000-4000-8000-000000000000"
    assert left_out == {}


def test_what_may_not_be_probed_says_why(free: FakeNvml, job: int) -> None:
    with free.batch():
        free.hold(1, job)
        free.mig(2, [0, 1])
        free.lose(3)
        free.error(4, "nvmlDeviceGetComputeRunningProcesses_v3", "NO_PERMISSION")
    gpus, left_out = choose(look(), [])
    assert [gpu.slot for gpu in gpus] == [0, 5, 6, 7]
    assert left_out[1].startswith(f"held by process {job} (python")
    assert left_out[2] == "it is split into MIG instances, which are not probed"
    assert left_out[3].startswith("the driver says of it: ")
    assert left_out[4].startswith("the driver does not say who holds it: ")
    forced, left_out = choose(look(), [1, 2, 9], force=True)
    assert [gpu.slot for gpu in forced] == [1], "a person may disturb a process, nothing else"
    assert (sorted(left_out), left_out[9]) == ([2, 9], "there is no such GPU: this node has 8")


def test_memory_in_use_by_nobody_that_the_driver_names_counts_as_a_process(free: FakeNvml) -> None:
    """As inside a container that does not see the machine's processes."""
    with free.batch():
        free.set(2, "nvmlDeviceGetMemoryInfo_v2.used", 3 << 30)
        free.set(5, "nvmlDeviceGetMemoryInfo_v2.used", 255 << 20)
        free.error(6, "nvmlDeviceGetMemoryInfo_v2", "FUNCTION_NOT_FOUND")
    gpus, left_out = choose(look(), [])
    assert left_out == {
        2: "held: 3072 MiB of its memory are in use and the driver names no process for them "
        "(outside of this container, or one that died and left them)"
    }
    assert len(gpus) == 7
    assert [gpu.slot for gpu in choose(look(), [2], force=True)[0]] == [2]


def test_slots_are_taken_in_the_order_asked_and_once(free: FakeNvml) -> None:
    gpus, _ = choose(look(), [5, 0, 5])
    assert [gpu.slot for gpu in gpus] == [5, 0]


def test_a_process_behind_mps_holds_too(free: FakeNvml) -> None:
    free.set(6, "nvmlDeviceGetMPSComputeRunningProcesses", 1)
    _, left_out = choose(look(), [])
    assert left_out.keys() == {6}


def test_a_node_without_a_driver_has_no_gpu_and_says_why(nvml_library: Path) -> None:
    assert look() == Found((), "no NVIDIA driver is in use here (NVML Shared Library Not Found)")
    gpus, left_out = choose(look(), [0])
    assert gpus == []
    assert left_out[0].startswith("there is no such GPU: no NVIDIA driver is in use here")


def test_a_driver_that_fails_or_hangs_is_no_node_without_gpus(free: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    free.down("LIB_RM_VERSION_MISMATCH")
    with pytest.raises(DriverError, match="the NVIDIA driver cannot be used"):
        look()
    free.up()
    monkeypatch.setattr(eligible, "DRIVER_S", 0.2)
    free.block(2, "nvmlDeviceGetUUID")
    try:
        with pytest.raises(DriverError, match=r"does not answer within 0\.2 s"):
            look()
    finally:
        free.unblock(2, "nvmlDeviceGetUUID")


def gpus_of(found: Found, *slots: int) -> list[Gpu]:
    return [gpu for gpu in found.gpus if gpu.slot in slots]


def settled(guard: Guard) -> int:
    """After two more whole looks; how many there were."""
    seen = guard.looks
    wait_until(lambda: guard.looks >= seen + 2, "looks of the guard")
    return guard.looks


@pytest.fixture(autouse=True)
def quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eligible, "LOOK_S", 0.02)


def test_the_guard_finds_a_process_of_another_session_and_no_other(free: FakeNvml, job: int) -> None:
    own = os.getsid(0)
    with Guard(gpus_of(look(), 0, 3)) as guard:
        settled(guard)
        assert guard.needed(own) == ""
        free.hold(5, job)  # not under test
        free.hold(3, os.getpid())  # the probe itself
        settled(guard)
        assert guard.needed(own) == ""
        free.hold(3, job)
        wait_until(lambda: guard.needed(own), "the guard's word")
        assert guard.needed(own).startswith(f"GPU 3 is held by process {job} (python")
        assert guard.needed(job) == "", "of the probe's own session"


def test_those_that_a_person_forced_the_probe_upon_are_tolerated_and_no_others(free: FakeNvml, job: int) -> None:
    free.hold(0, job)
    with Guard(gpus_of(look(), 0), tolerated=[job]) as guard:
        settled(guard)
        assert guard.needed(1) == ""
        free.hold(0, os.getpid())
        wait_until(lambda: guard.needed(1))


def test_a_process_out_of_sight_that_stays_counts(free: FakeNvml) -> None:
    with Guard(gpus_of(look(), 0)) as guard:
        settled(guard)
        free.hold(0, 2_000_000_000)  # beyond the kernel's largest
        for session in (os.getsid(0), 0):  # in a container whose leader is outside, a session's number is 0
            wait_until(lambda session=session: guard.needed(session))  # type: ignore[misc]  # bound now
            assert guard.needed(session) == "GPU 0 is held by process 2000000000 (not to be seen from here)"


def test_a_driver_that_no_longer_says_who_holds_its_gpus_ends_the_probe(free: FakeNvml) -> None:
    with Guard(gpus_of(look(), 0)) as guard:
        settled(guard)
        free.lose(0)
        wait_until(lambda: guard.needed(1))
        assert guard.needed(1).startswith("the driver no longer says who holds its GPUs: ")


def test_a_gpu_that_is_lost_under_a_probe_is_the_finding_and_no_giving_way(free: FakeNvml) -> None:
    gpus = gpus_of(look(), 4, 7)
    with Guard(gpus) as guard:
        runner = Runner(
            Request(("gemm_bf16",), tuple(GpuRef(gpu.slot, gpu.uuid) for gpu in gpus)),
            guard.needed,
            lambda text: free.lose(4) if "GPU 7" in text else None,
            [sys.executable, str(CHILD), "hang"],
        )
        report = trying._with_silence(runner.run(), guard)
    assert (report.end, report.gpu, report.probe) == (End.LOST, 4, "gemm_bf16")
    assert report.detail.startswith("the driver lost GPU 4 under the probe; it gave way during gemm_bf16, GPU 7")


def test_nor_does_one_that_hangs(free: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eligible, "SILENT_S", 0.2)
    with Guard(gpus_of(look(), 0)) as guard:
        settled(guard)
        free.block(0, "nvmlDeviceGetComputeRunningProcesses_v3")
        try:
            wait_until(lambda: guard.needed(1))
            assert guard.needed(1) == "the driver has not said for 0.2 s who holds its GPUs"
        finally:
            free.unblock(0, "nvmlDeviceGetComputeRunningProcesses_v3")


def test_a_slot_that_has_another_gpu_now_is_not_probed(free: FakeNvml) -> None:
    before = gpus_of(look(), 0)
    free.set(0, "uuid", "GPU-99999999-0000-4000-8000-000000000000")
    with Guard(before) as guard:
        wait_until(lambda: guard.needed(1))
        assert guard.needed(1) == "GPU 0 is another one now"


def test_on_the_cpu_nobody_is_in_the_way() -> None:
    with Guard([]) as guard:
        assert guard.needed(1) == ""


def test_a_job_that_starts_meanwhile_gets_its_gpu(free: FakeNvml, job: int) -> None:
    gpus = gpus_of(look(), 4, 7)
    with Guard(gpus) as guard:
        runner = Runner(
            Request(("gemm_bf16",), tuple(GpuRef(gpu.slot, gpu.uuid) for gpu in gpus)),
            guard.needed,
            lambda text: free.hold(7, job) if "GPU 7" in text else None,
            [sys.executable, str(CHILD), "hang"],
        )
        report = runner.run()
    assert report.end is End.STOPPED
    assert report.detail.startswith("gave way during gemm_bf16, GPU 7: bf16 8192: GPU 7 is held by process")
