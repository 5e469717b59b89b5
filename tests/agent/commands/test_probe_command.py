"""`drover-agent probe` by hand: what it refuses, shows and ends with."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from drover_agent.commands import probe as command
from drover_agent.probes import (
    PROBES,
    Level,
    plan,
    runner,
)
from drover_agent.probes.base import Result
from drover_agent.probes.eligible import Gpu
from drover_agent.probes.runner import End, Report
from testbed.nvml import FakeNvml

CHILD = Path(__file__).resolve().parents[2] / "testbed/probe_child.py"
AGENT = [sys.executable, "-m", "drover_agent.main", "probe"]

Call = Callable[..., int]


@pytest.fixture
def probe(monkeypatch: pytest.MonkeyPatch) -> Call:
    """The command in this process, with a probe's process that plays a part."""
    monkeypatch.setattr(plan, "has_torch", lambda: True)

    def run(*words: str, part: str = "well") -> int:
        monkeypatch.setattr(runner, "CHILD", (sys.executable, str(CHILD), part))
        parser = argparse.ArgumentParser()
        command.add_arguments(parser)
        return command.run(parser.parse_args(words))

    return run


def test_on_a_node_without_a_gpu_the_cpu_is_measured_and_that_is_said(
    probe: Call, capsys: pytest.CaptureFixture[str]
) -> None:
    assert probe("--only", "gemm_bf16", "launch") == 0
    shown = capsys.readouterr()
    assert "no NVIDIA driver is in use here" in shown.err
    assert "the CPU is probed, which shows that the probes work but says nothing about a GPU" in shown.err
    assert [line.split("s  ")[1] for line in shown.err.splitlines()[1:]] == ["launch", "  cpu: bf16 128"]
    heads, row = shown.out.splitlines()
    assert heads.split() == ["probe", "on", "value", "spread", "what"]
    assert row.split() == ["launch", "node", "1", "x"]


def test_json_has_all_of_it(probe: Call, free: FakeNvml, capsys: pytest.CaptureFixture[str]) -> None:
    free.mig(1, [0])
    assert probe("--only", "gemm_bf16", "--json", "--level", "standard") == 1
    reported = json.loads(capsys.readouterr().out)
    assert (reported["level"], reported["end"], reported["detail"], reported["probe"]) == ("standard", "done", "", None)
    assert reported["left_out"] == [{"gpu": 1, "why": "it is split into MIG instances, which are not probed"}]
    assert reported["results"][0]["value"] == 1.0


@pytest.fixture
def free(fake_nvml: FakeNvml) -> FakeNvml:
    with fake_nvml.batch():
        for gpu in range(8):
            fake_nvml.hold(gpu)
    return fake_nvml


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--only", "gemm_int3"], f"no probe is called gemm_int3; there are {', '.join(PROBES)}"),
        (["--only", "launch,rm"], "no probe is called rm; there are"),
        (["--gpus", "0,x"], "--gpus 0,x: must be slots, as in --gpus 0,1,5"),
        (["--gpus", "-1"], "--gpus -1: must be slots"),
        (["--gpus", "8"], "GPU 8: there is no such GPU: this node has 8"),
        (["--timeout", "0"], "--timeout 0: must be more than 0 seconds"),
        (["--timeout", "nan"], "--timeout nan: must be more than 0 seconds"),
        (["--folder", "/no/such"], "--folder /no/such: is not a folder"),
    ],
)
def test_bad_input_is_one_line(
    probe: Call, free: FakeNvml, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert probe(*words) == 2
    shown = capsys.readouterr()
    assert shown.err.startswith(f"drover-agent probe: {message}")
    assert (len(shown.err.splitlines()), shown.out) == (1, "")


def test_a_gpu_that_a_process_holds_is_refused_by_its_name(
    probe: Call, free: FakeNvml, capsys: pytest.CaptureFixture[str]
) -> None:
    free.hold(3, os.getpid())
    assert probe("--gpus", "2,3") == 2
    assert f"GPU 3: held by process {os.getpid()} (" in (err := capsys.readouterr().err)
    assert err.endswith("; end it, or --force to disturb it\n")
    assert probe("--only", "gemm_bf16", "--gpus", "3", "--force") == 0
    assert probe("--only", "gemm_bf16") == 1, "a GPU was left out"
    shown = capsys.readouterr()
    assert "GPU 3 is left out: held by process" in shown.err
    assert "GPU 3 was left out: held by process" in shown.out
    with free.batch():
        for gpu in range(8):
            free.hold(gpu, os.getpid())
    assert probe() == 2
    assert "no GPU can be probed; GPU 0: held by process" in capsys.readouterr().err


def test_a_driver_that_fails_is_not_taken_for_a_node_without_gpus(
    probe: Call, free: FakeNvml, capsys: pytest.CaptureFixture[str]
) -> None:
    free.down("LIB_RM_VERSION_MISMATCH")
    assert probe() == 2
    assert capsys.readouterr().err.startswith("drover-agent probe: the NVIDIA driver cannot be used: ")


def test_without_torch_it_says_what_to_install(
    probe: Call, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(plan, "has_torch", lambda: False)
    assert probe() == 2
    assert capsys.readouterr().err == (
        "drover-agent probe: probes need torch on this node: pip install 'drover[probe]'\n"
    )


@pytest.mark.parametrize(
    ("part", "last"),
    [("crash", "crashed: the probe's process was killed by SIGSEGV during gemm_bf16, cpu: bf16 128: RuntimeError")],
)
def test_a_crash_ends_with_1_and_its_reason(
    probe: Call, capsys: pytest.CaptureFixture[str], part: str, last: str
) -> None:
    assert probe("--only", "gemm_bf16", part=part) == 1
    assert capsys.readouterr().out.splitlines()[-1].startswith(last)


def test_a_timeout_does_too(probe: Call, capsys: pytest.CaptureFixture[str]) -> None:
    assert probe("--only", "gemm_bf16", "--timeout", "0.5", part="hang") == 1
    assert capsys.readouterr().out.splitlines()[-1].startswith("timeout: took longer than 0.5 s")


@pytest.mark.parametrize(("level", "least_s"), [(Level.QUICK, 60.0), (Level.STANDARD, 300.0)])
@pytest.mark.parametrize("count", [1, 8, 16])
def test_a_level_takes_no_longer_on_a_node_of_many_gpus(level: Level, least_s: float, count: int) -> None:
    names = plan.names_of([], level)
    gpus = [Gpu(slot, f"GPU-{slot}") for slot in range(count)]
    request = plan.request_of(names, level, gpus, None, "")
    own, fixed = plan.own_s(names, level, count), plan.fixed_s(names, count)
    pairs = count * (count - 1)
    assert fixed > 0.3 * count * sum(name.startswith("gemm") for name in names) + 0.02 * pairs, "warming up counts"
    assert own * request.scale + fixed <= 0.75 * least_s, "the rest is for what is not measured"
    assert request.scale >= plan.LEAST
    assert request.timeout_s > 2 * (own + fixed)
    assert plan.request_of(("soak",), Level.DEEP, gpus, None, "").scale == 1.0
    assert plan.own_s(("soak",), Level.DEEP, count) == PROBES["soak"].seconds[1], "all at once"


def test_a_wrong_answer_ends_with_1(probe: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = Report(results=[Result("sdc", 3, 5.0, "products", "1 of 5 differs", ok=False)])
    monkeypatch.setattr(command.Runner, "run", lambda self: wrong)
    assert probe() == 1
    assert "WRONG: 1 of 5 differs" in command.as_text(wrong, {})


def test_the_table_says_what_was_not_measured_and_never_shows_a_0_for_it() -> None:
    results = [
        Result("gemm_fp8", 0, None, "TFLOP/s", "this device has no fp8"),
        Result("p2p", 0, 412.34, "GB/s", "512 MiB, direct", peer=3, spread=0.0123, repeats=20),
        Result("sdc", 1, 1_234_567.0, "products"),
    ]
    rows = [" ".join(line.split()) for line in command.as_text(Report(results=results), {}).splitlines()]
    assert rows[1] == "gemm_fp8 GPU 0 - not measured: this device has no fp8"
    assert rows[2] == "p2p GPU 0 to 3 412.3 GB/s 1.23% 512 MiB, direct"
    assert rows[3] == "sdc GPU 1 1,234,567 products"
    hung = Report(End.HUNG, "probe hung: x", results=[])
    assert command.as_text(hung, {}).splitlines()[-1] == "hung: probe hung: x"


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupt_ends_it_with_what_it_has(tmp_path: Path, number: int, code: int) -> None:
    """The real one: of its two probes the first is done, the second would take a minute."""
    pytest.importorskip("torch", reason="probes need torch: pip install 'drover[probe]'")
    words = [*AGENT, "--only", "launch", "soak", "--folder", str(tmp_path), "--json"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr
        assert any("soak: " in line for line in process.stderr)
        process.send_signal(number)
        out, _ = process.communicate(timeout=120)
    reported: dict[str, Any] = json.loads(out)
    assert process.returncode == code
    assert reported["end"] == "stopped"
    assert reported["detail"].startswith("gave way during soak, soak: ")
    assert reported["detail"].endswith(": it was interrupted")
    assert [result["probe"] for result in reported["results"]] == ["launch"]
    assert list(tmp_path.iterdir()) == [], "its folder is empty again"
