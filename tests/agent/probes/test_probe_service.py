"""The probe service: a request's file in, a result's file out, whatever lies between."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from drover_agent.probes import plan, processes, runner, service
from drover_agent.probes.base import Result
from drover_agent.probes.exchange import AFTER_JOB, ExchangeFolder, Outcome, ProbeAnswer, ProbeAsk, read_answer
from drover_agent.probes.service import Busy, Service
from testbed.nvml import FakeNvml
from testbed.waiting import wait_until

CHILD = Path(__file__).resolve().parents[2] / "testbed/probe_child.py"
SERVE = [sys.executable, "-m", "drover_agent.main", "probe", "--serve"]


@pytest.fixture
def folder(tmp_path: Path) -> ExchangeFolder:
    made = ExchangeFolder(tmp_path / "probes")
    made.make()
    return made


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """The part that the probe's process plays."""
    monkeypatch.setattr(plan, "has_torch", lambda: True)

    def part(name: str) -> None:
        monkeypatch.setattr(runner, "CHILD", (sys.executable, str(CHILD), name))

    part("well")
    return part


def ask(folder: ExchangeFolder, id_: str, **fields: object) -> None:
    folder.put(folder.requests, id_, ProbeAsk(id_, **({"probes": ("gemm_bf16",)} | fields)))  # type: ignore[arg-type]  # any


def served(folder: ExchangeFolder) -> dict[str, ProbeAnswer]:
    """What lies there when the service has nothing more to do."""
    Service(folder.root).serve(linger_s=0.01)
    assert folder.ids(folder.requests) == folder.ids(folder.taken) == []
    return {id_: read_answer(folder.results / f"{id_}.json") for id_ in folder.ids(folder.results)}


def test_a_request_becomes_a_result(folder: ExchangeFolder, play: Callable[[str], None]) -> None:
    ask(folder, "r1")
    before_ms = time.time_ns() // 1_000_000
    answer = served(folder)["r1"]
    assert (answer.end, answer.detail, answer.level, answer.left_out) == ("done", "", "quick", ())
    assert answer.results == (Result("gemm_bf16", None, 1.0, "x"),)
    assert before_ms <= answer.ts_ms <= time.time_ns() // 1_000_000
    assert (folder.results / "r1.json").stat().st_mode & 0o777 == 0o600


def test_several_are_worked_off_the_oldest_first(folder: ExchangeFolder, play: Callable[[str], None]) -> None:
    for age, id_ in enumerate(("c", "a", "b")):
        ask(folder, id_)
        os.utime(folder.requests / f"{id_}.json", (1_000 - age, 1_000 - age))
    answers = served(folder)
    assert list(answers) == ["b", "a", "c"]
    assert {answer.end for answer in answers.values()} == {"done"}


@pytest.mark.parametrize(
    ("part", "end", "text"),
    [
        ("crash", "crashed", "was killed by SIGSEGV during gemm_bf16"),
        ("killed", "memory", "perhaps the kernel was out of memory"),
    ],
)
def test_a_crash_of_the_probe_is_a_result(
    folder: ExchangeFolder, play: Callable[[str], None], part: str, end: str, text: str
) -> None:
    play(part)
    ask(folder, "r1")
    answer = served(folder)["r1"]
    assert (answer.end, answer.probe) == (end, "gemm_bf16")
    assert text in answer.detail
    assert [result.value for result in answer.results] == [1.0]


def test_a_timeout_is_too(folder: ExchangeFolder, play: Callable[[str], None]) -> None:
    play("hang")
    ask(folder, "r1", timeout_s=0.5)
    assert served(folder)["r1"].end == "timeout"


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"probes": ("rm",)}, "no probe is called 'rm'; there are launch, "),
        ({"probes": ("../child",)}, "no probe is called '../child'"),
        ({"level": "all"}, "no level is called 'all'; there are quick, standard, deep"),
        ({"gpus": (-1,)}, "GPU slots are 0 to 255"),
        ({"timeout_s": 1e9}, "timeout 1e+09 s: must be at most 14400 s"),
        ({"gpus": (0,)}, "GPU 0: there is no such GPU: no NVIDIA driver is in use here"),
    ],
)
def test_what_is_not_in_the_table_is_refused(
    folder: ExchangeFolder, play: Callable[[str], None], fields: dict[str, object], text: str
) -> None:
    ask(folder, "r1", **fields)
    answer = served(folder)["r1"]
    assert (answer.end, answer.results) == (Outcome.REFUSED, ())
    assert text in answer.detail


@pytest.mark.parametrize(
    "text",
    [b"", b"\xff\x00", b"[1]", b"{}", b'{"id": "r2"}', b'{"id": "r1", "gpus": "all"}',
     b'{"id": "r1", "timeout_s": NaN}', b'{"id": "r1", "probes": [{}]}', b'{"id": "r1", "group": {"address": "x"}}',
     b"[" * 10_000, b" " * (9 << 20)],
)  # fmt: skip
def test_junk_is_a_refused_request(folder: ExchangeFolder, play: Callable[[str], None], text: bytes) -> None:
    (folder.requests / "r1.json").write_bytes(text)
    answer = served(folder)["r1"]
    assert answer.end == Outcome.REFUSED
    assert answer.detail.startswith("this is no request: ")


def test_files_that_are_no_requests_are_left_or_removed_and_nothing_is_run(
    folder: ExchangeFolder, play: Callable[[str], None], tmp_path: Path
) -> None:
    (folder.requests / "r1.json.new").write_text("half written")
    (folder.requests / ".hidden.json").write_text("{}")
    (tmp_path / "elsewhere").write_text('{"id": "r2"}')
    (folder.requests / "r2.json").symlink_to(tmp_path / "elsewhere")
    assert served(folder) == {}
    assert sorted(path.name for path in folder.requests.iterdir()) == ["r1.json.new", "r2.json"]


def test_a_gpu_that_is_held_is_refused_by_name_and_left_out_otherwise(
    folder: ExchangeFolder, play: Callable[[str], None], fake_nvml: FakeNvml
) -> None:
    for gpu in range(8):
        fake_nvml.hold(gpu, os.getpid() if gpu == 3 else None)
    ask(folder, "named", gpus=(2, 3))
    ask(folder, "any")
    ask(folder, after := f"{AFTER_JOB}1")
    answers = served(folder)
    assert answers["named"].end == Outcome.REFUSED
    assert answers["named"].detail.startswith(f"GPU 3: held by process {os.getpid()} (")
    assert (answers[after].end, answers[after].results) == (Outcome.REFUSED, ()), "next to a job all looks slow"
    assert answers[after].detail.endswith("after a job a node is probed as a whole")
    assert answers["any"].end == "done"
    assert [text.partition(" (")[0] for text in answers["any"].left_out] == [f"GPU 3: held by process {os.getpid()}"]


def test_a_job_that_comes_to_a_gpu_under_test_gets_it(
    folder: ExchangeFolder, play: Callable[[str], None], fake_nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    for gpu in range(8):
        fake_nvml.hold(gpu)
    play("hang")
    ask(folder, "r1", gpus=(2, 6))
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, start_new_session=True) as job:
        log = service.log.info
        monkeypatch.setattr(
            service.log,
            "info",
            lambda *words: (log(*words), fake_nvml.hold(6, job.pid)) if "bf16 8192" in words[0] else None,
        )
        answer = served(folder)["r1"]
        job.communicate()
    assert (answer.end, answer.probe, answer.gpu) == ("stopped", "gemm_bf16", 6)
    assert answer.detail.startswith(
        f"gave way during gemm_bf16, GPU 6: bf16 8192: GPU 6 is held by process {job.pid} (cat"
    )
    assert [result.value for result in answer.results] == [1.0], "what was measured before is kept"


def test_a_driver_that_fails_refuses(folder: ExchangeFolder, play: Callable[[str], None], fake_nvml: FakeNvml) -> None:
    fake_nvml.down("LIB_RM_VERSION_MISMATCH")
    ask(folder, "r1")
    answer = served(folder)["r1"]
    assert (answer.end, answer.detail.partition(":")[0]) == (Outcome.REFUSED, "the NVIDIA driver cannot be used")


def test_without_torch_it_says_so(folder: ExchangeFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "has_torch", lambda: False)
    ask(folder, "r1")
    assert served(folder)["r1"].detail == plan.NO_TORCH


def test_a_request_that_waited_for_longer_than_its_timeout_is_dropped(
    folder: ExchangeFolder, play: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "now_ms", lambda: 1_000_000)
    ask(folder, "old", timeout_s=60.0, asked_ms=1_000_000 - 60_001)
    ask(folder, "due", timeout_s=60.0, asked_ms=1_000_000 - 59_999)
    answers = served(folder)
    assert (answers["old"].end, answers["due"].end) == (Outcome.EXPIRED, "done")
    assert answers["old"].detail == "it waited for longer than its timeout of 60 s"


@pytest.fixture
def running(folder: ExchangeFolder, play: Callable[[str], None]) -> Iterator[Service]:
    """A service in a thread, at work on a request that does not end."""
    play("hang")
    ask(folder, "r1")
    ask(folder, "r2")
    under_test = Service(folder.root)
    thread = threading.Thread(target=under_test.serve)
    thread.start()
    wait_until(lambda: folder.ids(folder.taken) == ["r1"], "the first request's start")
    yield under_test
    under_test.stop()
    thread.join(20)
    assert not thread.is_alive()


def test_asked_to_stop_it_answers_what_it_is_at_and_leaves_the_rest(running: Service, folder: ExchangeFolder) -> None:
    running.stop()
    wait_until(lambda: folder.ids(folder.results) == ["r1"], "the result")
    answer = read_answer(folder.results / "r1.json")
    assert answer.end == "stopped"
    assert answer.detail.endswith("the probe service was asked to stop")
    assert folder.ids(folder.requests) == ["r2"]


def test_two_do_not_work_on_one_folder(running: Service, folder: ExchangeFolder) -> None:
    with pytest.raises(Busy):
        Service(folder.root).serve()


def test_a_service_that_was_killed_says_so_when_it_is_started_again(folder: ExchangeFolder) -> None:
    """The real one, with a real probe, and SIGKILL for all of it, as the kernel's OOM killer would."""
    pytest.importorskip("torch", reason="probes need torch: pip install 'drover[probe]'")
    ask(folder, "r1", probes=("soak",))
    with subprocess.Popen([*SERVE, str(folder.root)], stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr
        assert any("soak: " in line for line in process.stderr)
        [child] = children(process.pid)
        process.send_signal(signal.SIGKILL)
    wait_until(lambda: processes.is_dead(child), "the end of the probe, whose service is dead")
    assert folder.ids(folder.taken) == ["r1"]
    answer = served(folder)["r1"]
    assert (answer.end, answer.detail) == (Outcome.CRASHED, service.KILLED)


def children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_a_result_that_was_written_before_the_kill_stays(folder: ExchangeFolder, play: Callable[[str], None]) -> None:
    folder.put(folder.taken, "r1", ProbeAsk("r1"))
    folder.put(folder.results, "r1", ProbeAnswer("r1", "done"))
    assert served(folder)["r1"].end == "done"


def test_the_real_service_measures_and_ends_on_sigterm(folder: ExchangeFolder, tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="probes need torch: pip install 'drover[probe]'")
    ask(folder, "r1", probes=("launch",))
    words = [*SERVE, str(folder.root), "--folder", str(tmp_path)]
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True) as process:
        wait_until(lambda: folder.ids(folder.results), "the result")
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    answer = read_answer(folder.results / "r1.json")
    assert (answer.end, answer.detail) == ("done", "")
    assert [(r.probe, r.unit, r.value is not None and r.value > 0) for r in answer.results] == [("launch", "us", True)]


def test_a_folder_that_cannot_be_used_is_bad_input(tmp_path: Path) -> None:
    done = subprocess.run([*SERVE, "/proc/none"], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 2
    assert done.stderr.startswith("drover-agent probe: --serve /proc/none: ")


def test_what_is_written_is_what_is_read(folder: ExchangeFolder) -> None:
    answer = ProbeAnswer(
        "r1", "hung", "d", "deep", 5, "p2p", 3, 1.5, (Result("p2p", 0, None, "GB/s", peer=1, ok=False),)
    )
    folder.put(folder.results, "r1", answer)
    assert read_answer(folder.results / "r1.json") == answer
    text = json.loads((folder.results / "r1.json").read_text()) | {"later": 1}
    (folder.results / "r1.json").write_text(json.dumps(text))
    assert read_answer(folder.results / "r1.json") == answer, "a newer service may say more"
