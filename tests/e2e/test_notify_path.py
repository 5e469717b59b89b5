"""From an agent's event to people: a collector process with a receiver of each kind; two of them hang."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import grpc

from drover_proto import telemetry_pb2 as wire
from drover_proto.telemetry_pb2_grpc import TelemetryStub
from testbed.receivers import Reply, http_receiver, mail_server
from testbed.system_processes import collector
from testbed.waiting import wait_until

FLEET = 'name = "t"\n[[nodes]]\nnames = "n[1-4]"\nrack = "r1"\npool = "train"\ngpus = 2\n'
KEY = "R0SECRETKEY" + "0" * 21


def send_xid(address: str, node: str) -> None:
    """Returns when it is acknowledged."""
    done = threading.Event()
    now_ms = time.time_ns() // 1_000_000
    event = wire.Event(ts_ms=now_ms, gpu=1, kind="xid", code="79", message="it fell off the bus", source="nvml")

    def up() -> Iterator[wire.AgentMessage]:
        hello = wire.Hello(node=node, spool_id="s1", boot_id="b1", protocol=1, ts_ms=now_ms, agent_version="0")
        yield wire.AgentMessage(hello=hello)
        yield wire.AgentMessage(record=wire.Record(seq=1, event=event))
        done.wait(120)

    with grpc.insecure_channel(address) as channel:
        for message in TelemetryStub(channel).Stream(up(), timeout=120):
            held = {s.lane: s.seq for s in (*message.welcome.held, *message.ack.held)}
            if held.get(wire.EVENTS) == 1:
                done.set()
                return


def test_everybody_is_notified_though_two_receivers_hang_and_the_stop_is_not_held_up(tmp_path: Path) -> None:
    with http_receiver() as hung, http_receiver() as chat, http_receiver() as pager, http_receiver() as am, \
            mail_server() as box:  # fmt: skip
        hung.usual, am.usual, pager.usual = Reply(how="hang"), Reply(200, b"[]"), Reply(202)
        secrets = {
            "hung": f"{hung.url}/S3CR3T", "hung2": f"json://127.0.0.1:{hung.port}/S3CR3T", "chat": f"{chat.url}/S3CR3T",
            "pager": KEY, "mail": f"mailto://127.0.0.1:{box.port}?mode=insecure&from=a@example.org&to=ops@example.org",
        }  # fmt: skip
        for name, secret in secrets.items():
            (tmp_path / name).write_text(secret)
            (tmp_path / name).chmod(0o600)
        settings = "\n".join([
            *(f'[[notify.{kind}]]\nname = "{name}"\n{key}_file = "{tmp_path}/{name}"\ntimeout_s = 60'
              for kind, name, key in (("slack", "hung", "url"), ("apprise", "hung2", "url"), ("slack", "chat", "url"),
                                      ("apprise", "mail", "url"))),
            f'[[notify.pagerduty]]\nname = "pager"\nrouting_key_file = "{tmp_path}/pager"\nurl = "{pager.url}"',
            f'[[notify.alertmanager]]\nname = "am"\nurls = ["{am.url}"]',
        ])  # fmt: skip
        with collector(tmp_path, FLEET, settings) as running:
            send_xid(running.agents, "n2")
            wait_until(lambda: len(hung.got) == 2, "both that hang are asked")
            wait_until(lambda: chat.got and pager.got and len(am.got) > 1 and box.mails, "the others are notified")
            log = (tmp_path / "drover_collector.main.log").read_text()
        assert "on GPU 1 of node n2" in chat.got[0].json["text"]
        assert pager.got[0].json["payload"]["source"] == "n2"
        labels = am.got[1].json[0]["labels"]
        assert (labels["alertname"], labels["node"], labels["rack"], labels["pool"]) == (
            "DroverXid",
            "n2",
            "r1",
            "train",
        )
        assert "on GPU 1 of node n2" in box.mails[0][1]["subject"]
        log += (tmp_path / "drover_collector.main.log").read_text()
        assert "stopped" in log, "it ended by itself, before testbed's limit and its own"
        assert "leaving as I am" not in log
        assert "S3CR3T" not in log
        assert KEY not in log
