"""Whatever becomes of a probe's process is a result, and nothing of it is left."""

from __future__ import annotations

import io
import json
import logging
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from drover_agent.probes import Level, child, processes, runner
from drover_agent.probes.base import Context, Result
from drover_agent.probes.runner import End, GpuRef, Report, Request, Runner
from drover_agent.probes.scratch import scratch
from testbed.waiting import wait_until

CHILD = Path(__file__).resolve().parents[2] / "testbed/probe_child.py"
TWO = (GpuRef(4, "GPU-a"), GpuRef(7, "GPU-b"))


def command(part: str, file: Path | None = None) -> list[str]:
    return [sys.executable, str(CHILD), part, *([str(file)] if file else [])]


def run(part: str, file: Path | None = None, **fields: object) -> Report:
    request = Request(**({"probes": ("gemm_bf16",)} | fields))  # type: ignore[arg-type]  # checked by the dataclass
    return Runner(request, command=command(part, file)).run()


def run_late(
    part: str, after: str, monkeypatch: pytest.MonkeyPatch, file: Path | None = None, **fields: object
) -> Report:
    """Like `run`, with time for 20 s; 25 pass as soon as the child shows `after`. So no load decides the end."""
    passed = [0.0]
    monkeypatch.setattr(runner, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + passed[0]))
    request = Request(**({"probes": ("gemm_bf16",), "timeout_s": 20.0} | fields))  # type: ignore[arg-type]  # as above

    def show(text: str) -> None:
        if text == after:
            passed[0] = 25.0

    return Runner(request, show_progress=show, command=command(part, file)).run()


def is_gone(pid: int) -> bool:
    return processes.is_dead(pid)


def test_a_run_that_goes_well_has_its_results_and_its_progress() -> None:
    shown: list[str] = []
    report = Runner(Request(("gemm_bf16",)), show_progress=shown.append, command=command("well")).run()
    assert (report.end, report.detail, report.probe) == (End.DONE, "", "")
    assert [(r.probe, r.value) for r in report.results] == [("gemm_bf16", 1.0)]
    assert shown == ["gemm_bf16", "  cpu: bf16 128"]


STOPPED_AT_ITS_END = """
import os, signal, sys, types
sys.modules["torch"] = types.ModuleType("torch")
from drover_agent.probes import child
from drover_agent.probes.base import Result

def run(context, name):
    yield Result(name, None, 1.0, "")
    os.kill(os.getpid(), signal.SIGTERM)  # after its last look at `stopping`

child.importlib = types.SimpleNamespace(import_module=lambda _: types.SimpleNamespace(run=run))
sys.exit(child.main())
"""


def test_a_stop_that_comes_while_a_probe_ends_is_not_lost() -> None:
    request = {"gpus": [], "probes": ["gemm_bf16", "sdc"], "level": "quick", "folder": ""}
    done = subprocess.run(
        [sys.executable, "-c", STOPPED_AT_ITS_END],
        input=json.dumps(request) + "\n", capture_output=True, text=True, check=True, timeout=120,
    )  # fmt: skip
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line["probe"] for line in lines if line["kind"] == "start"] == ["gemm_bf16"]
    assert lines[-1] == {"kind": "end", "stopped": True}


def test_a_hang_names_the_probe_and_the_gpu_by_its_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "SLACK_S", 0.5)
    report = run("hang", gpus=TWO, scale=0.0)
    assert (report.end, report.probe, report.gpu) == (End.HUNG, "gemm_bf16", 7)
    assert report.detail.startswith("probe hung: gemm_bf16, GPU 7: bf16 8192; nothing came for")
    assert [r.value for r in report.results] == [1.0], "what was measured before is kept"


def test_a_start_that_hangs_is_one_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "START_S", 0.3)
    report = run("silent")
    assert (report.end, report.probe, report.gpu) == (End.HUNG, "", None)
    assert report.detail.startswith("probe hung: its start;")


@pytest.mark.parametrize(
    ("part", "end", "text"),
    [
        ("crash", End.CRASHED, "was killed by SIGSEGV during gemm_bf16, GPU 7: bf16 8192: RuntimeError: CUDA error"),
        ("killed", End.MEMORY, "was killed by SIGKILL during gemm_bf16, GPU 7: bf16 8192; perhaps the kernel was out"),
        ("exit", End.CRASHED, "ended with code 3 during gemm_bf16, GPU 7: bf16 8192: no such device"),
    ],
)
def test_a_crash_is_reported_with_how_and_in_what(part: str, end: End, text: str) -> None:
    report = run(part, gpus=TWO)
    assert (report.end, report.probe, report.gpu) == (end, "gemm_bf16", 7)
    assert text in report.detail


def test_the_oom_killer_speaks_against_no_gpu() -> None:
    assert not run("killed", gpus=TWO).end.bad
    assert run("crash", gpus=TWO).end.bad


def test_a_probe_that_fails_names_itself_and_the_others_go_on() -> None:
    report = run("fails", gpus=TWO, probes=("gemm_bf16", "launch"))
    why = "RuntimeError: CUDA error: uncorrectable ECC error on GPU 7"
    assert (report.end, report.probe, report.gpu) == (End.CRASHED, "gemm_bf16", 7)
    assert report.detail == f"failed in gemm_bf16, GPU 7: bf16 8192: {why}"
    assert [(r.probe, r.gpu, r.value, r.detail) for r in report.results] == [
        ("gemm_bf16", None, 1.0, ""), ("gemm_bf16", 7, None, f"failed: {why}"), ("launch", None, 1.0, ""),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "devices", "interfaces"),
    [
        ({}, "", ("=lo", "lo")),
        ({"gpus": TWO}, "GPU-a,GPU-b", ("=lo", "lo")),
        ({"group": {"address": "10.0.0.7", "port": 29_500, "node": 0, "nodes": 2}}, "", (None, None)),
    ],
)
def test_the_process_sees_its_devices_alone_and_the_network_only_in_a_group(
    fields: dict[str, object], devices: str, interfaces: tuple[str | None, str | None]
) -> None:
    details = [result.detail for result in run("environment", **fields).results]
    names = [f"{library}_SOCKET_IFNAME={one}" for library, one in zip(("NCCL", "GLOO"), interfaces, strict=True)]
    assert details[1:] == [f"CUDA_VISIBLE_DEVICES={devices}", *names]


def test_settings_that_would_falsify_a_figure_do_not_reach_the_process_nor_does_mps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps")
    monkeypatch.setenv("NCCL_IB_HCA", "mlx5_0")
    asked = ("NVIDIA_TF32_OVERRIDE", "CUDA_LAUNCH_BLOCKING", "NCCL_IB_HCA", "CUDA_MPS_PIPE_DIRECTORY", "TMPDIR")
    request = Request(("gemm_bf16",), folder=str(tmp_path))
    report = Runner(request, command=[*command("environment", tmp_path / "f"), *asked]).run()
    *plain, pipe, folder = [result.detail.partition("=")[2] for result in report.results[1:]]
    assert plain == ["None", "None", "mlx5_0"], "those of the site's network are its own"
    assert Path(folder).parent == tmp_path
    assert pipe == f"{folder}/no-mps", "a folder without a daemon"


def test_a_folder_that_another_run_cleared_up_before_it_was_locked_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, taken = tempfile.mkdtemp, []

    def makes(prefix: str, dir: Path) -> str:
        made = make(prefix=prefix, dir=dir)
        if not taken:
            taken.append(made)
            Path(made).rmdir()
        return made

    monkeypatch.setattr(tempfile, "mkdtemp", makes)
    with scratch(str(tmp_path)) as folder:
        assert folder.is_dir()
        assert str(folder) not in taken
    assert taken
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_process_wrote_is_gone_and_what_a_killed_run_left_goes_with_the_next(tmp_path: Path) -> None:
    (tmp_path / "drover-probe-left").mkdir()
    (tmp_path / "drover-probe-left/disk.bin").write_bytes(b"1")
    shown, others = tmp_path / "shown", tmp_path / "data"
    others.mkdir()
    with scratch(str(tmp_path)) as busy:  # of a run that is at it
        report = run("litter", shown, folder=str(tmp_path))
        assert report.end is End.MEMORY, "killed"
        assert Path(shown.read_text()).parent == tmp_path
        assert sorted(tmp_path.iterdir()) == sorted([shown, others, busy])
    assert sorted(tmp_path.iterdir()) == sorted([shown, others])


def test_a_folder_that_cannot_be_written_is_refused_with_what_to_do(tmp_path: Path) -> None:
    report = run("well", folder=str(tmp_path / "none"))
    assert report.end is End.REFUSED
    assert "No such file or directory; name one that can be written (--folder)" in report.detail


def test_an_installation_that_cannot_use_gpus_speaks_against_no_gpu() -> None:
    report = run("unfit", gpus=TWO)
    assert (report.end, report.gpu, report.results) == (End.REFUSED, None, [])
    assert report.detail == "torch 2.9+cpu on this node is built without CUDA: install one with it"


def test_a_gpu_that_cuda_does_not_see_is_named() -> None:
    report = run("unseen", gpus=TWO)
    assert (report.end, report.gpu) == (End.CRASHED, 7)
    assert report.detail == "CUDA does not see GPU 7, which the driver lists"


def test_memory_that_others_hold_is_no_fault_of_the_device() -> None:
    report = run("short", gpus=TWO)
    assert (report.end, report.detail) == (End.DONE, "")
    assert [(r.gpu, r.value, r.detail) for r in report.results] == [
        (None, 1.0, ""), (7, None, "not enough memory: CUDA out of memory on GPU 7"),
    ]  # fmt: skip


class Cuda:
    def __init__(self, error: str = "") -> None:
        self.error = error

    def init(self) -> None:
        if self.error:
            raise RuntimeError(self.error)


@pytest.mark.parametrize(
    ("version", "error", "why"),
    [
        ("12.8", "", ""),
        (None, "", "torch 2.9 on this node is built without CUDA: install one with it"),
        ("12.8", "The NVIDIA driver on your system is too old (found version 11040)", "torch 2.9 needs another driver"),
    ],
)
def test_what_is_wrong_with_the_installation_is_said(version: str | None, error: str, why: str) -> None:
    torch = SimpleNamespace(__version__="2.9", version=SimpleNamespace(cuda=version), cuda=Cuda(error))
    assert child.unfit(torch).startswith(why)
    assert bool(child.unfit(torch)) == bool(why)


def test_cuda_that_fails_for_another_reason_is_no_matter_of_the_installation(tmp_path: Path) -> None:
    torch = SimpleNamespace(__version__="2.9", version=SimpleNamespace(cuda="12.8"), cuda=Cuda("CUDA unknown error"))
    uvm = tmp_path / "nvidia-uvm"
    assert child.unfit(torch, str(uvm)).startswith(f"CUDA cannot be used: {uvm} is not there")
    uvm.touch()
    with pytest.raises(RuntimeError, match="unknown error"):
        child.unfit(torch, str(uvm))


def test_what_ends_the_run_later_counts_more_than_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    report = run_late("fails", "launch", monkeypatch, probes=("gemm_bf16", "launch"), level=Level.DEEP)
    assert (report.end, report.probe, report.detail) == (
        End.TIMEOUT,
        "launch",
        "took longer than 20 s, last in launch",
    )


def test_the_real_process_distinguishes_a_failure_from_what_cannot_be_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(context: Context, name: str) -> Iterator[Result]:
        yield Result(name, 0, 5.0, "us")
        raise RuntimeError("CUDA error: device-side assert\nsecond line")

    monkeypatch.setattr("drover_agent.probes.launch.run", fails)
    lines = io.StringIO()
    given = Context(None, (), Level.QUICK, 1.0, lambda text: None, lambda: False)
    assert child._run(given, "launch", lines), "the next probe is run"
    first, second = (json.loads(line) for line in lines.getvalue().splitlines())
    assert (first["kind"], first["value"]) == ("result", 5.0)
    assert second == {"kind": "error", "probe": "launch", "text": "RuntimeError: CUDA error: device-side assert"}


def test_a_program_that_cannot_be_started_is_a_crash(tmp_path: Path) -> None:
    report = Runner(Request(("launch",)), command=[sys.executable, str(tmp_path / "none.py")]).run()
    assert report.end is End.CRASHED
    assert "ended with code 2 during its start" in report.detail


def test_more_memory_than_it_may_take_ends_it() -> None:
    report = run("eats", memory_bytes=200 << 20)
    assert report.end is End.MEMORY
    assert "it may take 200 MiB" in report.detail


def test_a_timeout_names_what_it_was_in(monkeypatch: pytest.MonkeyPatch) -> None:
    report = run_late("hang", "  cpu: bf16 128", monkeypatch)
    assert report.end is End.TIMEOUT
    assert report.detail == "took longer than 20 s, last in gemm_bf16, cpu: bf16 128"


@pytest.mark.parametrize("part", ["obedient", "deaf"])
def test_it_gives_way_asked_first_and_killed_if_it_does_not_listen(
    part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "TERM_S", 2.0)  # a loaded machine is no deaf process
    signals: list[int] = []
    send = processes.subprocess.Popen.send_signal
    monkeypatch.setattr(
        processes.subprocess.Popen, "send_signal", lambda child, number: (signals.append(number), send(child, number))
    )
    asked: list[int] = []
    shown: list[str] = []

    def needed(session: int) -> str:
        asked.append(session)
        return "job 7 starts" if shown[-1:] in (["  deaf now"], ["  waits for its end"]) else ""

    file = tmp_path / "shown"
    report = Runner(Request(("gemm_bf16",)), needed, shown.append, command(part, file)).run()
    assert report.end is End.STOPPED
    assert report.detail.startswith("gave way during gemm_bf16, ")
    assert report.detail.endswith(": job 7 starts")
    assert signals == [signal.SIGTERM]
    assert file.read_text() == "asked to end"
    assert len(set(asked)) == 1, "always asked about the same session"
    assert is_gone(asked[0])


def test_a_node_is_given_back_within_a_second_by_the_sum_of_its_steps() -> None:
    from drover_agent.probes import eligible

    assert eligible.LOOK_S + runner.LOOK_S + processes.TERM_S <= 0.5


@pytest.mark.parametrize("level", [Level.QUICK, Level.DEEP])
def test_nothing_of_its_session_is_left(level: Level, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "family"
    report = run_late("family", "  both are there", monkeypatch, file, level=level)
    assert report.end is (End.TIMEOUT if level is Level.DEEP else End.DONE)
    pids = [int(word) for word in file.read_text().split()]
    assert len(pids) == 2
    for pid in pids:
        wait_until(lambda pid=pid: is_gone(pid), f"the end of process {pid}")


def test_what_is_none_of_the_protocol_is_passed_over(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        report = run("junk")
    assert report.end is End.DONE
    assert [(r.probe, r.value) for r in report.results] == [("gemm_bf16", 1.0), ("launch", 7.0)]
    assert sum("printed" in message for message in caplog.messages) >= 12
    assert max(map(len, caplog.messages)) < 1000


def test_stopped_from_outside_it_says_by_whom() -> None:
    running = Runner(Request(("gemm_bf16",)), command=command("hang"))
    running._show_progress = lambda text: running.stop("interrupted") if "cpu" in text else None
    report = running.run()
    assert (report.end, report.detail) == (End.STOPPED, "gave way during gemm_bf16, cpu: bf16 128: interrupted")


def test_an_unknown_probe_is_refused_with_the_names_that_there_are() -> None:
    with pytest.raises(ValueError, match="no probe is called gemm_int3; there are launch, launch_wait, gemm_bf16"):
        Runner(Request(("gemm_int3",)))


def test_the_real_process_measures_on_the_cpu(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="probes need torch: pip install 'drover[probe]'")
    report = Runner(Request(("launch", "gemm_fp8"), scale=0.05, folder=str(tmp_path))).run()
    assert (report.end, report.detail) == (End.DONE, "")
    launch, fp8 = report.results
    assert (launch.probe, launch.unit) == ("launch", "us")
    assert launch.value and launch.value > 0
    assert fp8.value is None and fp8.detail
    assert [device.name for device in report.devices] == ["cpu"]
    assert list(tmp_path.iterdir()) == []
