"""What stands around Drover and breaks: scheduler, receivers of messages, console, driver, kernel log."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator

import grpc
import numpy as np
import urllib3

from disruption.place import CALL_S, Process
from disruption.run import Run, SkipError
from drover_core.model.events import Incident, from_json
from drover_proto import fleet_pb2 as pb
from testbed.kernel_log import xid
from testbed.nvml import FakeNvml
from testbed.receivers import Reply
from testbed.system_processes import free_port

PATIENT_S = 90.0  # for what takes a second on a machine of its own
Steps = Iterator[Callable[[], object] | None]
STORM, STORM_S = 20_000, 5  # lines; seconds of telemetry from then on that are looked at


def incident_of(run: Run, node: str) -> Incident | None:
    """The newest of this node that an XID opened (of kind xid, memory or link, by its code)."""
    try:
        found = run.place.stub().ListIncidents(pb.ListIncidentsRequest(), timeout=CALL_S).incidents_json
    except grpc.RpcError:
        return None
    every = (from_json(Incident, text) for text in found)
    ours = [i for i in every if i.node == node and i.cause.startswith("xid_")]
    return max(ours, key=lambda i: i.opened_ms, default=None)


def slurm_away(run: Run) -> Steps:
    slurm, node = run["slurm"], run["slurm_node"]
    if slurm is None:
        raise SkipError("needs Slurm and root: tests/system_setup.sh installs it")
    slurm.stop("slurmctld")
    run.broken.add(node)
    run.place.fleet.ask(do="xid", node=node, code="79")
    run.until(lambda: incident_of(run, node), PATIENT_S, "the XID is an incident")
    run.hold(5)
    slurm.start_controller()

    def drained() -> bool:
        return node in drained_nodes(run)

    yield drained
    run.saw("the drain was held, and done when slurmctld was back")


def drained_nodes(run: Run) -> set[str]:
    """Nodes that Slurm itself says are drained."""
    slurm = run["slurm"]
    if slurm is None:
        return set()
    try:
        lines = slurm.command("sinfo", "--noheader", "--Node", "--format=%N %T").splitlines()
    except AssertionError:  # slurmctld is away
        return set()
    return {line.split()[0] for line in lines if "drain" in line.lower()}


def receiver_down(run: Run) -> Steps:
    hook, node = run["hook"], run["hook_node"]
    hook.usual = Reply(how="close")
    run.place.fleet.ask(do="xid", node=node, code="48")
    run.until(lambda: incident_of(run, node), PATIENT_S, "the XID is an incident")
    run.hold(4)
    found = incident_of(run, node)
    assert found is not None
    tried = len([1 for got in hook.got if found.id in got.body.decode()])
    run.saw(f"{tried} tries while it was down")
    hook.got.clear()  # what stands there from now on was taken
    hook.usual = Reply()

    def delivered() -> bool:
        return any(found.id in got.body.decode() for got in hook.got)

    yield delivered


def alertmanager_down(run: Run) -> Steps:
    start, stop, firing = run["alertmanager"]
    if start is None:
        raise SkipError("needs Alertmanager: tests/system_setup.sh installs it")
    node = run["alert_node"]
    stop()
    run.place.fleet.ask(do="xid", node=node, code="95")
    run.until(lambda: incident_of(run, node), PATIENT_S, "the XID is an incident")
    run.hold(3)
    start()
    found = incident_of(run, node)
    assert found is not None
    yield lambda: found.id in firing()
    run.saw("it was reported when it was back")


def console_killed(run: Run) -> Steps:
    port, folder = free_port(), run["certificates"]
    words = [
        sys.executable, "-m", "drover_dashboard.main", "--collector", run.place.apis["c1"], "--port", str(port),
        "--ca", f"{folder}/ca.pem", "--cert", f"{folder}/viewer.pem", "--key", f"{folder}/viewer.key",
    ]  # fmt: skip

    def answers() -> bool:
        try:
            return (
                urllib3.request("GET", f"http://127.0.0.1:{port}/_stcore/health", timeout=2, retries=False).status
                == 200
            )
        except urllib3.exceptions.HTTPError:
            return False

    console = Process(run.folder / "console.log", *words)
    run.until(answers, 60, "the console answers")
    console.kill()
    run.until(lambda: not run.place.well(), PATIENT_S, "the fleet does not notice")
    console = Process(run.folder / "console.log", *words)
    yield answers
    console.kill()


# ---- the node that has a driver


def seconds_of(run: Run) -> set[int]:
    """Moments, to the second, at which the real agent's node reported something, of those that are stored."""
    request = pb.SeriesRequest(
        scope="node", targets=[pb.SeriesTarget(node="real")], metrics=["load1"], from_ms=run.row.begin_ms,
        to_ms=time.time_ns() // 1_000_000, max_points=60_000,
    )  # fmt: skip
    reply = run.place.stub().QuerySeries(request, timeout=CALL_S)
    moments = np.frombuffer(reply.ts_ms, "<i8")
    values = [moments[~np.isnan(np.frombuffer(s.values, "<f4"))] for s in reply.series if s.role == "value"]
    return {int(ts_ms) // 1000 for each in values for ts_ms in each}


def codes_since(run: Run) -> set[str]:
    """Codes of events of the real agent's node since the fault began."""
    request = pb.EventsRequest(node="real", from_ms=run.row.begin_ms - 1000, limit=1000)
    return {str(json.loads(text)["code"]) for text in run.place.stub().ListEvents(request, timeout=CALL_S).events_json}


def present(run: Run, gpu: int, metric: str = "power_w") -> bool:
    """Whether a value of the GPU is there that is no older than some seconds."""
    since_ms = time.time_ns() // 1_000_000 - 6000  # before it is asked: an answer may take long
    detail = run.place.stub().GetNode(pb.NodeRequest(node="real"), timeout=CALL_S)
    values = (value for each in detail.gpus if each.gpu == gpu for value in each.values)
    return any(v.metric == metric and v.present and v.ts_ms >= since_ms for v in values)


def driver_hangs(run: Run) -> Steps:
    fake = need_driver(run)
    fake.block(2, "nvmlDeviceGetFieldValues")
    run.until(lambda: "driver_hung" in codes_since(run), PATIENT_S, "the hang is an event")
    run.until(lambda: present(run, 1), PATIENT_S, "the other GPUs go on")
    run.saw("reported as driver_hung; the other GPUs went on")
    fake.unblock(2, "nvmlDeviceGetFieldValues")
    yield lambda: present(run, 2)


def gpu_lost(run: Run) -> Steps:
    fake = need_driver(run)
    fake.lose(3)
    run.until(lambda: "gpu_lost" in codes_since(run), PATIENT_S, "the loss is an event")
    run.until(lambda: present(run, 1), PATIENT_S, "the other GPUs go on")
    run.saw("reported as gpu_lost; the other GPUs went on")
    fake.recover(3)
    yield lambda: present(run, 3)


def driver_unloaded(run: Run) -> Steps:
    fake = need_driver(run)
    fake.down()
    run.until(lambda: not present(run, 1), PATIENT_S, "no GPU has values")
    run.saw(f"reported: {', '.join(sorted(codes_since(run))) or 'nothing'}")
    fake.up()
    yield lambda: present(run, 1)


def kernel_log_storm(run: Run) -> Steps:
    need_driver(run)
    with run["kmsg"].open("r+b", buffering=0) as file:
        for number in range(STORM):
            file.write(xid(10_000 + number, 31))
    yield lambda: "31" in codes_since(run) and len(seconds_of(run)) >= STORM_S
    seconds = seconds_of(run)
    run.must(len(seconds) > 1 and max(seconds) - min(seconds) - len(seconds) < 4, "the node's telemetry went on")
    run.saw(f"{STORM:,} lines; {len(seconds)} s of telemetry of that node without a gap of more than 3 s in all")


def need_driver(run: Run) -> FakeNvml:
    driver: FakeNvml | None = run["nvml"]
    if driver is None:
        raise SkipError("needs gcc, for the stand-in of the driver")
    return driver
