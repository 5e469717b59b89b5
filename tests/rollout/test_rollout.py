"""The playbooks on four machines with a real systemd and sshd: a fleet from nothing, upgrade, a bad version, removal.

`make test-rollout` runs it, as root on Debian; it takes half an hour, as four releases are built and installed. Steps
build on each other, in the order in which they stand here.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from testbed.hosts import give_gpus, hosts, take_gpus
from testbed.rollout_fleet import (
    BROKEN,
    BUILD_S,
    DEAD,
    ENROLLED,
    GAP_MS,
    LIVES_S,
    NAMES,
    NEW,
    OLD,
    OLD_COMMIT,
    PLAY_S,
    REPORT_S,
    RESTART_MS,
    ROOT,
    Fleet,
    broken,
    build,
    changed,
    older,
)
from testbed.rollout_log import saw
from testbed.system_processes import free_port
from testbed.waiting import wait_until

INCIDENT_S = 400


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("rollout")
    dist = Path(os.environ.get("DROVER_ROLLOUT_DIST") or folder / "dist")  # bundles of a run before, while you mend
    if not dist.exists():
        began = time.monotonic()
        build(dist, OLD, older(folder))
        build(dist, NEW)
        build(dist, BROKEN, broken(folder, "agent/drover_agent/main.py"))
        build(dist, DEAD, broken(folder, "collector/drover_collector/main.py"), "--only", "server")
        saw(f"four releases built in {time.monotonic() - began:.0f} s, the first of commit {OLD_COMMIT}")
    for bundle in sorted(dist.glob(f"*-{NEW}-*.tar.gz")):
        saw(f"{bundle.name}: {bundle.stat().st_size / 1e6:.1f} MB")
    (folder / "fleet.toml").write_text(f'[[nodes]]\nnames = "{NAMES[0]}"\nsku = "CPU"\ngpus = 0\n' + "".join(
        f'[[nodes]]\nnames = "{name}"\nrack = "r1"\nsku = "H100-SXM"\ngpus = 8\n' for name in NAMES[1:]
    ))  # fmt: skip
    began = time.monotonic()
    with hosts(folder, NAMES) as found:
        saw(f"{len(found)} hosts with systemd and sshd booted in {time.monotonic() - began:.0f} s")
        inventory = {
            "all": {
                "vars": {
                    "ansible_host": "127.0.0.1",
                    "ansible_user": "root",
                    "ansible_ssh_private_key_file": str(found[0].key),
                    "ansible_ssh_common_args": f"-o UserKnownHostsFile={found[0].known}",
                    "drover_dist_dir": str(dist),
                    "drover_collector_host": "localhost",
                    "drover_gate_s": 60,
                    "drover_hold_s": 3,
                    "drover_command": str(Path(sys.executable).parent / "drover"),
                    "drover_collector_listen": "127.0.0.1",
                    # All hosts share one network: one of them may have the usual pages and sockets.
                    "drover_agent_settings": {"hardware": "none", "dcgm_url": ""},
                },
                "children": {
                    "drover_collectors": {"hosts": {NAMES[0]: {}}},
                    "drover_dashboards": {"hosts": {NAMES[0]: {}}},
                    "drover_agents": {"hosts": {host.name: {"ansible_port": host.port} for host in found}},
                },
            }
        }
        (folder / "inventory.yml").write_text(json.dumps(inventory))  # JSON is YAML
        try:
            yield Fleet(folder, found)
        finally:
            kept = ROOT / "test-artifacts"
            kept.mkdir(exist_ok=True)
            shutil.copy2(folder / "rollout.log", kept / "rollout.log")


@pytest.mark.timeout(4 * BUILD_S + PLAY_S)
def test_check_mode_on_empty_hosts_changes_nothing(fleet: Fleet) -> None:
    code, text = fleet.play("install.yml", "-e", f"drover_version={OLD}", "--check", "--skip-tags", "certificates")
    assert code == 0, text[-3000:]
    assert not any((host.root / "opt/drover").exists() for host in fleet.hosts)


@pytest.mark.timeout(PLAY_S)
def test_one_command_from_nothing_to_a_watched_fleet(fleet: Fleet) -> None:
    code, text = fleet.play("install.yml", "-e", f"drover_version={OLD}")
    assert code == 0, text[-3000:]
    assert fleet.reporting(OLD) == set(NAMES)
    with urllib.request.urlopen("http://127.0.0.1:8501/", timeout=10) as page:
        assert page.status == 200
    rows = {row["name"]: row for row in fleet.drover("nodes")}
    assert set(rows) == set(NAMES)
    saw(f"{len(fleet.reporting(OLD))} of {len(NAMES)} agents report over mutual TLS, the console answers")


@pytest.mark.timeout(PLAY_S)
def test_the_second_run_changes_nothing(fleet: Fleet) -> None:
    code, text = fleet.play("install.yml", "-e", f"drover_version={OLD}")
    assert code == 0, text[-3000:]
    assert changed(text) == dict.fromkeys(NAMES, 0), text


@pytest.mark.timeout(PLAY_S)
def test_keys_are_their_services_alone(fleet: Fleet) -> None:
    for host in fleet.hosts:
        listed = host.ssh("stat", "-c", "%a:%U:%n", "/etc/drover/tls/agent.key").strip()
        assert listed == "400:drover:/etc/drover/tls/agent.key"


@pytest.mark.timeout(PLAY_S)
def test_an_agent_one_version_newer_than_its_collector_reports(fleet: Fleet) -> None:
    code, text = fleet.play("upgrade.yml", "-e", f"drover_version={NEW}", "--tags", "agent", "--limit", "gpu3")
    assert code == 0, text[-3000:]
    assert fleet.release("head", "current") == OLD
    assert fleet.reporting(NEW) == {"gpu3"}
    since_ms = round(time.time() * 1000)
    wait_until(
        lambda: len(fleet.samples("gpu3", "load1", since_ms, since_ms + 60_000)) > 5,
        "samples of the newer agent",
        REPORT_S,
    )


@pytest.mark.timeout(PLAY_S)
def test_an_upgrade_of_a_live_fleet_loses_no_sample(fleet: Fleet) -> None:
    began_ms = round(time.time() * 1000)
    code, text = fleet.play("upgrade.yml", "-e", f"drover_version={NEW}")
    assert code == 0, text[-3000:]
    assert fleet.reporting(NEW) == set(NAMES)
    for host in fleet.hosts:
        restarted = host.ssh("systemctl", "show", "-P", "ActiveEnterTimestamp", "--timestamp=unix", "drover-agent")
        restarted_ms = int(restarted.strip().lstrip("@")) * 1000
        until_ms = round(time.time() * 1000) - 15_000
        times = [ts for ts, _ in fleet.samples(host.name, "load1", began_ms, until_ms)]
        gaps = [(a, b) for a, b in itertools.pairwise(times) if b - a > GAP_MS]
        # The collector was away meanwhile, and each agent once: then alone may samples be missing, as it read none.
        assert len(times) > 20
        away = [(a, b) for a, b in gaps if a - 1000 < restarted_ms < b + 1000]
        assert len(away) <= 1, f"{host.name}: {gaps}"
        assert all(b - a < RESTART_MS for a, b in away), f"{host.name}: {away}"
        lost = sum(round((b - a) / 1000) - 1 for a, b in gaps if (a, b) not in away)
        unread = fleet.unread(host.name, began_ms, until_ms)
        saw(
            f"{host.name}: {len(times)} samples in {(times[-1] - times[0]) / 1000:.0f} s; away for its own restart"
            f" {sum(b - a for a, b in away) / 1000:.1f} s; {lost} missing elsewhere, {unread} of them never read"
        )
        assert lost <= unread, f"{host.name}: {gaps}"
    assert fleet.release("head", "current") == fleet.release("head", "agent") == NEW


@pytest.mark.timeout(PLAY_S)
def test_a_lost_gpu_is_an_incident(fleet: Fleet, tmp_path: Path) -> None:
    host = next(host for host in fleet.hosts if host.name == "gpu1")
    settings = host.root / "etc/drover/agent.toml"
    before = settings.read_text()
    assert before.count('hardware = "none"') == 1
    fake = give_gpus(host, tmp_path)
    settings.write_text(before.replace('hardware = "none"', 'hardware = "nvml"'))
    host.ssh("systemctl", "restart", "drover-agent")
    wait_until(lambda: _gpu_health(fleet, "gpu1", 3) == "healthy", "eight GPUs report", INCIDENT_S)
    lost = time.monotonic()
    fake.lose(3)
    wait_until(lambda: _gpu_health(fleet, "gpu1", 3) == "confirmed", "the lost GPU is confirmed", INCIDENT_S)
    rows = [row for row in fleet.drover("incidents") if (row["node"], row["gpu"]) == ("gpu1", 3)]
    assert [row["cause"] for row in rows] == ["gpu_lost"]
    saw(
        f"a GPU that NVML's stand-in loses is an incident after {time.monotonic() - lost:.0f} s: {rows[0]['summary']!r}"
    )
    settings.write_text(before)
    take_gpus(host)
    host.ssh("systemctl", "restart", "drover-agent")
    wait_until(lambda: fleet.reporting(NEW) >= {"gpu1"}, "the agent reports as before", REPORT_S)


def _gpu_health(fleet: Fleet, node: str, slot: int) -> str:
    (row,) = [row for row in fleet.drover("nodes") if row["name"] == node]
    health = row["gpu_health"]
    return str(health[slot]) if isinstance(health, list) and len(health) > slot else ""


@pytest.mark.timeout(PLAY_S)
def test_logs_are_in_the_journal_with_their_fields(fleet: Fleet) -> None:
    for unit in ("drover-agent", "drover-collector"):
        listed = fleet.head.ssh("journalctl", "-u", unit, "-o", "json", "--no-pager", "-n", "1000")
        rows = [json.loads(line) for line in listed.splitlines()]
        own = [row for row in rows if str(row.get("LOGGER", "")).startswith("drover_")]
        assert own, listed[-2000:]
        assert {row["_SYSTEMD_UNIT"] for row in own} == {f"{unit}.service"}
        assert all({"MESSAGE", "PRIORITY", "CODE_FILE", "CODE_LINE"} <= row.keys() for row in own)
        saw(f"{unit}: {len(own)} lines with LOGGER and PRIORITY, such as {own[-1]['MESSAGE'][:80]!r}")


@contextlib.contextmanager
def enrolment(authority: Path) -> Iterator[str]:
    """`drover certs serve` where the authority lies; its address."""
    drover = str(Path(sys.executable).parent / "drover")
    issue = [drover, "certs", "issue", "collector", "enrol", "--host", "localhost", "--dir", str(authority)]
    subprocess.run(issue, check=True, timeout=60, stdout=subprocess.DEVNULL)
    address = f"localhost:{free_port()}"
    serve = [drover, "certs", "serve", "--listen", address, "--cert", str(authority / "collector/enrol.pem"), "--json"]
    child = subprocess.Popen([*serve, "--dir", str(authority)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert child.stdout is not None
    try:
        assert json.loads(child.stdout.readline()) == {"listen": address}
        yield address
    finally:
        child.terminate()
        child.wait(60)
        child.stdout.close()


@pytest.mark.timeout(PLAY_S)
def test_a_node_that_is_installed_again_enrols_by_a_token(fleet: Fleet) -> None:
    host = next(host for host in fleet.hosts if host.name == ENROLLED)
    host.ssh("systemctl stop drover-agent && rm -r /etc/drover/tls")
    authority = fleet.folder / "authority"
    for path in (authority / "agent").glob(f"{ENROLLED}.*"):
        path.unlink()
    with enrolment(authority) as address:
        inventory = json.loads((fleet.folder / "inventory.yml").read_text())
        inventory["all"]["children"]["drover_agents"]["hosts"][ENROLLED]["drover_enrol_server"] = address
        (fleet.folder / "inventory.yml").write_text(json.dumps(inventory))
        options = ("-e", f"drover_version={NEW}", "--tags", "agent", "--limit", ENROLLED)
        code, text = fleet.play("install.yml", *options)
        assert code == 0, text[-3000:]
        assert changed(text)[ENROLLED] > 0
        assert fleet.reporting(NEW) == set(NAMES)
        host.ssh("systemctl", "start", "--wait", "drover-renew.service")
        assert "nothing to do" in host.ssh("journalctl", "-u", "drover-renew.service", "--no-pager")
    code, text = fleet.play("install.yml", *options)  # the service need not run but while nodes come or renew
    assert code == 0, text[-3000:]
    assert changed(text) == {ENROLLED: 0}, text
    assert host.ssh("stat", "-c", "%a:%U", "/etc/drover/tls/agent.key").strip() == "400:drover"
    key = host.ssh("cat", "/etc/drover/tls/agent.key").splitlines()[1].encode()
    assert [path for path in authority.rglob("*") if path.is_file() and key in path.read_bytes()] == []
    log = (fleet.folder / "rollout.log").read_bytes()
    assert [path.name for path in (authority / "tokens").iterdir() if path.stem.encode() in log] == []
    saw(f"{ENROLLED} made its key itself, showed a token that is used up, and reports; neither is in the log")


@pytest.mark.timeout(PLAY_S)
def test_a_broken_version_stops_at_the_first_batch_and_goes_back(fleet: Fleet) -> None:
    code, text = fleet.play("upgrade.yml", "-e", f"drover_version={BROKEN}", "-e", "drover_gate_s=20")
    assert code != 0
    assert "Unable to restart service drover-agent" in " ".join(text.split())  # systemd itself learns when it is up
    assert fleet.release("head", "agent") == NEW  # the agent next to the collector went back alone
    assert fleet.release("head", "current") == BROKEN
    assert {fleet.release(name) for name in NAMES[1:]} == {NEW}
    wait_until(lambda: fleet.reporting(NEW) == set(NAMES), "all agents are back", REPORT_S)
    saw(f"after the first batch, of head alone: back at {NEW}; the other three were not touched; all four report")


@pytest.mark.timeout(PLAY_S)
def test_an_agent_that_runs_and_does_not_report_goes_back_with_its_settings(fleet: Fleet) -> None:
    inventory = fleet.folder / "inventory.yml"
    before = inventory.read_text()
    wanted = json.loads(before)
    deaf = {"hardware": "none", "dcgm_url": "", "collectors": ["127.0.0.1:1"]}
    wanted["all"]["children"]["drover_agents"]["hosts"]["gpu1"]["drover_agent_settings"] = deaf
    inventory.write_text(json.dumps(wanted))
    options = ["-e", f"drover_version={OLD}", "-e", '{"drover_batches": [2]}', "-e", "drover_gate_s=15"]
    code, text = fleet.play("upgrade.yml", *options, "--tags", "agent", "--limit", "gpu1,gpu2")
    inventory.write_text(before)
    assert code != 0
    assert f"1 of the 2 nodes of this batch did not report to the collector with version {OLD}: gpu1" in " ".join(
        text.split()
    )
    assert fleet.release("gpu1") == fleet.release("gpu2") == NEW  # the batch as a whole
    wait_until(lambda: fleet.reporting(NEW) == set(NAMES), "all agents are back", REPORT_S)
    saw("the gate named gpu1; release and settings of both of the batch went back; all four report")


@pytest.mark.timeout(PLAY_S)
def test_an_agent_that_reports_and_does_not_stay_up_goes_back(fleet: Fleet) -> None:
    host = next(host for host in fleet.hosts if host.name == "gpu2")
    drop_in = host.root / "etc/systemd/system/drover-agent.service.d/test.conf"
    drop_in.parent.mkdir(exist_ok=True)
    drop_in.write_text(f"[Service]\nRuntimeMaxSec={LIVES_S}\n")
    host.ssh("systemctl daemon-reload")
    options = ["-e", f"drover_version={OLD}", "-e", f"drover_hold_s={LIVES_S}"]
    code, text = fleet.play("upgrade.yml", *options, "--tags", "agent", "--limit", "gpu2")
    drop_in.unlink()
    host.ssh("systemctl daemon-reload && systemctl restart drover-agent")
    assert code != 0
    assert f"of gpu2 reported and did not stay up for {LIVES_S} s" in " ".join(text.split())
    assert fleet.release("gpu2") == NEW
    wait_until(lambda: fleet.reporting(NEW) == set(NAMES), "all agents are back", REPORT_S)
    saw("the gate saw another process than the one that had reported; the release went back; all four report")


@pytest.mark.timeout(PLAY_S)
def test_a_collector_that_does_not_start_goes_back_before_any_agent_changes(fleet: Fleet) -> None:
    code, text = fleet.play("upgrade.yml", "-e", f"drover_version={DEAD}", "-e", "drover_start_s=15")
    assert code != 0
    assert "the collector does not listen on 7301" in " ".join(text.split())
    saw("the run ended before any agent had changed")
    assert fleet.release("head", "current") == BROKEN  # whose collector is sound
    assert {fleet.release("head", "agent"), *(fleet.release(name) for name in NAMES[1:])} == {NEW}
    wait_until(lambda: fleet.reporting(NEW) == set(NAMES), "all agents report again", REPORT_S)
    saw(f"the collector of {BROKEN}, which is sound, is back with its store; all four report")


@pytest.mark.timeout(PLAY_S)
def test_rollback_by_hand_and_again(fleet: Fleet) -> None:
    for _ in range(2):  # the second time there is nothing left to do
        code, text = fleet.play("rollback.yml", "--limit", "gpu1,gpu2,gpu3")
        assert code == 0, text[-3000:]
        assert fleet.reporting(OLD) == set(NAMES[1:])
    assert changed(text) == dict.fromkeys(NAMES[1:], 0), text
    since_ms = round(time.time() * 1000)
    wait_until(
        lambda: len(fleet.samples("gpu3", "load1", since_ms, since_ms + 60_000)) > 5,
        "samples of the older agent",
        REPORT_S,
    )


@pytest.mark.timeout(PLAY_S)
def test_certificates_are_renewed_without_a_restart(fleet: Fleet) -> None:
    before = [host.ssh("systemctl", "show", "-P", "MainPID", "drover-agent") for host in fleet.hosts]
    brought = [host for host in fleet.hosts if host.name != ENROLLED]
    serials = [(host.root / "etc/drover/tls/agent.pem").read_bytes() for host in brought]
    code, text = fleet.play("rotate_certificates.yml", "-e", "drover_renew_days=365")
    assert code == 0, text[-3000:]
    after = [(host.root / "etc/drover/tls/agent.pem").read_bytes() for host in brought]
    assert all(old != new for old, new in zip(serials, after, strict=True))
    assert [host.ssh("systemctl", "show", "-P", "MainPID", "drover-agent") for host in fleet.hosts] == before
    wait_until(lambda: len(fleet.drover("nodes")) == len(NAMES), "the console's certificate is taken", REPORT_S)
    saw(f"{len(brought)} agents have new certificates, and the processes of before")


@pytest.mark.timeout(PLAY_S)
def test_removal_leaves_nothing(fleet: Fleet) -> None:
    code, text = fleet.play("remove.yml", "-e", "drover_remove_data=true")
    assert code == 0, text[-3000:]
    for host in fleet.hosts:
        search = "find / -xdev \\( -path /proc -o -path /sys \\) -prune -o -iname '*drover*' -print"
        assert [path for path in host.ssh(search).split() if "drover-test.conf" not in path] == []
        assert "drover" not in host.ssh("cat", "/etc/passwd", "/etc/group")
        assert "drover" not in host.ssh("systemctl", "list-unit-files", "--no-legend")
    saw("no file of that name, user, group or unit is left on any of the four")
