"""Kernel lines that are no XIDs, and a board's fans: what is a node's fault, and what only looks like it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest

from drover_collector.detectors._lib.examples import (
    START_MS,
    Change,
    play,
    small_fleet,
)
from drover_collector.detectors.kernel import detector as kernel
from drover_collector.detectors.kernel.rules import RULES, rule_of
from drover_collector.engine.engine import Engine
from drover_collector.fleet.index import FleetIndex
from drover_collector.incidents.book import IncidentBook
from drover_collector.incidents.incident import opened
from drover_collector.policy.policy import Policy
from drover_core.model.events import (
    KERNEL_CODES,
    Event,
    EventKind,
    Finding,
    Incident,
    IncidentKind,
    RecommendedAction,
    Severity,
)

Columns = dict[str, np.ndarray]
CASES = Path(__file__).parents[2] / "cases/agent/kmsg"
FATAL = "pcieport 0000:3a:02.0: AER: Uncorrected (Fatal) error received: 0000:3b:00.0"
UNCORRECTED = "EDAC MC0: 1 UE memory read error on CPU_SrcID#1_MC#0_Chan#1_DIMM#0 (channel:1 slot:0 page:0x22)"
OOM = "Memory cgroup out of memory: Killed process 51807 (python) total-vm:412192kB"


def event(second: float, code: str, message: str, node: str = "n02", gpu: int | None = None, **more: object) -> Event:
    ts_ms = START_MS + round(second * 1000)
    kind = EventKind(str(more.pop("kind", "kernel")))
    return Event(f"{node}/{code}/{second}/{message}", ts_ms, node, gpu, kind, code, message, "kmsg", **more)  # type: ignore[arg-type]  # flags


def run(
    events: Mapping[int, Sequence[Event]], count: int = 8, nodes: int = 8, change: Change | None = None
) -> list[Finding]:
    state, all_findings = None, []
    for window, now_ms in play(small_fleet(nodes), count, change, events=events):
        findings, state = kernel.detect(window, state, now_ms)
        all_findings += findings
    return all_findings


def short(found: Sequence[Finding]) -> list[tuple[str, str, int | None, str, str]]:
    return [(f.cause, f.scope, f.gpu, f.severity.value, f.action.value) for f in found]


def incidents(events: Mapping[int, Sequence[Event]], count: int = 8, index: FleetIndex | None = None) -> list[Incident]:
    """What the whole engine makes of them."""
    index = index or small_fleet()
    engine = Engine(index, Policy.load(), START_MS)
    for window, now_ms in play(index, count, events=events):
        if window.fresh:
            engine.on_bucket(window.newest, now_ms)
        else:
            engine.on_events(window.events, now_ms)
    return sorted(engine.incidents.values(), key=lambda i: i.id)


LINES = [
    (all_findings["code"], all_findings["message"], all_findings["gpu"])
    for case in sorted(CASES.iterdir())
    for all_findings in json.loads((case / "expected.json").read_text())["events"]
    if all_findings["kind"] == "kernel" and not all_findings["forgeable"]
]
FAULTS = {
    "DPC: containment", "Power fault", "Uncorrected (Fatal)", "device recovery failed", " UE memory",
    "Memory failure: 0x", "Machine Check Exception", "]: Uncorrected", "BUG: ", "Oops", "general protection",
    "kernel BUG", "Kernel panic", "Internal error", "hard LOCKUP", "controller is down", "Removing after",
    "medium error", "Disk failure",
    "EXT4-fs error", "read-only", "Aborting journal", "Corruption", "hutting down", "health compromised",
    "firmware internal error", "Fatal error 1", "unrecoverable hardware", "fatal reset event", "High temperature",
}  # fmt: skip
NO_FAULTS = ("mlx5_core 0000:5c:00.0: Port module event", "Non-fatal firmware", "soft lockup")


@pytest.mark.parametrize(("code", "message", "gpu"), LINES, ids=lambda value: str(value)[:60])
def test_of_all_lines_that_an_agent_shows_only_these_are_faults(code: str, message: str, gpu: int | None) -> None:
    rule = rule_of(event(0, code, message, gpu=gpu))
    warns = rule is not None and rule.severity is not Severity.INFO and rule.least == 1
    expected = any(words in message for words in FAULTS) and not any(words in message for words in NO_FAULTS)
    assert warns == expected


def test_no_rule_asks_for_a_drain_and_every_rule_is_for_a_code_that_agents_report() -> None:
    assert {rule.code for rule in RULES} <= KERNEL_CODES.keys()
    for rule in RULES:
        assert rule.action in (RecommendedAction.NONE, RecommendedAction.ADVISE, RecommendedAction.PROBE)
        assert (rule.action is RecommendedAction.NONE) == (rule.severity is Severity.INFO)
    critical = {(rule.kind, rule.cause) for rule in RULES if rule.severity is Severity.CRITICAL}
    assert critical == {(IncidentKind.MEMORY, "cpu")}


@pytest.mark.parametrize(
    ("message", "gpu", "expected"),
    [
        (FATAL, 3, ("pcie_fatal", "gpu", 3, "warning", "probe")),
        (FATAL.replace("Fatal", "Non-Fatal"), 3, ("pcie_uncorrected", "gpu", 3, "warning", "probe")),
        (
            "nvidia 0000:3b:00.0: PCIe Bus Error: severity=Uncorrectable (Fatal), type=Inaccessible",
            None,  # its slot is not known yet
            ("pcie_fatal", "node", None, "warning", "probe"),
        ),
        (
            "pcieport 0000:3a:02.0: PCIe Bus Error: severity=Uncorrected (Non-Fatal), type=Transaction Layer",
            None,
            ("pcie_uncorrected", "node", None, "warning", "probe"),
        ),
        (
            "nvme 0000:22:00.0: PCIe Bus Error: severity=Uncorrected (Fatal), type=Transaction Layer",
            None,
            ("pcie_fatal", "node", None, "warning", "advise"),
        ),
        (
            "nvme 0000:22:00.0: PCIe Bus Error: severity=Uncorrected (Non-Fatal), type=Transaction Layer",
            None,
            ("pcie_device", "node", None, "info", "none"),
        ),
        # A port's line about another device: that device's own line follows.
        (FATAL.replace("Fatal", "Non-Fatal"), None, ("pcie_device", "node", None, "info", "none")),
    ],
)
def test_pcie_errors_of_gpus_and_ports_are_probed_others_are_not(
    message: str, gpu: int | None, expected: tuple[str, str, int | None, str, str]
) -> None:
    assert short(run({2: [event(27, "aer", message, gpu=gpu)]})) == [expected]


@pytest.mark.parametrize("second", [26.0, 36.5])
def test_a_pcie_error_next_to_a_gpu_that_falls_off_the_bus_is_that_gpus(second: float) -> None:
    """As the node's line, without the GPU's slot; before XID 79 or after it."""
    line = "pcieport 0000:3a:02.0: DPC: containment event, status:0x1f01 source:0x0000"
    lost = event(27, "79", "NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.", gpu=5, kind="xid")
    found = incidents({2: sorted([event(second, "pcie", line), lost], key=lambda e: e.ts_ms)})
    assert [(i.node, i.gpu, i.kind, i.cause, i.severity) for i in found] == [
        ("n02", 5, IncidentKind.XID, "xid_79", Severity.CRITICAL)
    ]
    assert any("DPC" in item.text for item in found[0].evidence)


def test_a_pcie_error_of_a_gpu_joins_what_is_known_of_it() -> None:
    unsure = event(60, "119", "NVRM: Xid (PCI:0000:3b:00): 119, Timeout after 6s", gpu=0, kind="xid")
    found = incidents({2: [event(27, "aer", FATAL, gpu=0)], 5: [unsure]})
    assert [(i.gpu, i.severity) for i in found] == [(0, Severity.CRITICAL)]
    assert set(found[0].detectors) == {"kernel", "xid"}


def findings(*found: tuple[str, IncidentKind, str, int | None, Severity, RecommendedAction]) -> list[Finding]:
    return [
        Finding(detector, kind, cause, "node" if gpu is None else "gpu", "n02", gpu, (("n02", gpu),), START_MS,
                START_MS, severity, 0.9, action, f"{cause}.", "Do.")
        for detector, kind, cause, gpu, severity, action in found
    ]  # fmt: skip


def test_what_a_host_says_of_itself_hides_nothing_of_its_gpus() -> None:
    """A fan that awaits repair for weeks, a line of the driver: a GPU that fails there is still reported."""
    warning, critical, info = Severity.WARNING, Severity.CRITICAL, Severity.INFO
    thermal, liveness, straggler = IncidentKind.THERMAL, IncidentKind.LIVENESS, IncidentKind.STRAGGLER
    gpus = findings(
        ("thermal", thermal, "cooling", 1, critical, RecommendedAction.DRAIN),
        ("liveness", liveness, "gpu_lost", 2, critical, RecommendedAction.DRAIN),
        ("straggler", straggler, "nic", 3, warning, RecommendedAction.PROBE),
    )
    for host in (
        ("kernel", thermal, "fan", None, warning, RecommendedAction.ADVISE),
        ("kernel", liveness, "kernel_failed", None, warning, RecommendedAction.ADVISE),
        ("kernel", liveness, "driver", None, info, RecommendedAction.NONE),
    ):
        for order in (1, -1):
            book = IncidentBook(small_fleet(), {}, lambda incident, asked: asked)
            for number, together in enumerate([findings(host), gpus][::order]):
                book.apply(together, START_MS + number * 10_000, closing=False)
            all_findings = {
                (r.incident.gpu, r.incident.cause, r.incident.severity, r.incident.action) for r in book.open()
            }
            assert {(f.gpu, f.cause, f.severity, f.action) for f in gpus} < all_findings
            assert len(all_findings) == 4


def test_a_note_keeps_no_fault_open() -> None:
    book = IncidentBook(small_fleet(), {"liveness": 20_000, "kernel": kernel.QUIET_MS}, lambda incident, asked: asked)
    silent = ("liveness", IncidentKind.LIVENESS, "silent", None, Severity.CRITICAL, RecommendedAction.DRAIN)
    book.apply(findings(silent), START_MS, closing=True)
    oom = findings(("kernel", IncidentKind.MEMORY, "oom", None, Severity.INFO, RecommendedAction.NONE))
    book.apply(oom, START_MS + 10_000, closing=True)
    assert [(r.incident.cause, set(r.holds)) for r in book.open()] == [("silent", {"liveness"})]
    book.apply([], START_MS + 30_000, closing=True)
    assert book.open() == []


@pytest.mark.parametrize(
    ("code", "message", "kind", "cause", "severity"),
    [
        ("edac", UNCORRECTED, "memory", "host_memory", "warning"),
        ("edac", "Memory failure: 0x1c81b0: recovery action for dirty LRU page: Recovered", "memory", "host_memory",
         "warning"),
        ("mce", "mce: [Hardware Error]: CPU 3: Machine Check Exception: 5 Bank 7: be00", "memory", "cpu", "warning"),
        ("mce", "[Hardware Error]: System Fatal error.", "memory", "cpu", "critical"),
        ("mce", "{1}[Hardware Error]: event severity: fatal", "memory", "cpu", "critical"),
        ("mce", "{1}[Hardware Error]: event severity: recoverable", "memory", "cpu", "info"),
        ("panic", "Kernel panic - not syncing: Fatal machine check", "memory", "cpu", "critical"),
        ("panic", "Kernel panic - not syncing: Fatal exception", "liveness", "kernel_failed", "warning"),
        ("lockup", "watchdog: BUG: soft lockup - CPU#3 stuck for 22s! [python:1]", "hang", "soft_lockup", "info"),
        ("nvme", "nvme nvme1: Removing after probe failure status: -19", "risk", "nvme", "warning"),
        ("nic_error", "mlx5_core 0000:41:00.0: poll_health:800:(pid 0): Fatal error 1 detected", "link",
         "nic_firmware", "warning"),
        ("nic_temperature", "mlx5_core 0000:61:00.0: temp_warn:171:(pid 0): High temperature on sensors", "thermal",
         "nic", "warning"),
    ],
)  # fmt: skip
def test_what_a_host_reports_of_itself(code: str, message: str, kind: str, cause: str, severity: str) -> None:
    [found] = run({2: [event(27, code, message)]})
    assert (found.kind, found.cause, found.severity) == (kind, cause, severity)
    assert (found.node, found.gpu, found.since_ms) == ("n02", None, START_MS + 27_000)
    assert message in found.evidence[0].text
    assert found.action is (RecommendedAction.NONE if severity == "info" else RecommendedAction.ADVISE)


@pytest.mark.parametrize("flags", [{"backlog": True}, {"forgeable": True}])
def test_what_is_past_or_could_be_forged_is_not_judged(flags: dict[str, bool]) -> None:
    assert run({2: [event(27, "edac", UNCORRECTED, **flags), event(27, "aer", FATAL, gpu=1, **flags)]}) == []


def test_a_node_that_the_fleet_has_not_is_passed_over() -> None:
    assert run({2: [event(27, "edac", UNCORRECTED, "stranger")]}) == []


def test_a_slot_that_the_fleet_has_not_is_the_nodes_trouble() -> None:
    assert short(run({2: [event(27, "aer", FATAL, gpu=40)]})) == [("pcie_fatal", "node", None, "warning", "probe")]


def test_a_wrong_clock_of_a_node_gives_no_onset_in_the_future() -> None:
    [late] = run({2: [event(90_000, "edac", UNCORRECTED)]})
    assert late.since_ms <= late.ts_ms
    [suspect] = run({2: [event(-90_000, "edac", UNCORRECTED, clock_suspect=True)]})
    assert suspect.since_ms >= START_MS


def test_what_many_nodes_of_one_job_say_is_one_note_for_the_job() -> None:
    read_only = "EXT4-fs (nvme0n1p2): Remounting filesystem read-only"
    found = run({2: [event(27 + n / 10, "filesystem", read_only, f"n{n:02d}") for n in range(6)]})
    assert short(found) == [("filesystem", "job", None, "info", "none")]
    assert found[0].job == "812"
    assert len(found[0].members) == 6


def test_three_nodes_of_a_job_are_enough_in_a_large_fleet_and_two_are_not() -> None:
    def of(count: int) -> list[tuple[str, str, int | None, str, str]]:
        return short(run({2: [event(27, "panic", "kernel BUG at x", f"n{n:02d}") for n in range(count)]}, nodes=64))

    assert of(3) == [("kernel_failed", "job", None, "info", "none")]
    assert of(2) == [("kernel_failed", "node", None, "warning", "advise")] * 2


def test_out_of_memory_never_warns() -> None:
    for count in (1, 2, 8):
        found = run({2: [event(27, "oom", OOM, f"n{n:02d}", count=500) for n in range(count)]})
        assert found
        assert {f.severity for f in found} == {Severity.INFO}


def test_a_storm_of_one_line_is_reported_every_few_minutes_and_is_one_incident() -> None:
    events = {n: [event(10 * n + 7, "edac", UNCORRECTED, count=100)] for n in range(2, 60)}
    found = run(events, 60)
    assert 1 < len(found) <= 1 + 600_000 // kernel.AGAIN_MS
    [incident] = incidents(events, 60)
    assert (incident.cause, incident.action, incident.closed_ms) == ("host_memory", RecommendedAction.ADVISE, None)


def test_worse_is_reported_at_once_after_what_was_less() -> None:
    found = run({
        2: [event(27, "mce", "{1}[Hardware Error]: event severity: recoverable")],
        4: [event(47, "mce", "[Hardware Error]: Uncorrected, software restartable error.")],
        6: [event(67, "mce", "[Hardware Error]: System Fatal error.")],
    }, 10)  # fmt: skip
    assert [f.severity for f in found] == [Severity.INFO, Severity.WARNING, Severity.CRITICAL]


def test_a_drive_that_is_slow_once_is_noted_and_warned_of_when_it_stays_so() -> None:
    slow = "nvme nvme0: I/O 512 QID 7 timeout, aborting"
    assert short(run({2: [event(27, "nvme", slow)]})) == [("nvme_slow", "node", None, "info", "none")]
    found = run({n: [event(10 * n + 7, "nvme", slow)] for n in range(2, 7)}, 10)
    assert [f.severity for f in found] == [Severity.INFO, Severity.WARNING]
    rare = {2: [event(27, "nvme", slow, count=3)], 380: [event(3807, "nvme", slow, count=3)]}
    assert {f.severity for f in run(rare, 384)} == {Severity.INFO}


def test_disks_elsewhere_are_noted_whatever_their_number() -> None:
    found = run({2: [event(27, "disk", "I/O error, dev sdq, sector 2048 op 0x1:(WRITE)", count=900)]})
    assert short(found) == [("disk_errors", "node", None, "info", "none")]


def node_values(name: str, values: Mapping[int, Mapping[int, float]]) -> Change:
    """`values`: from this bucket on -> node -> value; 0 before and for the others."""

    def change(number: int, gpu: Columns, node: Columns) -> None:
        node[name] = np.zeros(len(node["inlet_temp_c"]))
        for first, of in sorted(values.items()):
            for n, value in of.items():
                if number >= first:
                    node[name][n] = value

    return change


def growing(name: str, per_s: float, nodes: Sequence[int], buckets: range) -> Change:
    def change(number: int, gpu: Columns, node: Columns) -> None:
        node[name] = np.full(len(node["inlet_temp_c"]), 7e6)
        grown = min(max(number - buckets.start + 1, 0), len(buckets))
        node[name][list(nodes)] += per_s * 10 * grown

    return change


def test_fans_are_reported_when_the_board_says_so_twice() -> None:
    found = run({}, 20, change=node_values("fans_failed", {3: {5: 2}}))
    assert short(found) == [("fan", "node", None, "warning", "advise")]
    assert found[0].node == "n05"
    assert found[0].since_ms == START_MS + 30_000
    assert found[0].ts_ms - found[0].since_ms >= kernel.FANS_HELD_MS
    assert found[0].evidence[0].value == 2
    assert run({}, 28, change=node_values("fans_failed", {3: {5: 1}, 12: {5: 0}, 18: {5: 1}})) == []


def test_boards_that_all_miss_a_fan_are_built_so() -> None:
    assert run({}, 30, change=node_values("fans_failed", {0: {0: 1, 3: 1, 6: 1}})) == []


def test_a_board_that_falls_silent_has_no_fan_that_failed() -> None:
    def change(number: int, gpu: Columns, node: Columns) -> None:
        node["fans_failed"] = np.zeros(len(node["inlet_temp_c"]))
        node["fans_failed"][5] = 1 if number == 3 else np.nan

    assert run({}, 40, change=change) == []


def test_a_fan_that_stands_still_on_a_node_at_work_is_reported() -> None:
    turning = dict.fromkeys(range(8), 5400.0)
    stops = node_values("fan_min_rpm", {0: turning, 3: {5: 0}})
    found = run({}, 20, change=stops)
    assert short(found) == [("fan", "node", None, "warning", "advise")]
    assert (found[0].node, found[0].evidence[0].metric) == ("n05", "fan_min_rpm")

    def rests(number: int, gpu: Columns, node: Columns) -> None:
        stops(number, gpu, node)
        gpu["gpu_util_ratio"][5 * 8 : 6 * 8] = 0.0

    assert run({}, 20, change=rests) == []
    never_turned = node_values("fan_min_rpm", {0: turning | {5: 0}})
    assert short(run({}, 20, change=never_turned)) == short(found)
    assert run({}, 20, change=node_values("fan_min_rpm", {0: dict.fromkeys(range(8), 0.0)})) == []
    brief = {0: turning, 3: {5: 0}, 8: {5: 5400}}
    assert run({}, 20, change=node_values("fan_min_rpm", brief)) == []


def test_a_fan_that_turns_too_slowly_for_the_heat_of_its_node_is_reported() -> None:
    def played(slow_rpm: float, temp_c: float, nodes: int = 1) -> list[Finding]:
        def change(number: int, gpu: Columns, node: Columns) -> None:
            node["fan_min_rpm"] = np.full(8, 6000.0)
            if number >= 100:
                node["fan_min_rpm"][:nodes] = slow_rpm
                gpu["gpu_temp_c"][: 8 * nodes] = temp_c

        return run({}, 190, change=change)

    (found,) = {f.summary for f in played(2500, 66)}
    assert found == "Node n00: a fan turns at 2,500 rpm; with such heat 6,000 or more is usual."
    assert played(4500, 66) == []  # a cooler room
    assert played(2500, 30) == []  # at rest it may turn as slowly as it likes: nothing is known of that
    assert played(2500, 66, nodes=6) == []  # a setting of all


@pytest.mark.parametrize(("watts", "found"), [(400.0, True), (90.0, False)])
def test_where_utilisation_is_not_read_power_says_that_a_node_works(watts: float, found: bool) -> None:
    def change(number: int, gpu: Columns, node: Columns) -> None:
        gpu.pop("gpu_util_ratio", None)
        gpu["power_w"][:], gpu["power_limit_w"] = watts, np.full(64, 700.0)
        node["fan_min_rpm"] = np.where((np.arange(8) == 5) & (number >= 3), 0.0, 5400.0)

    assert bool(run({}, 20, change=change)) is found


def test_a_fan_slower_than_those_of_like_nodes_with_at_most_its_power_is_reported() -> None:
    def played(rpm: float, watts: float = 400.0, share: float = 1.0, nodes: int = 8) -> list[Finding]:
        """All nodes turn at their lowest speed; from bucket 100 on a fan of n00 is slower, at its core's usual heat."""

        def change(number: int, gpu: Columns, node: Columns) -> None:
            node["fan_min_rpm"] = np.where(np.arange(8) < nodes, 4400.0, np.nan)
            gpu["power_w"][:], gpu["gpu_temp_c"][:] = 400.0, 50.0
            if number >= 100:
                node["fan_min_rpm"][0] = rpm  # more than half of what it had
                gpu["power_w"][:8] = watts
            gpu["power_w"][8:] *= share
            node["fan_min_rpm"][1:] *= 1.0 if share == 1.0 else 2.0

        return run({}, 175, change=change)

    (found,) = {f.summary for f in played(2900)}
    assert found == "Node n00: a fan turns at 2,900 rpm; with such heat 4,400 or more is usual."
    assert played(3500) == []  # a cooler room
    assert played(2900, watts=90.0) == []  # its GPUs have less power than the others ever had
    assert played(2900, share=1.6) == []  # the others turn faster because they have more power
    assert played(2900, nodes=3) == []  # too few to say


def test_fans_that_ran_at_full_or_need_minutes_to_follow_the_heat_are_not_reported() -> None:
    def full_for_a_while(number: int, gpu: Columns, node: Columns) -> None:
        """A board that updates itself sets its fans to full, and cores cool; then all is as before."""
        full = 100 <= number < 210
        node["fan_min_rpm"] = np.full(8, 6000.0)
        node["fan_min_rpm"][0] = 21_500.0 if full else 6000.0
        gpu["gpu_temp_c"][:8] = 42.0 if full or number >= 210 else 58.0  # afterwards the load is less

    assert run({}, 330, change=full_for_a_while) == []

    def lags(number: int, gpu: Columns, node: Columns) -> None:
        """A job pauses for minutes, and works again: the core is hot at once, and the fan some minutes later."""
        node["fan_min_rpm"] = np.full(8, 15_000.0)
        node["fan_min_rpm"][0] = 6500.0 if number >= 100 and number % 60 < 20 else 15_000.0

    assert run({}, 240, change=lags) == []


def test_fans_that_cool_something_else_or_are_read_once_are_not_reported() -> None:
    def after_cpu_work(number: int, gpu: Columns, node: Columns) -> None:
        gpu["gpu_util_ratio"][:] = 0.0
        gpu["gpu_temp_c"][:] = 31.0
        node["fan_min_rpm"] = np.full(8, 11_000.0 if number < 100 else 4_500.0)
        node["fan_min_rpm"][1:] = 4_500.0

    assert run({}, 130, change=after_cpu_work) == []

    def once(number: int, gpu: Columns, node: Columns) -> None:
        node["fan_min_rpm"] = np.full(8, 6000.0)
        if number >= 100:
            node["fan_min_rpm"][0] = 0.0 if number == 100 else np.nan

    assert run({}, 130, change=once) == []


@pytest.mark.parametrize("slow_rpm", [2500.0, 4200.0], ids=["by its past", "by like nodes"])
def test_a_slow_fan_stays_one_over_a_restart(slow_rpm: float) -> None:
    def change(number: int, gpu: Columns, node: Columns) -> None:
        node["fan_min_rpm"] = np.full(8, 6000.0)
        node["fan_min_rpm"][0] = slow_rpm if number >= 100 else 6000.0

    windows, state, found = list(play(small_fleet(), 300, change)), None, []
    for window, now_ms in windows[:190]:
        findings, state = kernel.detect(window, state, now_ms)
        found += findings
    incident = opened(found[0], ("node", "n00", None), found[0].ts_ms).incident
    state, again = kernel.restored([incident]), []
    for window, now_ms in windows[190:]:
        findings, state = kernel.detect(window, state, now_ms)
        again += findings
    assert {f.summary for f in again} == {f.summary for f in found}


def test_a_root_disk_that_stays_full_is_reported_and_many_at_once_are_information() -> None:
    room = dict.fromkeys(range(8), 0.4)
    found = run({}, 190, change=node_values("root_used_ratio", {0: room, 4: {5: 0.96}}))
    assert short(found)[0] == ("root_full", "node", None, "warning", "advise")
    assert found[0].node == "n05"
    assert found[0].ts_ms - found[0].since_ms >= 1_800_000
    assert run({}, 190, change=node_values("root_used_ratio", {0: room, 4: {5: 0.96}, 150: {5: 0.5}})) == []
    all_full = run({}, 190, change=node_values("root_used_ratio", {0: dict.fromkeys(range(8), 0.99)}))
    assert {(f.cause, f.severity, len(f.members)) for f in all_full} == {("root_full_common", Severity.INFO, 8)}


def test_a_host_without_memory_left_is_information() -> None:
    def change(number: int, gpu: Columns, node: Columns) -> None:
        node["memory_total_bytes"] = np.full(len(node["inlet_temp_c"]), 1e12)
        node["memory_available_bytes"] = np.full(len(node["inlet_temp_c"]), 4e11)
        node["memory_available_bytes"][5] = 1e10 if number >= 3 else 4e11

    found = run({}, 20, change=change)
    assert short(found) == [("memory_low", "node", None, "info", "none")]
    assert "1.0% of the host's memory is left" in found[0].summary


def test_a_counter_that_grows_shows_what_a_lost_line_did_not() -> None:
    found = run({}, 12, change=node_values("edac_uncorrected", {0: {1: 900, 2: 4}, 5: {2: 6}}))
    assert short(found) == [("host_memory", "node", None, "warning", "advise")]
    assert found[0].node == "n02"
    assert "2 more" in found[0].summary


def test_a_line_and_its_counter_are_reported_once() -> None:
    counter = node_values("edac_uncorrected", {3: {2: 1}})
    assert len(run({2: [event(27, "edac", UNCORRECTED)]}, 20, change=counter)) == 1
    assert len(run({3: [event(31, "edac", UNCORRECTED)]}, 20, change=counter)) == 1


def test_a_counter_that_begins_again_after_a_reboot_is_no_error() -> None:
    assert run({}, 12, change=node_values("edac_uncorrected", {0: {1: 900}, 5: {1: 0}})) == []
    assert run({}, 12, change=node_values("edac_corrected", {0: {1: 9e6}, 5: {1: 0}})) == []


def test_corrected_errors_are_reported_above_their_rate_and_while_they_last() -> None:
    def of(name: str, per_s: float, nodes: Sequence[int] = (4,), buckets: range = range(2, 14)) -> list[Finding]:
        return run({}, 14, change=growing(name, per_s, nodes, buckets))

    assert short(of("edac_corrected", 20)) == [("host_memory_corrected", "node", None, "warning", "advise")]
    assert of("edac_corrected", 10) == []
    assert of("edac_corrected", 40, buckets=range(2, 3)) == []
    assert short(of("pcie_aer_correctable", 20)) == [("pcie_corrected", "node", None, "info", "none")]
    assert {f.severity for f in of("edac_corrected", 20, range(8))} == {Severity.INFO}


def test_a_restarted_collector_shows_nothing_twice_and_forgets_nothing_held() -> None:
    index = small_fleet()
    engine = Engine(index, Policy.load(), START_MS)
    old = event(27, "edac", UNCORRECTED, received_ms=START_MS + 27_500)
    fresh = event(57, "nvme", "nvme nvme1: Device not ready; aborting reset", received_ms=START_MS + 57_500)
    windows = [(w.newest, now_ms) for w, now_ms in play(index, 10)]
    before, all_findings = Engine(index, Policy.load(), START_MS), {}
    for bucket, now_ms in windows[:6]:
        came = [e for e in (old, fresh) if bucket.start_ms <= (e.received_ms or 0) < bucket.end_ms]
        for outcome in (before.on_events(came, bucket.end_ms), before.on_bucket(bucket, now_ms)):
            all_findings |= {i.id: i for i in outcome.incidents}
    assert [i.cause for i in all_findings.values()] == ["host_memory"], "the other one waits for company"
    engine.restore(list(all_findings.values()), [bucket for bucket, _ in windows[:6]], [old, fresh])
    found = [f for bucket, now_ms in windows[6:] for f in engine.on_bucket(bucket, now_ms).findings]
    assert [f.cause for f in found] == ["nvme"]


def test_it_stays_small_and_forgets() -> None:
    state = None
    events = {2: [event(27, "oom", f"{OOM} {n}", f"n{n % 8:02d}") for n in range(3_000)]}
    events[2] += [
        event(27, "nvme", "nvme nvme0: I/O 512 QID 7 timeout, aborting", f"n{n % 8:02d}") for n in range(3_000)
    ]
    for window, now_ms in play(small_fleet(), 400, events=events):
        _, state = kernel.detect(window, state, now_ms)
        if not window.fresh:
            assert len(state.held) == 16
            assert max(map(len, state.lines.values())) <= 6
    assert state is not None
    assert not (state.held or state.reported or state.lines or state.nodes or state.lost)
