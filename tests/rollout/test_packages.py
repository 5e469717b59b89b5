"""The packages of `make packages` on a machine with a real systemd: first incident, upgrade under load, removal, purge.

`make test-rollout` runs it, as root on Debian. Steps build on each other, in the order in which they stand here.
DROVER_PACKAGES=FOLDER has packages of a run before, while you mend.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest

from testbed.hosts import Host, give_gpus, hosts
from testbed.rollout_fleet import GAP_MS, RESTART_MS, samples, unread
from testbed.rollout_log import saw
from testbed.rollout_packages import BUILD_S, NEW, OLD
from testbed.system_processes import free_port
from testbed.waiting import wait_until

NAMES = ("drover-agent", "drover-collector", "drover-dashboard")
NODE, SIMULATED = "fresh", 8
APT_S, REPORT_S, INCIDENT_S, LOAD_S = 900, 240, 400, 40
APT = ("DEBIAN_FRONTEND=noninteractive", "apt-get", "-y", "-q", "-o", "Dpkg::Options::=--force-confold")


@dataclass(frozen=True, slots=True)
class Machine:
    host: Host
    folder: Path  # of packages
    ingest: int
    api: int
    console: int

    def apt(self, *words: str) -> str:
        return self.host.ssh(*APT, *words, timeout_s=APT_S)

    def install(self, version: str, *names: str) -> str:
        found = [next(self.folder.glob(f"{name}_{version}+*.deb")) for name in names]
        for path in found:
            shutil.copyfile(path, self.host.root / "root" / path.name)
        text = self.apt("install", *(f"/root/{path.name}" for path in found))
        for path in found:
            (self.host.root / "root" / path.name).unlink()
        return text

    def drover(self, *words: str) -> list[dict[str, object]]:
        text = self.host.ssh("drover", *words, "--json", f"--collector=localhost:{self.api}")
        return [json.loads(line) for line in text.splitlines()]

    def state(self, what: str, unit: str) -> str:
        return self.host.ssh("systemctl", what, unit, check=False).strip()

    def reporting(self) -> dict[str, str]:
        """Node -> version of its agent, of those that report now; none while the collector starts."""
        since_ms = time.time() * 1000 - 15_000
        try:
            rows = self.drover("nodes")
        except RuntimeError as error:
            assert "does not answer" in str(error), error
            return {}
        return {
            str(row["name"]): str(row["agent_version"]) for row in rows
            if int(str(row["last_seen_ms"])) > since_ms
        }  # fmt: skip

    def samples(self, node: str, metric: str, from_ms: int, to_ms: int) -> list[tuple[int, float]]:
        with grpc.insecure_channel(f"localhost:{self.api}") as channel:
            return samples(channel, node, metric, from_ms, to_ms)

    def write(self, path: str, *changes: tuple[str, str]) -> None:
        """Change lines of a settings file, as an operator does with an editor."""
        file = self.host.root / path.lstrip("/")
        text = file.read_text()
        for before, after in changes:
            assert text.count(before) == 1, f"{path}: {before}"
            text = text.replace(before, after)
        file.write_text(text)

    def configure(self, *more: tuple[str, str]) -> None:
        self.write(
            "/etc/drover/collector.toml",
            ('listen = "127.0.0.1:7301"', f'listen = "127.0.0.1:{self.ingest}"'),
            ('listen = "127.0.0.1:7302"', f'listen = "127.0.0.1:{self.api}"'),
        )
        listed = f'[[nodes]]\nnames = "{NODE}"\nsku = "H100-SXM"\ngpus = 8\n[[nodes]]\n'
        listed += f'names = "sim[1-{SIMULATED}]"\nrack = "r1"\nsku = "H100-SXM"\ngpus = 8\n'
        (self.host.root / "etc/drover/fleet.toml").write_text(listed)
        addresses = ('collectors = ["127.0.0.1:7301"]', f'collectors = ["127.0.0.1:{self.ingest}"]')
        self.write("/etc/drover/agent.toml", addresses, *more)


@pytest.fixture(scope="module")
def machine(packages: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    with hosts(tmp_path_factory.mktemp("machine"), (NODE,)) as (host,):
        yield Machine(host, packages, free_port(), free_port(), free_port())


@contextlib.contextmanager
def load(machine: Machine, folder: Path) -> Iterator[None]:
    """Simulated agents with spools of their own, which stream from outside the machine."""
    listed = f'[[nodes]]\nnames = "sim[1-{SIMULATED}]"\nrack = "r1"\nsku = "H100-SXM"\ngpus = 8\n'
    (folder / "load.toml").write_text(listed)
    command = [sys.executable, "-m", "drover_agent.main", "fleet", "--collector", f"localhost:{machine.ingest}"]
    command += ["--fleet", str(folder / "load.toml"), "--faults", "none", "--spool-dir", str(folder / "spools")]
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=(folder / "load.log").open("w"))
    try:
        yield
        assert child.poll() is None, (folder / "load.log").read_text()[-2000:]
    finally:
        child.terminate()
        child.wait(60)


def left(machine: Machine) -> list[str]:
    search = (
        "find / -xdev \\( -path /proc -o -path /sys -o -path /var/lib/dpkg -o -path /var/log -o -path /opt/nvml \\)"
    )
    found = machine.host.ssh(f"{search} -prune -o -iname '*drover*' -print").split()
    return [path for path in found if "drover-test.conf" not in path]


@pytest.mark.timeout(2 * BUILD_S + APT_S)
def test_nothing_runs_until_it_is_configured(machine: Machine) -> None:
    began = time.monotonic()
    text = machine.install(NEW, *NAMES)
    saw(f"three packages installed with one apt-get in {time.monotonic() - began:.0f} s")
    for name in NAMES:
        assert f"{name} is installed. It does not run yet, and does not start at boot:" in text, text[-3000:]
        assert machine.state("is-active", name) == "inactive"
        assert machine.state("is-enabled", name) == "disabled"
    assert "no node is drained or reset unless" in text
    listed = machine.host.ssh("stat", "-c", "%a:%U:%G", "/etc/drover", "/etc/drover/agent.toml").split()
    assert listed == ["750:root:drover", "640:root:drover"]


@pytest.mark.timeout(2 * INCIDENT_S)
def test_from_nothing_to_a_first_incident(machine: Machine, tmp_path: Path) -> None:
    fake = give_gpus(machine.host, tmp_path)
    began = time.monotonic()
    machine.configure()
    machine.write("/etc/drover/dashboard.env", ("7302", f"{machine.api} --port {machine.console}"))
    machine.host.ssh("systemctl", "enable", "--now", *NAMES, timeout_s=120)
    wait_until(lambda: NODE in machine.reporting(), "the agent reports", REPORT_S)
    reports_s = time.monotonic() - began
    lost = time.monotonic()
    fake.lose(3)

    def opened() -> list[dict[str, object]]:
        return [row for row in machine.drover("incidents") if NODE in json.dumps(row) and "gpu" in json.dumps(row)]

    wait_until(lambda: bool(opened()), "an incident of the lost GPU", INCIDENT_S)
    saw(
        f"settings, start, first report in {reports_s:.0f} s; a GPU lost by the stand-in for NVML is an incident after"
        f" {time.monotonic() - lost:.0f} s more: {opened()[0]['summary']!r}"
    )


@pytest.mark.timeout(2 * APT_S)
def test_a_purge_leaves_nothing(machine: Machine) -> None:
    machine.apt("purge", *NAMES)
    assert left(machine) == []
    assert "drover" not in machine.host.ssh("cat", "/etc/passwd", "/etc/group")
    assert "drover" not in machine.host.ssh("systemctl", "list-unit-files", "--no-legend")
    assert "drover" not in machine.host.ssh("dpkg-query", "--show")
    saw("no file of that name, user, group, unit or package is left")


@pytest.mark.timeout(3 * APT_S)
def test_an_upgrade_under_load_loses_nothing_and_keeps_settings(machine: Machine, tmp_path: Path) -> None:
    machine.install(OLD, *NAMES[:2])
    machine.configure(('hardware = "auto"', 'hardware = "none"'))
    machine.host.ssh("systemctl", "enable", "--now", *NAMES[:2], timeout_s=120)
    nodes = [NODE, *(f"sim{number}" for number in range(1, SIMULATED + 1))]
    settings = [machine.host.root / f"etc/drover/{name}.toml" for name in ("agent", "collector")]
    before = [(path.read_text(), path.stat().st_mode, path.stat().st_gid) for path in settings]
    with load(machine, tmp_path):
        wait_until(lambda: set(machine.reporting()) == set(nodes), "all agents report", REPORT_S)
        assert machine.reporting()[NODE] == OLD
        time.sleep(LOAD_S)
        began_ms = round(time.time() * 1000) - 30_000
        began = time.monotonic()
        text = machine.install(NEW, *NAMES[:2])
        took_s = time.monotonic() - began
        assert "does not run yet" not in text
        wait_until(lambda: machine.reporting().get(NODE) == NEW, "the new agent reports", REPORT_S)
        wait_until(lambda: set(machine.reporting()) == set(nodes), "all agents report again", REPORT_S)
        time.sleep(LOAD_S)
        _compare(machine, nodes, began_ms, round(time.time() * 1000) - 15_000)
    assert [(path.read_text(), path.stat().st_mode, path.stat().st_gid) for path in settings] == before
    assert all(machine.state("is-enabled", name) == "enabled" for name in NAMES[:2])
    saw(f"both packages upgraded from {OLD} to {NEW} in {took_s:.0f} s; settings, their owners and units stayed")


def _compare(machine: Machine, nodes: list[str], began_ms: int, until_ms: int) -> None:
    started = machine.host.ssh("systemctl", "show", "-P", "ActiveEnterTimestamp", "--timestamp=unix", NAMES[0])
    restarted_ms = int(started.strip().lstrip("@")) * 1000
    kept, missing, never_read = 0, 0, 0
    for node in nodes:
        times = [ts for ts, _ in machine.samples(node, "load1", began_ms, until_ms)]
        assert len(times) > 20, f"{node}: {len(times)} samples"
        gaps = [(a, b) for a, b in itertools.pairwise(times) if b - a > GAP_MS]
        # An agent reads nothing while it is restarted itself; then alone may its samples be missing.
        own = [(a, b) for a, b in gaps if node == NODE and a - 1000 < restarted_ms < b + 1000]
        assert all(b - a < RESTART_MS for a, b in own), f"{node}: {own}"
        lost = sum(round((b - a) / 1000) - 1 for a, b in gaps if (a, b) not in own)

        def read(metric: str, since_ms: int, node: str = node) -> list[tuple[int, float]]:
            return machine.samples(node, metric, since_ms, until_ms)

        not_read = unread(read, began_ms)
        assert lost <= not_read, f"{node}: {gaps}; the agent did not read {not_read}"
        kept, missing, never_read = kept + len(times), missing + lost, never_read + not_read
        if own:
            saw(f"{node}: away for its own restart {sum(b - a for a, b in own) / 1000:.1f} s")
    saw(f"{len(nodes)} nodes: {kept} samples of one metric; {missing} missing, {never_read} of them never read")


@pytest.mark.timeout(2 * APT_S)
def test_removal_keeps_settings_and_data_and_a_purge_takes_them(machine: Machine) -> None:
    machine.apt("remove", *NAMES[:2])
    assert all(machine.state("is-active", name) == "inactive" for name in NAMES[:2])
    root = machine.host.root
    assert not (root / "opt/drover").exists()
    assert (root / "etc/drover/collector.toml").exists() and (root / "var/lib/drover/store").exists()
    machine.apt("purge", NAMES[0])
    assert (root / "etc/drover/collector.toml").exists() and not (root / "etc/drover/agent.toml").exists()
    machine.apt("purge", NAMES[1])
    assert left(machine) == []
    assert "drover" not in machine.host.ssh("cat", "/etc/passwd", "/etc/group")
    saw("`remove` left settings and store, `purge` of one package what the other needs, `purge` of both nothing")


@pytest.mark.timeout(60)
def test_an_installation_by_hand_is_not_overwritten(machine: Machine) -> None:
    unit = machine.host.root / "etc/systemd/system/drover-agent.service"
    unit.write_text("[Service]\nExecStart=/bin/true\n")
    packed = next(machine.folder.glob(f"{NAMES[0]}_{NEW}+*.deb"))
    shutil.copyfile(packed, machine.host.root / "root" / packed.name)
    text = machine.host.ssh(*APT, "install", f"/root/{packed.name}", "2>&1", check=False, timeout_s=APT_S)
    (machine.host.root / "root" / packed.name).unlink()
    assert "is of an installation by hand" in text, text
    assert not (machine.host.root / "opt/drover").exists()
    unit.unlink()
    assert left(machine) == []
