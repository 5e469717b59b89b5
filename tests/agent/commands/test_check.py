"""`drover-agent check`: each finding from a thing made so, on real files, sockets, TLS and the NVML stand-in."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
import threading
from pathlib import Path

import pynvml
import pytest

from drover_agent.commands.check import (
    node as check_node,
)
from drover_agent.commands.check import (
    report as check,
)
from drover_agent.commands.check import (
    sources as check_sources,
)
from drover_agent.commands.check.result import CheckResult, CheckState
from drover_agent.commands.read_all import SourceReading, read_all_sources
from drover_agent.config import AgentConfig, SpoolConfig
from drover_agent.sources.base import Entity, Reading
from drover_agent.sources.facts import FACTS, JOBS_UNKNOWN
from drover_core.metrics.catalog import Absent, Scope
from testbed.nvml import FakeNvml
from testbed.telemetry_server import TelemetryServer, play

ROOT = Path(__file__).parents[3]
LINK = Entity(Scope.LINK, "n1/mlx5_0/1", link="mlx5_0/1")


def by_name(lines: list[CheckResult]) -> dict[str, CheckResult]:
    return {line.name: line for line in lines}


# ---- the runner


def test_a_check_that_hangs_or_fails_is_a_finding_and_the_others_go_on() -> None:
    released = threading.Event()

    def hangs() -> list[CheckResult]:
        released.wait()
        return []

    def fails() -> list[CheckResult]:
        raise RuntimeError("a defect")

    fine = CheckResult("fine", CheckState.OK, "as it should be")
    lines = check.run_all({"hung": hangs, "failing": fails, "fine": lambda: [fine]}, 0.2)
    released.set()
    assert [(line.name, line.state) for line in lines] == [
        ("hung", CheckState.BROKEN),
        ("failing", CheckState.BROKEN),
        ("fine", CheckState.OK),
    ]
    assert "did not return" in lines[0].text
    assert "RuntimeError: a defect" in lines[1].text


def test_text_and_json_report_the_same() -> None:
    lines = [CheckResult("a", CheckState.OK, "fine"), CheckResult("bb", CheckState.BROKEN, "not fine", "mend it")]
    assert check.as_text(lines).splitlines() == [
        "ok       a   fine",
        "broken   bb  not fine",
        "             -> mend it",
        "",
        "1 ok, 1 broken",
    ]
    report = json.loads(json.dumps(check.as_json("n1", lines)))
    assert report["broken"] is True
    assert report["checks"][1] == {"name": "bb", "state": "broken", "text": "not fine", "remedy": "mend it"}


@pytest.mark.parametrize(("reachable", "code"), [(True, 0), (False, 1)])
def test_the_command_ends_with_1_when_something_asked_for_is_broken(tmp_path: Path, reachable: bool, code: int) -> None:
    """A host without GPU, its collector there or away."""

    async def scenario() -> None:
        server = TelemetryServer()
        address = await server.start()
        if not reachable:
            await server.stop()
        command = [sys.executable, "-m", "drover_agent.main", *words(tmp_path, address)]
        process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
        out, _ = await asyncio.wait_for(process.communicate(), 120)
        broken = [line["name"] for line in json.loads(out)["checks"] if line["state"] == "broken"]
        assert (process.returncode, broken) == (code, [] if reachable else [f"collector {address}"])
        assert server.hellos == [], "a Hello would take the node's place from a running agent"

    play(scenario())


def words(folder: Path, address: str) -> list[str]:
    (folder / "kmsg").write_text("")
    settings = {"kmsg_path": str(folder / "kmsg"), "spool.dir": str(folder / "spool"), "collectors": f'["{address}"]'}
    return ["check", "--json", *(word for key, value in settings.items() for word in ("--set", f"{key}={value}"))]


def test_bad_settings_end_with_2(tmp_path: Path) -> None:
    file = tmp_path / "agent.toml"
    file.write_text("intervall_s = 1\n")
    command = [sys.executable, "-m", "drover_agent.main", "check", "--config", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 2
    assert "unknown key; did you mean interval_s?" in done.stderr


# ---- the node


@pytest.mark.parametrize(
    ("folder", "max_bytes", "state", "text"),
    [
        ("spool", 2**20, CheckState.OK, "used of"),
        ("not/yet", 2**20, CheckState.OK, "will be created"),
        ("spool", 2**40, CheckState.LIMITED, "the disk will be full before"),
        ("file", 2**20, CheckState.BROKEN, "is not a folder"),
    ],
)
def test_the_spool_has_a_folder_and_room(
    tmp_path: Path, folder: str, max_bytes: int, state: CheckState, text: str
) -> None:
    (tmp_path / "spool").mkdir()
    (tmp_path / "file").write_text("")
    [line] = check_node.spool(AgentConfig(spool=SpoolConfig(dir=str(tmp_path / folder), max_bytes=max_bytes)))
    assert line.state is state
    assert text in line.text
    assert list((tmp_path / "spool").iterdir()) == [], "nothing is left behind"


def test_a_spool_that_cannot_be_written_is_broken() -> None:
    [line] = check_node.spool(AgentConfig(spool=SpoolConfig(dir="/proc/1")))
    assert line.state is CheckState.BROKEN
    assert "chown" in line.remedy


@pytest.mark.parametrize(
    ("name", "enabled", "state"),
    [("kmsg", True, CheckState.OK), ("none", True, CheckState.BROKEN), ("kmsg", False, CheckState.MISSING)],
)
def test_the_kernel_log(tmp_path: Path, name: str, enabled: bool, state: CheckState) -> None:
    (tmp_path / "kmsg").write_text("")
    [line] = check_node.kernel_log_readable(AgentConfig(kmsg_path=str(tmp_path / name), kmsg_enabled=enabled))
    assert line.state is state
    assert bool(line.remedy) is (state is not CheckState.OK)


@pytest.mark.parametrize(
    ("unit", "state", "text"),
    [
        ({"LoadState": "not-found"}, CheckState.MISSING, "nothing starts the agent"),
        ({"LoadState": "loaded", "ActiveState": "failed"}, CheckState.BROKEN, "has failed"),
        (
            {"LoadState": "loaded", "ActiveState": "active", "Type": "simple", "WatchdogUSec": "0", "User": "drover"},
            CheckState.LIMITED,
            "no watchdog",
        ),
        (
            {
                "LoadState": "loaded",
                "ActiveState": "active",
                "Type": "notify",
                "WatchdogUSec": "1min",
                "StatusText": "x",
            },
            CheckState.OK,
            "user root: x; watchdog 1min",
        ),
    ],
)
def test_the_service_as_systemd_shows_it(unit: dict[str, str], state: CheckState, text: str) -> None:
    line = check_node.of_unit(unit)
    assert line.state is state
    assert text in line.text


def test_the_clock_is_reported_by_the_kernel() -> None:
    [line] = check_node.clock()
    assert line.state in (CheckState.OK, CheckState.LIMITED)
    assert bool(line.remedy) is ("NTP" in line.text)


# ---- sources


def test_a_source_says_what_it_gives_and_what_it_may_not() -> None:
    refused = Reading(
        rows=[(LINK, {"link_up": 1.0})],
        absent=[(LINK, "rx_bytes", Absent.NO_PERMISSION), (LINK, "tx_wait", Absent.UNSUPPORTED)],
    )
    looks = [
        SourceReading("infiniband", 1.0, readings=[refused]),
        SourceReading("ethernet", 1.0, readings=[Reading()]),
        SourceReading("dcgm", 10.0, error="did not answer within 3 s", hung=True),
        SourceReading("host", 1.0, error="OSError: x"),
        SourceReading("inference", 10.0, off=True),
    ]
    found = by_name(check_sources.sources(AgentConfig(hardware="none", steps_socket=""), looks))
    assert found["infiniband"].state is CheckState.LIMITED
    assert found["infiniband"].text == "1 metrics of 1: mlx5_0/1; not allowed: rx_bytes"
    assert (found["ethernet"].state, found["ethernet"].text) == (
        CheckState.MISSING,
        "no physical Ethernet port on this node",
    )
    assert found["dcgm"].state is CheckState.BROKEN
    assert (found["host"].state, found["host"].text) == (CheckState.BROKEN, "OSError: x")
    assert found["inference"].state is CheckState.MISSING
    assert found["steps"].text == "not set: `steps_socket`"
    assert "hardware = none" in found["nvml"].text


def test_what_the_settings_name_and_is_not_there_is_broken() -> None:
    chat, code = (Entity(Scope.WORKLOAD, f"n1/{name}", link=name) for name in ("chat", "code"))
    away = [(code, name, Absent.ERROR) for name in ("ttft_p50_s", "requests_running")]
    looks = [
        SourceReading("dcgm", 10.0, readings=[Reading()]),
        SourceReading("inference", 10.0, readings=[Reading(absent=away)]),
    ]
    config = AgentConfig(hardware="none", dcgm_url="http://127.0.0.1:9999/metrics")
    found = by_name(check_sources.sources(config, looks))
    assert found["dcgm"].state is CheckState.BROKEN
    assert (found["inference"].state, found["inference"].text) == (
        CheckState.BROKEN,
        "nothing could be read; error: code",
    )
    looks[1].readings.append(Reading(rows=[(chat, {"ttft_p50_s": 0.2, "requests_running": 1.0})], absent=away))
    found = by_name(check_sources.sources(AgentConfig(hardware="none"), looks))
    assert found["dcgm"].state is CheckState.MISSING
    assert (found["inference"].state, found["inference"].text) == (
        CheckState.LIMITED,
        "2 metrics of 1: chat; error: code",
    )


def test_a_source_that_has_nothing_here_is_missing() -> None:
    node = Entity(Scope.NODE, "n1")
    nothing = Reading(absent=[(node, "inlet_temp_c", Absent.UNSUPPORTED)])
    found = by_name(
        check_sources.sources(AgentConfig(hardware="none"), [SourceReading("host", 1.0, readings=[nothing])])
    )
    assert (found["host"].state, found["host"].text) == (
        CheckState.MISSING,
        "nothing could be read; not here: inlet_temp_c",
    )


def test_gpus_without_a_known_job_do_not_look_like_a_node_without_gpus() -> None:
    gpus = [SourceReading(f"nvml:{slot}", 1.0, slot, readings=[Reading()]) for slot in range(8)]
    jobs = SourceReading("jobs", 5.0, readings=[Reading(), Reading()])
    line = by_name(check_sources.sources(AgentConfig(hardware="none"), [*gpus, jobs]))["jobs"]
    assert (line.state, line.text) == (CheckState.LIMITED, f"8 of 8 GPUs: {JOBS_UNKNOWN}")
    jobs.readings[0].holdings = [(0, "7"), (1, None)]
    line = by_name(check_sources.sources(AgentConfig(hardware="none"), [*gpus, jobs]))["jobs"]
    assert line.text == f"jobs of 2 GPUs known, 1 held; 6 of 8 GPUs: {JOBS_UNKNOWN}"
    jobs.readings[1].holdings = [(slot, None) for slot in range(8)]
    line = by_name(check_sources.sources(AgentConfig(hardware="none"), [*gpus, jobs]))["jobs"]
    assert (line.state, line.text) == (CheckState.OK, "jobs of 8 GPUs known, 0 held")
    alone = SourceReading("jobs", 5.0, readings=[Reading()])
    line = by_name(check_sources.sources(AgentConfig(hardware="none"), [alone]))["jobs"]
    assert (line.state, line.text) == (CheckState.MISSING, FACTS["jobs"].missing)


@pytest.mark.parametrize("bits", [{"CAP_SYSLOG"}, {"CAP_SYSLOG", "CAP_DAC_OVERRIDE"}, set()])
def test_the_rights_of_the_units_drop_ins_are_named(monkeypatch: pytest.MonkeyPatch, bits: set[str]) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 65534)
    held = sum(1 << check_node.CAPABILITIES[name] for name in bits)
    monkeypatch.setattr(check_node, "_effective", lambda: held)
    [line] = check_node.user()
    assert set(line.text.partition("with ")[2].split(", ")) == (bits or {"no capability"})
    drop_ins = "".join(path.read_text() for path in (ROOT / "agent/systemd").glob("*.conf"))
    assert set(re.findall(r"\bCAP_\w+", drop_ins)) <= check_node.CAPABILITIES.keys()


def test_a_value_that_came_at_the_second_reading_is_there() -> None:
    first = Reading(absent=[(LINK, "rx_bytes", Absent.ERROR)])
    look_ = SourceReading("infiniband", 1.0, readings=[first, Reading(rows=[(LINK, {"rx_bytes": 1.0})])])
    found = by_name(check_sources.sources(AgentConfig(hardware="none"), [look_]))
    assert found["infiniband"].state is CheckState.OK


def pci(sys_root: Path, *devices: tuple[str, str]) -> None:
    for number, (vendor, kind) in enumerate(devices):
        folder = sys_root / f"bus/pci/devices/0000:{number:02x}:00.0"
        folder.mkdir(parents=True)
        (folder / "vendor").write_text(vendor + "\n")
        (folder / "class").write_text(kind + "\n")


def gpus(tmp_path: Path, *devices: tuple[str, str]) -> dict[str, CheckResult]:
    pci(tmp_path / "sys", *devices)
    config = AgentConfig(node="n1", hardware="nvml", sys_root=str(tmp_path / "sys"), dcgm_url="", steps_socket="")
    return by_name(check_sources.sources(config, asyncio.run(read_all_sources(config))))


def test_healthy_gpus_are_ok(tmp_path: Path, fake_nvml: FakeNvml) -> None:
    found = gpus(tmp_path, *[("0x10de", "0x030200")] * 8, ("0x10de", "0x068000"), ("0x8086", "0x030000"))
    assert (found["nvml"].state, found["nvml"].text) == (CheckState.OK, "driver 580.95.05, 8 GPUs")
    assert {found[name].state for name in ("nvml profiling", "nvml ECC", "nvml metrics")} == {CheckState.OK}
    assert "nvlink_effective_ber" in found["nvml metrics"].text


def test_each_gpu_in_trouble_is_named(tmp_path: Path, fake_nvml: FakeNvml) -> None:
    fake_nvml.block(2, "nvmlDeviceGetFieldValues")
    fake_nvml.lose(5)
    fake_nvml.error(1, "nvmlDeviceGetCurrPcieLinkWidth", "NO_PERMISSION")
    found = gpus(tmp_path, *[("0x10de", "0x030200")] * 9)
    fake_nvml.unblock(2, "nvmlDeviceGetFieldValues")
    pynvml.nvmlShutdown()  # the hung call stays, and other tests need a state without a driver
    assert found["nvml"].state is CheckState.LIMITED
    assert "8 GPUs; 9 are on the PCI bus" in found["nvml"].text
    assert (found["nvml:2"].state, found["nvml:2"].text) == (CheckState.BROKEN, "did not answer within 3 s")
    assert found["nvml:5"].state is CheckState.BROKEN
    assert (found["nvml:1"].state, found["nvml:1"].text) == (CheckState.LIMITED, "not allowed: pcie_width")
    assert "nvml:0" not in found


def test_no_driver_is_broken_where_gpus_are_on_the_bus(tmp_path: Path) -> None:
    found = gpus(tmp_path, ("0x10de", "0x030200"))
    assert found["nvml"].state is CheckState.BROKEN
    assert "1 NVIDIA GPUs are on the PCI bus" in found["nvml"].text
    assert found["nvml"].remedy == "install the NVIDIA driver if this node has GPUs"
