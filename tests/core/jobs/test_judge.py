# ruff: noqa: E501  # logs as they are written
"""The verdict on small logs: each class, what came first, what only followed."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from drover_core.jobs.files import File, fair_share, gather
from drover_core.jobs.judge import Evidence, judge
from drover_core.jobs.model import Failure, HardwareEvent, Verdict

TRACE = 'Traceback (most recent call last):\n  File "train.py", line 7, in <module>\n    step()\n'
CLOSED = "RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.7]:55507"
TIMED_OUT = (
    "RuntimeError: [gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 2000ms for recv operation to complete"
)


def of_rank(rank: int, text: str) -> str:
    return "".join(f"[rank{rank}]: {line}\n" for line in text.splitlines())


def why(text: str, exit_code: int | None = 1, events: tuple[HardwareEvent, ...] = ()) -> Verdict:
    return judge(gather([File("job.log", text.encode())], events, exit_code))


@pytest.mark.parametrize(
    "line, failure",
    [
        (TRACE + "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 3 has a total capacity", "gpu_oom"),
        (TRACE + "torch.AcceleratorError: CUDA error: out of memory", "gpu_oom"),
        (TRACE + "RuntimeError: CUDA error: uncorrectable ECC error encountered", "gpu_hardware"),
        ("[2345.678901] NVRM: Xid (PCI:0000:3b:00): 79, pid=1, name=python, GPU has fallen off the bus.", "gpu_hardware"),
        ("[2345.678901] NVRM: Xid (PCI:0000:3b:00): 31, pid=1, MMU Fault", "program"),
        (TRACE + "RuntimeError: CUDA error: device-side assert triggered", "program"),
        (TRACE + "RuntimeError: Caught KeyError in DataLoader worker process 2.", "program"),
        (TRACE + "ModuleNotFoundError: No module named 'apex'", "program"),
        ("Fatal Python error: Segmentation fault", "program"),
        (TRACE + "RuntimeError: DataLoader worker (pid 9) is killed by signal: Bus error. It is possible that", "host_oom"),
        ("[99.100000] Memory cgroup out of memory: Killed process 918 (python) total-vm:23870700kB", "host_oom"),
        ("slurmstepd: error: Detected 1 oom_kill event in StepId=12.0. Some of the step tasks have been OOM Killed.", "host_oom"),
        (TRACE + "MemoryError", "host_oom"),
        ("    Reason:       OOMKilled\n    Exit Code:    137", "host_oom"),
        (TRACE + "OSError: [Errno 28] No space left on device: '/ckpt/a.pt'", "storage"),
        (TRACE + "OSError: [Errno 116] Stale file handle", "storage"),
        (TRACE + "OSError: [Errno 122] Disk quota exceeded", "storage"),
        ("slurmstepd: error: *** STEP 7.0 ON n07 CANCELLED AT 2026-11-28T02:00:00 DUE TO TIME LIMIT ***", "time_limit"),
        ("slurmstepd: error: *** JOB 7 ON n07 CANCELLED AT 2026-11-28T02:00:00 DUE TO PREEMPTION ***", "cancelled"),
        ("slurmstepd: error: *** JOB 7 ON n07 CANCELLED AT 2026-11-28T02:00:00 ***", "cancelled"),
        ("    Reason:       Evicted", "cancelled"),
        ("srun: error: Node failure on n08", "node_lost"),
        ("n07:12:34 [3] NCCL WARN NET/IB : mlx5_0:1 Got async event : port error", "network_hardware"),
        (of_rank(0, TRACE + CLOSED) + of_rank(1, TRACE + CLOSED), "peer_died"),
        (of_rank(0, TRACE + TIMED_OUT) + of_rank(1, TRACE + TIMED_OUT), "collective_timeout"),
        ("terminate called after throwing an instance of 'gloo::EnforceNotMet'\n  what():  12 vs 8. Received data size"
         " doesn't match expected size. Is there a distributed collective mismatch in your code?", "collective_mismatch"),
        ('{"State": {"OOMKilled": true, "ExitCode": 137}}', "host_oom"),
        (TRACE + "torch._dynamo.exc.Unsupported: call_function BuiltinVariable", "program"),
        (TRACE + "RuntimeError: Unexpected error from cudaGetDeviceCount(). Error 802: system not yet initialized", "gpu_hardware"),
        ("    State:          Waiting\n      Reason:       ImagePullBackOff", "not_started"),
        ("[INFO] [launch.py:319:sigkill_handler] Killing subprocess 123\n[ERROR] [launch.py:325:sigkill_handler]"
         " ['/usr/bin/python', '-u', 'train.py'] exits with return code = -9", "host_oom"),
        ("nothing to see here", "unknown"),
    ],
)  # fmt: skip
def test_each_class_from_its_line(line: str, failure: str) -> None:
    verdict = why(line)
    assert verdict.failure == failure, verdict
    assert verdict.proofs or failure == "unknown"


def test_an_exception_on_one_rank_explains_the_closed_connections_of_the_others() -> None:
    text = of_rank(0, TRACE + CLOSED) + of_rank(2, TRACE + "ValueError: bad shape") + of_rank(1, TRACE + CLOSED)
    verdict = why(text)
    assert (verdict.failure, verdict.rank) == (Failure.PROGRAM, 2)
    assert verdict.sentence == "the program failed on rank 2: ValueError: bad shape"
    assert [proof.rank for proof in verdict.consequences] == [0, 1]


def test_slurms_cancel_after_a_failed_task_is_a_consequence() -> None:
    text = (
        "0: step 1 loss 2\n1: step 1 loss 2\n0: step 2 loss 2\n1: step 2 loss 2\n"
        "srun: error: n08: task 1: Killed\nsrun: Job step aborted: Waiting up to 32 seconds for job step to finish.\n"
        "slurmstepd: error: *** STEP 7.0 ON n07 CANCELLED AT 2026-11-28T02:00:00 ***\nsrun: error: n07: task 0: Terminated\n"
    )
    verdict = why(text, 137)
    assert (verdict.failure, verdict.rank, verdict.place.node) == (Failure.PEER_DIED, 1, "n08")
    assert "rank 1 on node n08 died" in verdict.sentence and "SIGKILL" in verdict.sentence


def test_what_a_rank_survived_is_no_cause() -> None:
    steps = "".join(f"step {n} loss 1.0\n" for n in range(20))
    handled = TRACE + "OSError: [Errno 28] No space left on device\n" + steps
    assert why(handled + TRACE + "ValueError: x\n").failure is Failure.PROGRAM
    assert why(handled, None).failure is Failure.UNKNOWN
    assert why("WARNING CUDA out of memory, halving the batch\n" + TRACE + "ValueError: x").failure is Failure.PROGRAM


def test_unknown_is_never_shown_as_a_normal_end() -> None:
    assert why("step 1 loss 2\nstep 2 loss 2\n", None).failure is Failure.UNKNOWN
    assert why("step 1 loss 2\nstep 2 loss 2\n", 0).failure is Failure.ENDED_NORMALLY
    assert judge(Evidence()).failure is Failure.UNKNOWN


@pytest.mark.parametrize("code, failure", [(139, "program"), (-11, "program"), (143, "cancelled"), (1, "unknown")])
def test_the_exit_alone(code: int, failure: str) -> None:
    assert why("step 1 loss 2\n", code).failure == failure


XID = HardwareEvent("n08", 1, "xid", "79", "GPU has fallen off the bus")


def test_an_xid_of_a_jobs_node_explains_a_hang_and_no_exception() -> None:
    ranks = "".join(f"rank {r} on n0{7 + r // 2}, local rank {r % 2}\n" for r in range(4))
    hang = ranks + "".join(of_rank(r, TRACE + TIMED_OUT) for r in (0, 1, 2))
    verdict = why(hang, 1, (XID,))
    assert (verdict.failure, verdict.rank, verdict.place.gpu) == (Failure.GPU_HARDWARE, 3, 1)
    assert why(hang, 1, (replace(XID, node="n99"),)).failure is Failure.COLLECTIVE_TIMEOUT
    assert why(hang, 1, (replace(XID, code="31"),)).failure is Failure.COLLECTIVE_TIMEOUT  # of the program
    assert why(ranks + of_rank(1, TRACE + "ValueError: x"), 1, (XID,)).failure is Failure.PROGRAM
    oom = HardwareEvent("n08", None, "kernel", "oom", "Killed process 9 (python)")
    assert why("srun: error: n08: task 3: Killed\n", 137, (oom,)).failure is Failure.HOST_OOM


def test_only_errors_in_the_hour_before_the_end_explain_it() -> None:
    log = "2026-11-28 02:00:00,000 ERROR x\nsrun: error: n08: task 3: Killed\n"
    ended = 1795831200000  # 2026-11-28T02:00:00Z
    near, old = replace(XID, ts_ms=ended - 60_000), replace(XID, ts_ms=ended - 7_200_000)
    assert why(log, 137, (near,)).failure is Failure.GPU_HARDWARE
    late = why(log, 137, (old,))
    assert late.failure is Failure.PEER_DIED and "outside the hour before 2026-11-28T02:00:00" in late.notes[0]
    files = [File("job.log", log.encode())]
    assert judge(gather(files, (old,), 137, ended - 7_000_000)).failure is Failure.GPU_HARDWARE


OOM_FALSE = '        "State": {"OOMKilled": false, "ExitCode": 1}\n'
SIDECAR = """Containers:
  sidecar:
    State:          Running
    Last State:     Terminated
      Reason:       OOMKilled
  train:
    State:          Terminated
      Reason:       Error
      Exit Code:    1
"""


@pytest.mark.parametrize("said", [OOM_FALSE, "OOMKilled:false", SIDECAR, "      Reason:       OOMKilled\n"])
def test_a_traceback_of_the_job_stands_against_oomkilled(said: str) -> None:
    for files in (
        [File("job.log", (TRACE + "KeyError: 'lr'\n" + said).encode())],
        [File("describe.txt", said.encode()), File("job.log", (TRACE + "KeyError: 'lr'\n").encode())],
    ):
        verdict = judge(gather(files, exit_code=1))
        assert verdict.failure is Failure.PROGRAM, verdict
        assert ("false" in said) is not any("OOMKilled" in note for note in verdict.notes)


def test_a_kill_for_memory_after_a_traceback_stands() -> None:
    stamp = "2026-11-28T02:00:00Z stderr F "
    text = stamp + "Traceback (most recent call last):\n" + stamp + "KeyError: 'lr'\n"
    assert why(text + "2026-11-28T02:05:00Z stderr F Reason: OOMKilled\n").failure is Failure.HOST_OOM


def test_oomkilled_of_another_container_is_named_and_not_sure() -> None:
    assert why(OOM_FALSE).failure is Failure.UNKNOWN
    verdict = why(SIDECAR)
    assert verdict.proofs[0].text.startswith("container sidecar:") and verdict.confidence <= 0.5


XID_LINE = "NVRM: Xid (PCI:0000:3b:00): 79, pid=1, name=python, GPU has fallen off the bus.\n"


@pytest.mark.parametrize(
    "stamp, failure",
    [
        ("[Tue Apr  1 00:00:10 2025] ", "program"),
        ("[Sun Jun  1 01:30:10 2025] ", "gpu_hardware"),
        ("Apr  1 00:00:10 n08 kernel: ", "program"),
        ("Jun  1 01:30:10 n08 kernel: ", "gpu_hardware"),
        ("2025-04-01T00:00:10,000000+00:00 ", "program"),
        ("[12345.678901] ", "program"),
    ],
)
def test_kernel_lines_count_in_the_hour_before_the_end(stamp: str, failure: str) -> None:
    log = "2025-06-01 02:00:00 step 1 loss 2\n" + TRACE + "ValueError: x\n"
    verdict = judge(gather([File("dmesg.txt", (stamp + XID_LINE).encode()), File("train.log", log.encode())]))
    assert verdict.failure == failure, verdict
    assert (failure == "program") == any("GPU has fallen off the bus" in note for note in verdict.notes)


def test_a_kernel_line_without_a_time_is_less_sure_and_said() -> None:
    verdict = why("[12345.678901] " + XID_LINE)
    assert verdict.failure is Failure.GPU_HARDWARE and verdict.confidence < 0.7
    assert "no time to compare" in verdict.notes[0]


def test_lightnings_report_of_a_child_comes_before_the_kill_that_follows() -> None:
    text = (
        "[rank: 1] Child process with PID 4711 terminated with code -11. Forcefully terminating all other processes\n"
        "Killed\n"
    )
    verdict = why(text, 137)
    assert (verdict.failure, verdict.rank) == (Failure.PROGRAM, 1)


def test_exit_status_0_does_not_hide_an_error() -> None:
    verdict = why("step 1 loss 2\n" + TRACE + "ValueError: x\n", 0)  # such as `train | tee log`
    assert verdict.failure is Failure.PROGRAM and verdict.confidence < 0.6
    assert any("contradicts" in proof.text for proof in verdict.proofs)
    went_on = why(TRACE + "ValueError: x\nstep 1 loss 2\ntraining finished\n", 0)
    assert went_on.failure is Failure.ENDED_NORMALLY and went_on.confidence <= 0.7
    assert "ValueError: x" in went_on.proofs[0].text
    assert why("step 1 loss 2\n", 0).confidence > 0.9


@pytest.mark.parametrize(
    "text, ended",
    [
        ("training job is done in 30 days at this pace", False),
        ("Evaluation job completed\nstep 1000 loss nan\nwandb: ERROR Run failed\nrun finished with errors", False),
        ("training finished\nstep 2 loss 3", False),
        ("training will be done at noon", False),
        ("Training completed in 3:20:01", True),
        ("INFO training: done", True),
    ],
)
def test_which_words_say_that_a_job_ended(text: str, ended: bool) -> None:
    assert (why("step 1 loss 2\n" + text + "\n", None).failure is Failure.ENDED_NORMALLY) is ended


def test_reports_of_many_tasks_are_bounded() -> None:
    verdict = why("srun: error: n1: tasks 0-4095: Exited with exit code 1\n" * 100)
    assert len(verdict.ranks) == 4096 and any("reports of ended tasks were left out" in note for note in verdict.notes)


def test_small_files_leave_their_share_to_large_ones() -> None:
    assert fair_share([10, 100, 100], 110) == 50
    assert fair_share([10, 20], 100) == 100
    assert fair_share([], 100) == 100 and fair_share([5, 5], 3) == 1


def test_hostile_logs_are_bounded_and_never_shown_raw() -> None:
    evil = (
        b"\x1b]0;owned\x07\x1b[2J[rank1]: "
        + TRACE.encode()
        + b"[rank1]: ValueError: \x1b[31m\x9b\xff"
        + b"A" * 3_000_000
        + b"\n"
    )
    noise = b"".join(
        b"[rank%d]: ValueError: Connection reset by peer out of memory step %d loss\n" % (n, n) for n in range(5_000)
    )
    begun = time.monotonic()
    verdict = judge(gather([File("a.log", evil + noise), File("b.log", bytes(10_000)), File("c_3", b"\x80\x04c")]))
    assert time.monotonic() - begun < 100
    shown = [verdict.sentence, *(p.text for p in verdict.proofs + verdict.consequences), *verdict.notes]
    assert all(text.isprintable() and len(text) < 1000 for text in shown)
    assert any("neither text nor a dump" in note for note in verdict.notes)
