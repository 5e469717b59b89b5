"""`drover doctor` on broken installations: each fault is found, has its state, and says what to do."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from drover_cli.doctor import own, running, schedulers
from drover_cli.doctor.finding import Finding, FindingState, as_text, bad, ok, run_all
from drover_collector.actions.base import AwayError
from drover_collector.config import CollectorConfig, load_config
from drover_core.model.fleet import load_toml
from drover_proto import fleet_pb2 as pb
from testbed.certificates import Files, Fleet
from testbed.doctor_system import NOW_MS, well
from testbed.slurm_stand_in import SlurmStandIn

FLEET = '[[nodes]]\nnames = "n[0-2]"\nrack = "r1"\ngpus = 8\n'


def states(found: list[Finding]) -> list[tuple[FindingState, str]]:
    return [(finding.state, finding.text) for finding in found]


def says(found: list[Finding], state: FindingState, text: str) -> None:
    """One finding is so, and has a remedy unless it is well."""
    fitting = [finding for finding in found if finding.state is state and text in finding.text]
    assert len(fitting) == 1, states(found)
    assert bool(fitting[0].remedy) == (state is not FindingState.OK), fitting


# ---- the machinery


def test_a_check_that_hangs_or_fails_is_a_finding_and_holds_up_no_other() -> None:
    ended = []

    def hangs() -> list[Finding]:
        while not ended:
            time.sleep(0.01)
        return []

    def fails() -> list[Finding]:
        raise ValueError("no such thing")

    found = run_all({"a": hangs, "b": fails, "c": lambda: [ok("c", "well")]}, 0.2)
    ended.append(True)
    assert [(f.name, f.state) for f in found] == [
        ("a", FindingState.BAD),
        ("b", FindingState.UNKNOWN),
        ("c", FindingState.OK),
    ]
    assert "did not return within 0.2 s" in found[0].text
    assert "ValueError: no such thing" in found[1].text
    text = as_text([bad("x", "broken", "mend it"), ok("longer", "well")])
    assert text == "bad      x       broken\n                 -> mend it\nok       longer  well\n\n1 ok, 1 bad"


# ---- by settings


@pytest.fixture
def made(tmp_path: Path) -> Callable[..., CollectorConfig]:
    """Settings out of TOML; `fleet` is that of three nodes unless given."""

    def make(text: str = "", fleet: str = FLEET) -> CollectorConfig:
        (tmp_path / "fleet.toml").write_text(fleet)
        store = (
            "" if "[store]" in text else f'[store]\nurl = "chdb://{tmp_path}/store"\nbackup_folder = "{tmp_path}/b"\n'
        )
        path = tmp_path / "collector.toml"
        path.write_text(f'fleet = "{tmp_path}/fleet.toml"\n{store}{text}')
        return load_config(path)

    return make


def test_fleets(made: Callable[..., CollectorConfig]) -> None:
    says(own.fleet(made()), FindingState.OK, "3 nodes, 24 GPUs")
    says(own.fleet(made(fleet='[[nodes]]\nnames = "n[0-1]"\ngpus = 8\n')), FindingState.WARN, "2 nodes have no rack")
    says(own.fleet(made(fleet="[[nodes]]\nnames = 7\n")), FindingState.BAD, "fleet.toml")


def test_enforcement_is_explained(made: Callable[..., CollectorConfig], tmp_path: Path) -> None:
    says(
        own.enforcement(made()),
        FindingState.OK,
        "observe: decides and notifies, touches nothing (the policy nvidia says observe",
    )
    policy = tmp_path / "policy.toml"
    policy.write_text('name = "ours"\nmode = "enforce"\n[[rules]]\nname = "a"\nkind = ["xid"]\naction = "drain"\n')
    config = made(f'[policy]\npath = "{policy}"\n')
    says(
        own.enforcement(config),
        FindingState.WARN,
        "observe: decides and notifies, touches nothing (the policy ours says enforce",
    )
    policy.write_text("mode = 7\n")
    says(own.enforcement(config), FindingState.BAD, "policy.toml")


def test_certificates(made: Callable[..., CollectorConfig], tmp_path: Path) -> None:
    says(own.certificates(made()), FindingState.WARN, "plain connections on loopback")
    authority = Fleet(tmp_path / "ca")

    def of(files: Files) -> list[Finding]:
        return own.certificates(made(files.toml))

    says(of(authority.issue("collector", "c1")), FindingState.OK, "the collector's until 20")
    says(of(authority.issue("collector", "c1", ends_in=timedelta(days=5))), FindingState.WARN, "ends in")
    says(of(authority.issue("collector", "c1", ends_in=timedelta(hours=3))), FindingState.BAD, "ends")
    says(of(authority.issue("collector", "c1", ends_in=timedelta(days=-1))), FindingState.BAD, "ended")
    says(of(authority.issue("agent", "n0")), FindingState.BAD, "is for drover://agent/n0, and no collector's")
    open_key = authority.issue("collector", "c1")
    open_key.key.chmod(0o644)
    says(of(open_key), FindingState.BAD, "is open to every user of this machine")
    one, other = authority.issue("collector", "c1"), authority.issue("collector", "c1")
    one.key.write_bytes(other.key.read_bytes())
    says(of(one), FindingState.BAD, "does not belong to")


def test_secrets(made: Callable[..., CollectorConfig], tmp_path: Path) -> None:
    secret, address = tmp_path / "secret", tmp_path / "url"
    secret.write_text("whsec_" + "QUFB" * 8)
    address.write_text("https://hc.example/x")
    for path in (secret, address):
        path.chmod(0o600)
    config = made(
        f'[heartbeat]\nurl_file = "{address}"\n'
        f'[[notify.webhook]]\nname = "ops"\nurl = "http://127.0.0.1:9/"\nsecret_file = "{secret}"\n'
    )
    says(own.secrets(config), FindingState.OK, "2 files, none open to everyone")
    secret.chmod(0o664)
    address.chmod(0o620)
    found = own.secrets(config)
    says(found, FindingState.BAD, f"notify.webhook[0].secret_file: {secret} is open to every user")
    says(found, FindingState.WARN, f"heartbeat.url_file: {address} can be written by its group")
    secret.unlink()
    says(own.secrets(config), FindingState.BAD, "No such file")
    assert "QUFB" not in str(found)


def test_ports(made: Callable[..., CollectorConfig]) -> None:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        port = listening.getsockname()[1]
        config = made(
            f'[ingest]\nlisten = "127.0.0.1:{port}"\n[api]\nlisten = "127.0.0.1:1"\n'
            f'[console]\nurl = "http://127.0.0.1:1"\n'
        )
        found = own.ports(config)
    says(found, FindingState.OK, f"ingest.listen 127.0.0.1:{port} answers; it can be reached from this machine only")
    says(found, FindingState.BAD, "api.listen 127.0.0.1:1: Connection refused")
    says(found, FindingState.WARN, "metrics.listen is empty: nothing watches Drover itself")
    says(found, FindingState.WARN, "console.url http://127.0.0.1:1: Connection refused")


def test_store_and_backups(made: Callable[..., CollectorConfig], tmp_path: Path) -> None:
    config = made()
    says(own.store(config), FindingState.WARN, "is not there yet")
    says(own.backups(config), FindingState.WARN, "none in")
    store, copies = tmp_path / "store", tmp_path / "b"
    store.mkdir(mode=0o750)
    copies.mkdir()
    (copies / "monday").mkdir()
    says(own.store(config), FindingState.OK, "GB free")
    says(own.backups(config), FindingState.OK, "0.0 days old")
    os.utime(copies / "monday", (0, time.time() - 20 * 86_400))
    says(own.backups(config), FindingState.WARN, "20 days old")
    store.chmod(0o755)
    says(own.store(config), FindingState.WARN, "can be read by every user of this machine")
    store.chmod(0o750)
    much = made(f'[store]\nurl = "chdb://{store}"\nkeep_free_bytes = {1 << 59}\n')
    says(own.store(much), FindingState.WARN, "to be kept free")
    says(own.store(made('[store]\nurl = "clickhouse://u@h/drover"\n')), FindingState.UNKNOWN, "a server's")


def test_who_is_notified(made: Callable[..., CollectorConfig], tmp_path: Path) -> None:
    found = own.notifications(made())
    says(found, FindingState.WARN, "none: nobody is notified of incidents")
    says(found, FindingState.WARN, "none: nobody notices when Drover itself dies")
    secret = tmp_path / "url"
    secret.write_text("https://hc.example/x")
    secret.chmod(0o600)
    says(own.notifications(made(f'[heartbeat]\nurl_file = "{secret}"\n')), FindingState.OK, "a sign of life each 60 s")


# ---- schedulers, asked and not changed


def test_slurm(made: Callable[..., CollectorConfig], tmp_path: Path) -> None:
    config = made('[act.slurm]\nenabled = true\n[act]\nmode = "enforce"\n')
    spec, stand_in = load_toml(tmp_path / "fleet.toml"), SlurmStandIn("n0", "n1")
    found = schedulers.slurm(config, spec, stand_in)
    says(found, FindingState.OK, "knows 2 of 3 nodes")
    says(found, FindingState.WARN, "does not know n2: they cannot be drained")
    assert [f.state for f in found if f.name == "slurm rights"] == [FindingState.UNKNOWN]
    assert stand_in.effects == []
    says(schedulers.slurm(config, spec, SlurmStandIn("other")), FindingState.BAD, "knows none of the 3 nodes")
    stand_in.away = True
    says(schedulers.slurm(config, spec, stand_in), FindingState.BAD, "Unable to contact slurm controller")


class Api:
    """Rights as an API server reports them."""

    def __init__(self, *refused: str) -> None:
        self.refused, self.away, self.taints = refused, False, True

    def statuses(self) -> dict[str, str]:
        if self.away:
            raise AwayError("Kubernetes does not answer at https://k: refused")
        return {"n0": "Ready"}

    def may(self, verb: str, resource: str, part: str, group: str = "") -> bool:
        return f"{verb} {group}/{resource}/{part}".strip("/").replace(" /", " ") not in self.refused

    def read(self, path: str) -> dict[str, Any] | None:
        served = path == "/apis/resource.k8s.io/v1beta2" and self.taints
        return {"resources": [{"name": "devicetaintrules"}]} if served else None


def test_kubernetes() -> None:
    config = CollectorConfig()
    found = schedulers.kubernetes(config, Api())
    assert [(f.name, f.state) for f in found] == [
        (name, FindingState.OK) for name in ("kubernetes", "kubernetes rights", "kubernetes owners")
    ]
    found = schedulers.kubernetes(config, Api("patch nodes", "create pods/eviction"))
    says(found, FindingState.BAD, "this token may not patch nodes")
    says(found, FindingState.WARN, "this token may not create pods/eviction")
    away = Api()
    away.away = True
    says(schedulers.kubernetes(config, away), FindingState.BAD, "does not answer")
    lacks = schedulers.kubernetes(config, Api("get jobset.x-k8s.io/jobsets", "get pods"))
    says(lacks, FindingState.WARN, "this token may not get pods, get jobsets: what made the pods")


def test_rights_for_single_gpus_are_looked_at_where_a_rule_wants_them(tmp_path: Path) -> None:
    path = tmp_path / "policy.toml"
    path.write_text('[[rules]]\nname = "memory"\nkind = ["memory"]\naction = "drain"\ntake_out = "gpu"\n')
    config = replace(CollectorConfig(), policy=replace(CollectorConfig().policy, path=str(path)))
    api = Api()
    assert {f.state for f in schedulers.kubernetes(config, api)} == {FindingState.OK}
    assert "kubernetes GPUs" in {f.name for f in schedulers.kubernetes(config, api)}
    lacks = schedulers.kubernetes(config, Api("patch resource.k8s.io/devicetaintrules"))
    says(lacks, FindingState.WARN, 'may not patch devicetaintrules: rules with take_out = "gpu" take the node')
    assert "deploy/kubernetes/access" in next(f.remedy for f in lacks if f.name == "kubernetes GPUs")
    api.taints = False
    says(schedulers.kubernetes(config, api), FindingState.WARN, "serves no DeviceTaintRule")


def released() -> pb.System:
    system = well()
    system.version, system.agents.versions[0].version = "1.4.2", "1.4.0"
    return system


def test_a_collector_that_is_well() -> None:
    found = running.findings(pb.Status(), well())
    assert {f.state for f in found} == {FindingState.OK}
    assert [f.state for f in running.agent_versions(released())] == [FindingState.OK]


def change(**parts: dict[str, Any]) -> pb.System:
    system = released()
    for part, fields in parts.items():
        if part == "system":
            system.MergeFrom(pb.System(**fields))
            continue
        for name, value in fields.items():
            target = getattr(system, part)
            if isinstance(value, (list, dict)):
                target.ClearField(name)
                target.MergeFrom(type(target)(**{name: value}))
            else:
                setattr(target, name, value)
    return system


def trouble(kind: str, text: str) -> dict[str, Any]:
    return {"trouble_counts": {kind: 6}, "troubles": [pb.AgentTrouble(node="n7", kind=kind, text=text)]}


@pytest.mark.parametrize(
    ("check", "system", "state", "text"),
    [
        (running.version, change(), FindingState.WARN, "the collector runs 1.4.2"),
        (
            running.detection,
            change(detection={"newest_tick_ms": NOW_MS - 200_000}),
            FindingState.BAD,
            "nothing was judged",
        ),
        (running.detection, change(detection={"tick_s": 9.5}), FindingState.WARN, "a tick takes 9.5 of 10 s"),
        (running.detection, change(detection={"skipped": 4}), FindingState.WARN, "4 buckets were left out"),
        (running.detection, change(detection={"failures": 2}), FindingState.BAD, "judging failed 2 times"),
        (
            running.detection,
            change(detection={"detectors": [pb.DetectorState(name="xid", failures=3, newest_failure="KeyError")]}),
            FindingState.BAD,
            "detector xid failed 3 times: KeyError",
        ),
        (running.agents, change(agents={"reporting": 4}), FindingState.BAD, "4 of 10 nodes report"),
        (running.agents, change(agents=trouble("silent", "nothing came")), FindingState.WARN, "n7 and 2 more: nothing"),
        (
            running.agents,
            change(agents=trouble("refused", "another's GPU")),
            FindingState.BAD,
            "n7 and 2 more: another",
        ),
        (running.agents, change(agents=trouble("clock", "differs by +7 s")), FindingState.WARN, "differs by +7 s"),
        (running.agents, change(agents=trouble("source", "2 of its sources")), FindingState.WARN, "2 of its sources"),
        (
            running.agent_versions,
            change(agents={"versions": [pb.AgentVersion(version="1.3.9", nodes=4)]}),
            FindingState.WARN,
            "4 agents run 1.3.9, the collector 1.4.2",
        ),
        (
            running.agent_versions,
            change(agents={"versions": [pb.AgentVersion(version="1.2.0", nodes=4)]}),
            FindingState.BAD,
            "too far apart",
        ),
        (
            running.agent_versions,
            change(agents={"versions": [pb.AgentVersion(version="a1", nodes=1)]}),
            FindingState.UNKNOWN,
            "which is no release",
        ),
        (
            running.agent_versions,
            change(agents={"versions": [pb.AgentVersion(nodes=2), pb.AgentVersion(version="1.4.0", nodes=8)]}),
            FindingState.OK,
            "all run 1.4.0; of 2 nodes it is not known",
        ),
        (
            running.agent_versions,
            change(agents={"versions": [pb.AgentVersion(nodes=2)]}),
            FindingState.UNKNOWN,
            "not known of 2 nodes",
        ),
        (running.lag, change(agents={"lag_median_s": 90.0}), FindingState.BAD, "90.0 s old in the median"),
        (
            running.lag,
            change(ingest={"waiting_bytes": 90_000_000, "waiting_limit_bytes": 100_000_000}),
            FindingState.WARN,
            "90.0 MB wait for the store",
        ),
        (running.store, change(store={"answers": False}), FindingState.BAD, "the store does not answer"),
        (running.store, change(store={"damaged_parts": 2}), FindingState.BAD, "2 parts are damaged"),
        (running.store, change(store={"days_left": 3.0}), FindingState.WARN, "the disk is full in 3.0 d"),
        (running.store, change(store={"dropped_bytes": 5_000_000}), FindingState.WARN, "5.0 MB were deleted for room"),
        (
            running.store,
            change(store={"rollup_oldest_s": 7200.0}),
            FindingState.WARN,
            "rollups of late data wait for 2.0 h",
        ),
        (
            running.notifiers,
            change(system={"notifiers": [pb.NotifierState(name="page", pending=2, oldest_s=400, trouble="refused")]}),
            FindingState.BAD,
            "page (): 2 messages wait, the oldest for 7 min; refused",
        ),
        (
            running.notifiers,
            change(system={"notifiers": [pb.NotifierState(name="page", given_up=1)]}),
            FindingState.WARN,
            "1 messages were given up",
        ),
        (running.refusals, change(ingest={"calls_refused": {"denied": 3}}), FindingState.WARN, "denied 3"),
        (
            running.certificate,
            change(system={"certificate_ends_ms": NOW_MS + 3_600_000}),
            FindingState.BAD,
            "ends in 60 min",
        ),
        (running.certificate, change(system={"certificate_ends_ms": NOW_MS - 1}), FindingState.BAD, "has ended"),
        (
            running.certificate,
            change(system={"certificate_ends_ms": NOW_MS + 86_400_000 * 9}),
            FindingState.WARN,
            "in 9.0 d",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_wrong_with_a_running_one(
    check: Callable[[pb.System], list[Finding]], system: pb.System, state: FindingState, text: str
) -> None:
    says(check(system), state, text)


def test_its_own_words() -> None:
    blind = "Drover is blind: nothing was judged for 500 s."
    status = pb.Status(troubles=[blind, "A disk\x1b[2J is slow."], blind=[blind])
    found = running.findings(status, well())
    says(found, FindingState.BAD, "Drover is blind: nothing was judged")
    says(found, FindingState.WARN, "A disk [2J is slow.")
    assert sum("blind" in f.text for f in found) == 1
    standby = well()
    standby.detection.role, standby.detection.newest_tick_ms = "standby", 0
    says(running.detection(standby), FindingState.OK, "this collector's part is standby")
