"""What `drover-agent gate` answers from the agent's file, and that nothing but a refusal makes it fail."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from drover_agent.commands import gate
from drover_agent.main import main
from drover_agent.probes.exchange import read_ask

BOOT = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
NOW_S = 100_000.0
MINUTE = 60.0


def verdict(answer: str = "pass", age_s: float = 10.0, mode: str = "enforce") -> dict[str, object]:
    text = "" if answer == "pass" else "drain n1 for xid/xid_79"
    incident = "" if answer == "pass" else "inc1"
    return {"received_s": NOW_S - age_s, "answer": answer, "text": text, "incident": incident, "mode": mode}


def content(
    known: dict[str, object] | None, faults: tuple[float, ...] = (), unanswered: str = "open"
) -> dict[str, object]:
    """What the agent writes. `faults`: the age of each, in seconds."""
    found = [{"at_s": NOW_S - age_s, "text": "XID 79 on GPU 3"} for age_s in faults]
    return {
        "format": 1, "node": "n1", "boot": BOOT, "unanswered": unanswered, "age_s": 3600.0, "verdict": known,
        "faults": found,
    }  # fmt: skip


CASES = [
    # fresh: the collector's word, whatever the node itself has found
    (content(verdict("refuse")), True, "refused: drain n1 for xid/xid_79 (incident inc1)"),
    (content(verdict("pass")), False, "pass"),
    (content(verdict("pass"), (5.0,), "closed"), False, "pass"),
    (content(verdict("observe", mode="observe")), False, "pass: in observe mode; would refuse this job: drain n1"),
    (content(verdict("held"), (5.0,), "closed"), False, "pass: the guard gives no leave to refuse: drain n1"),
    (content(verdict("asked")), False, "pass: a person is asked first: drain n1"),
    (content(verdict("later than this")), False, "pass: this gate does not know the answer 'later than this'"),
    # the collector is away: its last word refuses for a while, and what the node has found counts by the settings
    (content(verdict("refuse", 30 * MINUTE)), True, "refused, as of 30 min ago: drain n1"),
    (content(verdict("refuse", 61 * MINUTE)), False, "pass: no word of a collector for 61 min, and this node found no"),
    (content(verdict("pass", 5 * MINUTE), (9.0,)), False, 'pass: no word of a collector for 5 min, gate.un'),
    (content(verdict("pass", 5 * MINUTE), (9.0,), "closed"), True, "refused without leave: no word of"),
    (content(verdict("held", 5 * MINUTE), (), "closed"), False, "pass: no word of a collector for 5 min, and"),
    (content(verdict("pass", 5 * MINUTE), (3700.0,), "closed"), False, "pass: no word of a collector for 5 min, and"),
    (content(verdict("pass", 5 * MINUTE, "approve"), (9.0,), "closed"), False, "pass: no word of a collector for 5"),
    (content(None, (9.0,), "closed"), False, "pass: no word of a collector; its mode was observe"),
    (content(None, (), "closed"), False, "pass: no word of a collector, and this node found no fault itself"),
    # a clock that cannot be: the verdict is not trusted
    (content(verdict("refuse", -5.0)), False, "pass: no word of a collector"),
]  # fmt: skip


@pytest.mark.parametrize(("found", "refused", "says"), CASES)
def test_the_answer_follows_from_the_file(found: dict[str, object], refused: bool, says: str) -> None:
    answer = gate.judge(found, NOW_S)
    assert answer.refused is refused
    assert answer.text.startswith(says)


DAMAGED = [
    b"", b"{", b"[]", b"\xff\xfe", b'{"format": 2}', b'{"format": 1}', b'{"format": 1, "verdict": 7, "age_s": "x"}',
    b'{"format": 1, "age_s": 60, "verdict": {"received_s": null}, "faults": []}',
    b'{"format": 1, "a": ' + b"[" * 60_000,
]  # fmt: skip


@pytest.mark.parametrize("data", DAMAGED)
def test_a_damaged_file_passes_and_says_so(data: bytes, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "gate.json").write_bytes(data)
    assert main(["gate", "--file", str(tmp_path / "gate.json")]) == 0
    assert capfd.readouterr().out.startswith("drover gate: pass: ")


@pytest.mark.parametrize(
    "words", [["--fil", "x"], ["now"], ["--file"], ["--drain", "-x"], ["--file=/nowhere/gate.json"]]
)
def test_a_mistake_in_a_prolog_drains_no_partition(words: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["gate", *words]) == 0
    assert capfd.readouterr().out.startswith("drover gate: pass: ")


def test_a_file_of_an_earlier_boot_says_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "gate.json").write_text(json.dumps({**content(verdict("refuse")), "boot": "another"}))
    assert main(["gate", "--file", str(tmp_path / "gate.json")]) == 0
    assert "is of an earlier boot" in capfd.readouterr().out


def test_the_process_exits_with_1_and_loads_neither_grpc_nor_settings(tmp_path: Path) -> None:
    """What it loads is what it costs before each job; benchmarks/bench_gate.py has the times."""
    found = content({**verdict("refuse"), "received_s": gate.time.clock_gettime(gate.time.CLOCK_BOOTTIME)})
    (tmp_path / "gate.json").write_text(json.dumps(found))
    script = (
        "import sys\nfrom drover_agent.main import main\n"
        f"code = main(['gate', '--file', {str(tmp_path / 'gate.json')!r}])\n"
        "print(*sys.modules, file=sys.stderr)\nsys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (1, "drover gate: refused: drain n1 for xid/xid_79 (incident inc1)\n")
    heavy = {"grpc", "google", "asyncio", "argparse", "logging", "tomllib", "subprocess", "pathlib", "drover_core"}
    assert not {name.partition(".")[0] for name in done.stderr.split()} & heavy


def test_a_terminal_is_not_steered_by_what_the_collector_wrote(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    known = {**verdict("held"), "text": "a\x1b[2Jb\nc", "received_s": gate.time.clock_gettime(gate.time.CLOCK_BOOTTIME)}
    (tmp_path / "gate.json").write_text(json.dumps(content(known)))
    assert main(["gate", "--file", str(tmp_path / "gate.json")]) == 0
    assert "refuse: a?[2Jb?c" in capfd.readouterr().out


def refusal(folder: Path, **more: object) -> str:
    """Write a file that refuses now, and return its path."""
    known = {**verdict("refuse"), "received_s": gate.time.clock_gettime(gate.time.CLOCK_BOOTTIME)}
    (folder / "gate.json").write_text(json.dumps({**content(known), **more}))
    return str(folder / "gate.json")


def test_a_fifo_and_a_file_that_anyone_may_write_pass_at_once(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    os.mkfifo(tmp_path / "fifo")
    words = [sys.executable, "-m", "drover_agent.main", "gate", "--file", str(tmp_path / "fifo")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, "is not a regular file" in done.stdout) == (0, True)
    path = refusal(tmp_path)
    Path(path).chmod(0o666)
    assert main(["gate", "--file", path]) == 0
    assert "anyone may write" in capfd.readouterr().out


@pytest.mark.parametrize("node", ["n1", "n\0", "ALL", "n[1-99]", "n1,n2", ""])
def test_a_drain_that_fails_lets_no_job_in_and_drains_one_node_at_most(
    node: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A comment of a node need not be UTF-8; the name in the file is the agent's, who is not root."""
    script = tmp_path / "scontrol"
    script.write_text(f"#!/bin/sh\necho \"$@\" >> {tmp_path}/calls\nprintf 'State=IDLE Comment=caf\\351'\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.delenv("SLURMD_NODENAME", raising=False)
    assert main(["gate", "--drain", "--file", refusal(tmp_path, node=node)]) == 1
    calls = (tmp_path / "calls").read_text().splitlines() if (tmp_path / "calls").exists() else []
    assert len(calls) == (2 if node == "n1" else 0)


@pytest.mark.parametrize(
    ("agent", "job", "code"),
    [
        ("echo drover gate: refused: x; exit 1", "7", 1), ("echo drover gate: pass; exit 0", "7", 0),
        ("exit 1", "7", 0), ("", "7", 0),
        # who plans maintenance writes why: no such text turns a job away
        ("echo drover gate: pass: maintenance window: drover gate: refused; exit 0", "7", 0),
        # a health check: Slurm has releases whose slurmd never registers while it fails
        ("echo drover gate: refused: x; exit 1", "", 0),
    ],
)  # fmt: skip
def test_the_documented_prolog_refuses_by_the_gates_words_only(agent: str, job: str, code: int, tmp_path: Path) -> None:
    page = (Path(__file__).parents[3] / "docs/how-to/gate.md").read_text()
    script = page[page.index("    #!/bin/sh") :].partition("\n\n")[0]
    program = tmp_path / "drover-agent"
    if agent:
        program.write_text(f"#!/bin/sh\n{agent}\n")
        program.chmod(0o755)
    lines = "\n".join(line[4:] for line in script.splitlines()).replace("/opt/drover/bin/drover-agent", str(program))
    env = {"SLURM_JOB_ID": job} if job else {}
    done = subprocess.run(["/bin/sh", "-c", lines], env=env, capture_output=True, timeout=120, check=False)
    assert (done.returncode, done.stdout.decode()[:6]) == (code, "drover" if "echo" in agent else "\n")


@pytest.mark.parametrize(
    ("shown", "age_s", "closed_by", "code", "says"),
    [
        ("State=IDLE", 600, "", 0, "pass: its last verdict is old"),
        ("State=MIXED+DRAIN", 600, "", 1, "refused, as of 10 min ago"),
        ("slurmctld is away", 600, "", 1, "refused, as of 10 min ago"),  # unknown is not in service
        ("State=IDLE", 60, "", 1, "refused: drain"),  # fresh, and to be drained: the collector's word
        ("State=MIXED", 1, "slurm", 0, "pass: Slurm has n1 in service again"),  # put back a second ago
        ("State=MIXED+DRAIN", 1, "slurm", 1, "refused: drain"),  # a job that Slurm began just before the drain
        ("slurmctld is away", 1, "slurm", 1, "refused: drain"),
        ("State=IDLE", 1, "kubernetes", 1, "refused: drain"),  # Slurm has not closed it: its word is none
    ],
)
def test_a_refusal_yields_to_slurm_that_has_put_the_node_back(
    shown: str, age_s: float, closed_by: str, code: int, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """It was put back while its agent was away, or a second ago: its prolog would drain it again at its first job."""
    script = tmp_path / "scontrol"
    script.write_text(f"#!/bin/sh\necho \"$1\" >> {tmp_path}/calls\necho 'NodeName=n1 {shown} Comment=x'\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.delenv("SLURMD_NODENAME", raising=False)
    received_s = gate.time.clock_gettime(gate.time.CLOCK_BOOTTIME) - age_s
    path = refusal(tmp_path, verdict={**verdict("refuse"), "received_s": received_s, "closed_by": closed_by})
    assert main(["gate", "--drain", "--file", path]) == code
    assert f"drover gate: {says}" in capfd.readouterr().out
    assert ("update" in (tmp_path / "calls").read_text()) is (code == 1 and "DRAIN" not in shown)


# ---- --deep


def node_with_gpus(folder: Path) -> list[str]:
    """Arguments for a machine whose driver has a GPU, and an agent that passes."""
    (folder / "proc/driver/nvidia/gpus/0000:01:00.0").mkdir(parents=True)
    for name in ("requests", "taken", "results"):
        (folder / "probes" / name).mkdir(parents=True)
    return [
        "gate", "--deep", "--seconds=0.6", "--spool", str(folder), "--proc-root", str(folder / "proc"),
        f"--file={folder}/gate.json",
    ]  # fmt: skip


def serve(folder: Path, *, answers: str) -> threading.Thread:
    """Be the probe service for one request. `answers`: the content of its result; "": it gives none."""

    def take() -> None:
        waiting, deadline_s = folder / "requests", time.monotonic() + 100
        while time.monotonic() < deadline_s:
            if found := list(waiting.glob("*.json")):
                read_ask(found[0]).check()
                taken = found[0].rename(folder / "taken" / found[0].name)
                if answers:
                    (folder / "results" / taken.name).write_text(answers)
                    taken.unlink()
                return
            time.sleep(0.01)

    made = threading.Thread(target=take)
    made.start()
    return made


def test_without_a_gpu_the_deep_form_says_so_and_passes_at_once(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = node_with_gpus(tmp_path)
    (tmp_path / "proc/driver/nvidia/gpus/0000:01:00.0").rmdir()
    assert main(words) == 0
    assert "drover gate: pass: not probed: no NVIDIA GPU here" in capfd.readouterr().out
    assert list((tmp_path / "probes/requests").iterdir()) == []


@pytest.mark.parametrize(
    ("answers", "says"),
    [
        ('{"id": "r", "end": "done", "detail": ""}', "pass: probed: the result goes"), ("", "pass: probes still"),
        ('{"id": "r", "end": "refused", "detail": "GPU 3: held by process 7"}', "pass: not probed: GPU 3: held by pro"),
        ("half wr", "pass: probed: the result goes"),
    ],
)  # fmt: skip
def test_the_deep_form_asks_the_probe_service_and_waits_no_longer_than_its_budget(
    answers: str, says: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words, served = node_with_gpus(tmp_path), serve(tmp_path / "probes", answers=answers)
    assert main(words) == 0
    served.join()
    assert f"drover gate: {says}" in capfd.readouterr().out
    assert len(list((tmp_path / "probes" / ("results" if answers else "taken")).glob("gate-*.json"))) == 1


def test_nobody_takes_the_request_and_it_is_withdrawn(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(node_with_gpus(tmp_path)) == 0
    assert "no probe service took the request within 0.6 s" in capfd.readouterr().out
    assert list((tmp_path / "probes/requests").iterdir()) == []


@pytest.mark.parametrize("wrong", [["--seconds", "x"], ["--seconds", "-1"], ["--seconds", "nan"]])
def test_whatever_is_wrong_with_the_deep_form_passes(
    wrong: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main([*node_with_gpus(tmp_path), *wrong]) == 0
    assert "pass: not probed: ValueError" in capfd.readouterr().out


def test_a_refused_node_is_not_probed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = node_with_gpus(tmp_path)
    refusal(tmp_path)
    assert main(words) == 1
    assert "probed" not in capfd.readouterr().out
