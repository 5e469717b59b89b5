"""Four machines for the playbooks, and releases to put on them."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import grpc
import numpy as np

from drover_proto import fleet_pb2 as pb
from drover_proto.fleet_pb2_grpc import FleetStub
from testbed.hosts import Host
from testbed.rollout_log import saw

ROOT = Path(__file__).resolve().parents[2]
OLD, NEW, BROKEN, DEAD = "0.9.1", "0.9.2", "0.9.3", "0.9.4"  # BROKEN: its agent does not start; DEAD: its collector
OLD_COMMIT = "0e4187e"  # OLD is really older: 0.1.0, before the packages moved; raise it with each release
NAMES = ("head", "gpu1", "gpu2", "gpu3")
ENROLLED = "gpu3"  # gets its certificate by a one-time token, for a key of its own
PLAY_S, BUILD_S, REPORT_S = 1200, 600, 90
LIVES_S = 20  # an agent that ends after so long, as a defect might have it
GAP_MS, RESTART_MS = 2_500, 20_000  # samples come each second; how long an agent may be away for its restart
DEFECT = 'raise SystemExit("a release that cannot start, for tests")\n'


@dataclass(frozen=True, slots=True)
class Fleet:
    folder: Path
    hosts: list[Host]

    @property
    def head(self) -> Host:
        return self.hosts[0]

    def play(self, book: str, *options: str) -> tuple[int, str]:
        """(exit code, what it printed)"""
        command = [str(Path(sys.executable).parent / "ansible-playbook"), "-i", str(self.folder / "inventory.yml")]
        environment = os.environ | {"ANSIBLE_CONFIG": str(ROOT / "ansible/ansible.cfg"), "ANSIBLE_NOCOLOR": "1"}
        path = self.folder / "rollout.log"
        with path.open("a") as log:
            log.write(f"$ ansible-playbook {book} {' '.join(options)}\n")
            log.flush()
            began, at = time.monotonic(), log.tell()
            code = subprocess.run(
                [*command, str(ROOT / "ansible" / book), *options],
                env=environment, stdout=log, stderr=subprocess.STDOUT, timeout=PLAY_S, check=False,
            ).returncode  # fmt: skip
            text = path.read_text()[at:]
            took_s = time.monotonic() - began
            log.write(f"exit code {code} after {took_s:.0f} s\n\n")
        said = " ".join(["ansible-playbook", book, *options]).replace(str(self.folder), "")
        saw(f"`{said}`: exit code {code} after {took_s:.0f} s; {recap(text)}")
        return code, text

    def drover(self, *args: str) -> list[dict[str, object]]:
        tls = [f"--{what}=/etc/drover/tls/{name}" for what, name in TLS.items()]
        command = ["/opt/drover/bin/drover", *args, "--json", "--collector=localhost:7302", *tls]
        return [json.loads(line) for line in self.head.ssh(*command).splitlines()]

    def samples(self, node: str, metric: str, from_ms: int, to_ms: int) -> list[tuple[int, float]]:
        """(time in ms, value) of a node's samples in the store, as they were taken."""
        authority = self.folder / "authority"
        credentials = grpc.ssl_channel_credentials(
            *(
                authority.joinpath(name).read_bytes()
                for name in ("ca.pem", "operator/console.key", "operator/console.pem")
            )
        )
        with grpc.secure_channel("localhost:7302", credentials) as channel:
            return samples(channel, node, metric, from_ms, to_ms)

    def unread(self, node: str, from_ms: int, to_ms: int) -> int:
        """Samples that the agent itself did not take: it got no CPU for a tick, or a reading failed."""
        return unread(lambda metric, since_ms: self.samples(node, metric, since_ms, to_ms), from_ms)

    def release(self, name: str, link: str = "current") -> str:
        """Version that a link of this host names."""
        root = next(host.root for host in self.hosts if host.name == name)
        return (root / "opt/drover" / link).readlink().name

    def reporting(self, version: str) -> set[str]:
        """Nodes whose agents of this version report now."""
        since_ms = time.time() * 1000 - 15_000
        return {
            str(row["name"]) for row in self.drover("nodes")
            if row["agent_version"] == version and int(str(row["last_seen_ms"])) > since_ms
        }  # fmt: skip


def samples(channel: grpc.Channel, node: str, metric: str, from_ms: int, to_ms: int) -> list[tuple[int, float]]:
    """(time in ms, value) of a node's samples in the store, as they were taken."""
    request = pb.SeriesRequest(
        scope="node", targets=[pb.SeriesTarget(node=node)], metrics=[metric], from_ms=from_ms, to_ms=to_ms,
        max_points=100_000,
    )  # fmt: skip
    reply = FleetStub(channel).QuerySeries(request, timeout=30)
    if not reply.series:
        return []
    assert reply.step_ms <= 1000
    values = np.frombuffer(reply.series[0].values, "<f4")
    return [
        (int(ts), float(value)) for ts, value in zip(np.frombuffer(reply.ts_ms, "<i8"), values, strict=True)
        if not np.isnan(value)
    ]  # fmt: skip


def unread(read: Callable[[str, int], list[tuple[int, float]]], from_ms: int) -> int:
    """Samples that an agent itself did not take; `read` gives those of a metric since a time."""
    total = 0.0
    for metric in ("agent_missed_ticks", "agent_read_failures"):
        values = [value for _, value in read(metric, from_ms - 60_000)]
        total += sum(max(0.0, b - a) if b >= a else b for a, b in itertools.pairwise(values))
    return round(total)


TLS = {"ca": "ca.pem", "cert": "console.pem", "key": "console.key"}


def changed(text: str) -> dict[str, int]:
    """Host -> how many tasks changed something."""
    return {name: int(n) for name, n in re.findall(r"^(\S+)\s+: ok=\d+\s+changed=(\d+)", text, re.MULTILINE)}


def recap(text: str) -> str:
    """How a play ended on each host, without what is 0 but for `changed`."""
    ends = []
    for name, line in re.findall(r"^(\S+)\s+: (ok=\d+.*)$", text, re.MULTILINE):
        counts = [f"{what}={n}" for what, n in re.findall(r"(\w+)=(\d+)", line) if n != "0" or what == "changed"]
        ends.append(f"{name} {' '.join(counts)}")
    return ", ".join(ends)


def build(out: Path, version: str, source: Path = ROOT, *more: str) -> None:
    command = [sys.executable, str(source / "ansible/dist.py"), "--python", "3.11", "--version", version, *more]
    subprocess.run([*command, "--out", str(out)], check=True, timeout=BUILD_S, stdout=subprocess.DEVNULL)


def older(folder: Path) -> Path:
    """The tree of an earlier commit, which packs itself."""
    tree = folder / "older"
    command = ["git", "-C", str(ROOT), "archive", "--format=tar", OLD_COMMIT]
    tree.mkdir()
    packed = subprocess.run(command, check=True, capture_output=True)  # needs the history: not in a shallow clone
    subprocess.run(["tar", "-x", "-C", str(tree)], check=True, input=packed.stdout)
    subprocess.run(["git", "init", "-q", str(tree)], check=True)
    subprocess.run(["git", "-C", str(tree), "add", "--all"], check=True)
    return tree


def broken(folder: Path, program: str) -> Path:
    """A copy of this tree in which one program ends as soon as it is started."""
    copy = folder / program.partition("/")[0]
    listed = subprocess.run(["git", "-C", str(ROOT), "ls-files", "-z"], check=True, capture_output=True, text=True)
    for name in filter(None, listed.stdout.split("\0")):
        needless = name.startswith(("tests/", "docs/", "benchmarks/")) and not name.startswith("docs/runbooks/")
        if (ROOT / name).is_file() and not needless:
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, copy / name)
    subprocess.run(["git", "init", "-q", str(copy)], check=True)
    subprocess.run(["git", "-C", str(copy), "add", "--all"], check=True)
    main = copy / program
    main.write_text(main.read_text().replace("from __future__ import annotations\n", DEFECT, 1))
    return copy
