"""A real collector in enforce mode that is killed with -9 at a point of an action's life, and started again."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import grpc

from drover_proto import fleet_pb2 as pb
from drover_proto import telemetry_pb2
from drover_proto.fleet_pb2_grpc import FleetStub
from testbed.acting import POLICY
from testbed.fleets import hello
from testbed.ingest import Agent, event
from testbed.system_processes import SOON, free_port
from testbed.waiting import wait_until

CALL_S = 120.0
START_S = 300.0
TESTS = Path(__file__).parents[1]
# What a node's pool makes of XID 79 on it; a pool of another name: nothing.
RULES = "".join(
    f'[[rules]]\nname = "{act}"\nkind = ["xid"]\npool = ["{act}"]\naction = "{act}"\n'
    for act in ("drain", "isolate", "advise")
)


class Killed:
    """One collector after another on one store. `at` is the file that says where the next dies."""

    def __init__(self, folder: Path, nodes: dict[str, str], settings: str) -> None:
        """`nodes`: name -> pool; `settings`: the tables of its actuators."""
        self.folder, self.at = folder, folder / "kill_at"
        self.log = folder / "collector.log"
        self.agents, self.api = (f"127.0.0.1:{free_port()}" for _ in range(2))
        self.starts = 0
        spec = "".join(f'[[nodes]]\nnames = "{n}"\nrack = "r"\npool = "{p}"\ngpus = 4\n' for n, p in nodes.items())
        (folder / "fleet.toml").write_text(spec)
        (folder / "policy.toml").write_text(POLICY.partition("[[rules]]")[0] + RULES)
        (folder / "collector.toml").write_text(
            f'fleet = "{folder}/fleet.toml"\n[store]\nurl = "chdb://{folder}/store"\n'
            f'[ingest]\nlisten = "{self.agents}"\n[api]\nlisten = "{self.api}"\n'
            f'[policy]\npath = "{folder}/policy.toml"\n[act]\nmode = "enforce"\nvalidate = false\n{settings}'
        )

    def __enter__(self) -> Killed:
        with ExitStack() as stack:
            output = stack.enter_context(self.log.open("w"))
            path = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
            words = [sys.executable, "-m", "testbed.killed_collector", "run", "--config"]
            self._maker = subprocess.Popen(
                [*words, str(self.folder / "collector.toml")], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=output, env={**os.environ, "PYTHONPATH": path, "KILL_AT": str(self.at)}, text=True,
            )  # fmt: skip
            stack.callback(self._end)
            self.start()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def start(self) -> None:
        """Returns when it acts."""
        self.starts += 1
        assert self._maker.stdin is not None
        print("start", file=self._maker.stdin, flush=True)
        self.child = int(self._said(START_S))
        self.channel = grpc.insecure_channel(self.api, SOON)
        self.stub = FleetStub(self.channel)
        self.stub.GetStatus(pb.StatusRequest(), timeout=START_S, wait_for_ready=True)
        wait_until(self._acts, "the collector acts", START_S)

    def _end(self) -> None:
        self.channel.close()
        assert self._maker.stdin is not None
        self._maker.stdin.close()
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.child, signal.SIGKILL)
        self._maker.wait(CALL_S)

    def _said(self, limit_s: float) -> str:
        """The next line of who starts them."""
        assert self._maker.stdout is not None
        ready, _, _ = select.select([self._maker.stdout], [], [], limit_s)
        line = self._maker.stdout.readline() if ready else ""
        assert line, f"no collector has ended or begun within {limit_s:g} s\n{self.log.read_text()[-3000:]}"
        return line

    def _acts(self) -> bool:
        try:
            return self.stub.GetStatus(pb.StatusRequest(), timeout=10).role == "active"
        except grpc.RpcError:
            return False

    def dies(self, at: str, work: Callable[[], object]) -> None:
        """Killed at this point of what `work` begins."""
        self.at.write_text(at)
        try:
            work()
        except grpc.RpcError as error:  # it died while it was asked
            assert error.code() is grpc.StatusCode.UNAVAILABLE, error
        assert int(self._said(CALL_S)) == -signal.SIGKILL, f"{at}: {self.log.read_text()[-3000:]}"
        self.at.unlink()
        self.channel.close()

    def ask(self, act: str, node: str) -> pb.ActReply:
        """By hand."""
        return self.stub.ActOnNode(pb.ActRequest(node=node, act=act, why="by hand", force=True), timeout=CALL_S)

    def fault(self, node: str) -> None:
        """XID 79, as its agent sends it."""
        asyncio.run(self._send(node))

    async def _send(self, node: str) -> None:
        now_ms = time.time_ns() // 1_000_000
        async with grpc.aio.insecure_channel(self.agents, SOON) as channel:
            method = "/drover.telemetry.v1.Telemetry/Stream"
            call = channel.stream_stream(method, response_deserializer=telemetry_pb2.CollectorMessage.FromString)()
            agent = Agent(call)
            await agent.send(hello=hello(node, f"spool-{node}", ts_ms=now_ms))
            await agent.read("welcome")
            await agent.send(record=event(1, now_ms, gpu=0))
            with contextlib.suppress(AssertionError):  # the stream's end: it was killed
                await agent.until_held(telemetry_pb2.EVENTS, 1)

    def actions(self, node: str, act: str) -> list[pb.ActionLine]:
        found = self.stub.ListActions(pb.ActionsRequest(node=node), timeout=CALL_S).actions
        return [line for line in found if line.act == act]

    def ended(self, node: str, act: str) -> pb.ActionLine:
        """The one action of this kind on the node, when it has an outcome: its log says so; each question costs it."""
        if not self._outcome(node, act):
            line = re.compile(rf"{act} {node}: (done|failed): ")
            wait_until(lambda: line.search(self.log.read_text()), f"{act} of {node} has ended")
        (line,) = self.actions(node, act)
        assert line.state != "intended"
        return line

    def _outcome(self, node: str, act: str) -> bool:
        return any(line.state != "intended" for line in self.actions(node, act))

    def stage(self, node: str) -> str:
        duties = self.stub.ListActions(pb.ActionsRequest(node=node), timeout=CALL_S).duties
        return duties[0].stage if duties else ""
