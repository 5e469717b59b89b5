"""From an XID to a page: a real collector, Prometheus with the rules that we ship, and a real Alertmanager."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
import urllib3

from drover_proto import telemetry_pb2 as pb
from testbed.fleets import hello
from testbed.ingest import event
from testbed.system_processes import free_port, running
from testbed.waiting import wait_until

RULES = Path(__file__).resolve().parents[2] / "docs" / "monitoring" / "drover.rules.yml"
METHOD = "/drover.telemetry.v1.Telemetry/Stream"


@contextmanager
def program(folder: Path, *command: str) -> Iterator[None]:
    log = folder / f"{command[0]}.log"
    with log.open("w") as output:
        child = subprocess.Popen(command, stdout=output, stderr=output)
        try:
            yield
        finally:
            child.terminate()
            child.wait(120)


def get(port: int, path: str) -> Any:
    """The JSON at a path, None while nobody answers."""
    try:
        answer = urllib3.request("GET", f"http://127.0.0.1:{port}{path}", timeout=120, retries=False)
    except urllib3.exceptions.HTTPError:
        return None
    return json.loads(answer.data) if answer.status == 200 else None


def send_xid(address: str) -> None:
    """An agent of node n0 that reports a GPU fallen off the bus, and waits until that is stored."""
    now_ms = time.time_ns() // 1_000_000
    messages = [
        pb.AgentMessage(hello=hello("n0")),
        pb.AgentMessage(record=event(1, now_ms, gpu=0)),
    ]
    with grpc.insecure_channel(address) as channel:
        stream = channel.stream_stream(METHOD, response_deserializer=pb.CollectorMessage.FromString)
        call = stream(iter([message.SerializeToString() for message in messages]), timeout=120)
        held = [lane.seq for message in call for lane in message.ack.held if lane.lane == pb.EVENTS]
        assert max(held) == 1


def alerts(port: int) -> dict[str, dict[str, Any]]:
    return {alert["labels"]["alertname"]: alert for alert in get(port, "/api/v2/alerts") or ()}


@pytest.mark.system
def test_an_incident_burns_in_prometheus_and_reaches_the_alertmanager(tmp_path: Path) -> None:
    agents, api, page, prometheus, manager = (free_port() for _ in range(5))
    (tmp_path / "fleet.toml").write_text('[[nodes]]\nnames = "n[0-3]"\nsku = "H100-SXM"\ngpus = 4\n')
    (tmp_path / "collector.toml").write_text(
        f'fleet = "{tmp_path}/fleet.toml"\n[store]\nurl = "chdb://{tmp_path}/store"\n'
        f'[ingest]\nlisten = "127.0.0.1:{agents}"\n[api]\nlisten = "127.0.0.1:{api}"\n'
        f'[metrics]\nlisten = "127.0.0.1:{page}"\n'
    )
    (tmp_path / "prometheus.yml").write_text(
        "global: {scrape_interval: 1s, evaluation_interval: 1s}\n"
        f"rule_files: ['{RULES}']\n"
        f"scrape_configs: [{{job_name: drover, static_configs: [{{targets: ['127.0.0.1:{page}']}}]}}]\n"
        f"alerting: {{alertmanagers: [{{static_configs: [{{targets: ['127.0.0.1:{manager}']}}]}}]}}\n"
    )
    (tmp_path / "alertmanager.yml").write_text("route: {receiver: nobody}\nreceivers: [{name: nobody}]\n")
    with (
        running(tmp_path, "drover_collector.main", "run", "--config", str(tmp_path / "collector.toml")),
        program(
            tmp_path, "prometheus", f"--config.file={tmp_path}/prometheus.yml", f"--storage.tsdb.path={tmp_path}/tsdb",
            f"--web.listen-address=127.0.0.1:{prometheus}",
        ),
        program(
            tmp_path, "prometheus-alertmanager", f"--config.file={tmp_path}/alertmanager.yml",
            f"--storage.path={tmp_path}/am", f"--web.listen-address=127.0.0.1:{manager}", "--cluster.listen-address=",
        ),
    ):  # fmt: skip

        def up() -> bool:
            found = get(prometheus, "/api/v1/targets?state=active")
            return bool(found) and [t["health"] for t in found["data"]["activeTargets"]] == ["up"]

        wait_until(up, "Prometheus scrapes the collector")
        groups = get(prometheus, "/api/v1/rules")["data"]["groups"]
        assert {group["name"] for group in groups} == {"drover", "drover-fleet", "drover-slo"}
        text = RULES.read_text("utf-8")
        assert sum(len(group["rules"]) for group in groups) == text.count("- alert:") + text.count("- record:")
        assert "DroverCriticalIncident" not in alerts(manager)
        send_xid(f"127.0.0.1:{agents}")
        wait_until(lambda: "DroverCriticalIncident" in alerts(manager), "the alert reaches the Alertmanager")
        alert = alerts(manager)["DroverCriticalIncident"]
        assert alert["labels"]["severity"] == "critical"
        assert alert["annotations"]["summary"] == "Critical incidents open: 1"

        def evaluated() -> bool:
            found = get(prometheus, "/api/v1/rules")
            rules = [rule for group in found["data"]["groups"] for rule in group["rules"]]
            return all(rule["health"] == "ok" for rule in rules)

        wait_until(evaluated, "every rule is evaluated without an error")
