"""Real agents, each a process, against a real collector: no GPU, eight GPUs on the C stand-in, ports, a job, a training
loop, the kernel log; paused, killed, and without any right."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from drover_agent.client.training_steps import Reporter
from drover_core.metrics.catalog import BY_NAME, Scope, of_agents
from drover_core.model.events import Incident, from_json
from drover_proto import fleet_pb2 as pb
from drover_proto.fleet_pb2_grpc import FleetStub
from testbed.nvml import FakeNvml, build
from testbed.nvml_values import GPUS, READ_BY_NVML, feed_distinct
from testbed.system_processes import STOP_S, Collector, collector, running
from testbed.trees import plant
from testbed.waiting import wait_until

NODE = "real-node"
CALL_S = 10.0


FLEET = f'[[nodes]]\nnames = "{NODE}"\nrack = "r1"\nsku = "H100-SXM"\ngpus = {GPUS}\n'


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Collector]:
    with collector(tmp_path, FLEET) as found:
        yield found


def agent_args(tmp_path: Path, address: str, *settings: str) -> list[str]:
    args = [
        "run",
        "--set",
        f"node={NODE}",
        "--set",
        f'collectors=["{address}"]',
        "--set",
        f"spool.dir={tmp_path}/spool",
    ]
    args += ["--set", "batch_s=1"]
    for one in settings:
        args += ["--set", one]
    return args


def detail(stub: FleetStub) -> pb.NodeDetail:
    return stub.GetNode(pb.NodeRequest(node=NODE), timeout=CALL_S)


def test_a_machine_without_gpu_streams_its_host_and_says_why_there_is_no_gpu(tmp_path: Path, served: Collector) -> None:
    address, _, stub = served
    env = {k: v for k, v in os.environ.items() if k != "LD_LIBRARY_PATH"}
    args = agent_args(tmp_path, address, "kmsg_enabled=false", "hardware=nvml")
    with running(tmp_path, "drover_agent.main", *args, env=env):
        wait_until(lambda: any(v.present for v in detail(stub).values), "host values arrive")
        found = detail(stub)
    values = {v.metric: v for v in found.values}
    assert values["memory_total_bytes"].value == pytest.approx(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    assert "NVIDIA driver" in found.inventory["no_gpu_reason"]
    assert len(found.gpus) == GPUS, "the GPUs that should be there are shown"
    for gpu in found.gpus:
        assert gpu.health != "healthy"
        assert not any(v.present for v in gpu.values)


def test_every_value_of_eight_gpus_arrives_in_its_own_column(tmp_path: Path, served: Collector) -> None:
    if shutil.which("gcc") is None:
        pytest.skip("the stand-in for NVML is compiled with gcc: apt-get install gcc libc6-dev")
    fake = FakeNvml(tmp_path / "nvml.script", build(tmp_path))
    fake.healthy(GPUS)
    expected = feed_distinct(fake)
    address, _, stub = served
    names = {m.name for m in READ_BY_NVML}
    args = agent_args(tmp_path, address, "kmsg_enabled=false")
    with running(tmp_path, "drover_agent.main", *args, env={**os.environ, **fake.env()}):

        def complete() -> bool:
            seen = detail(stub)
            own = {v.metric for v in seen.values if v.present}
            reported = all(names <= {v.metric for v in g.values if v.present} for g in seen.gpus)
            why = {v.metric: v.reason for v in seen.values}
            return (
                len(seen.gpus) == GPUS
                and reported
                and "source_nvml_read_s" in own
                and why["source_inference_outcome"] not in ("", "not reported")
            )

        wait_until(complete, "all metrics of all GPUs arrive, and how their reading goes")
        found = detail(stub)
    own_values = {v.metric: v for v in found.values}
    assert 0 < own_values["source_nvml_read_s"].value < 60
    assert {own_values[f"source_{name}_outcome"].value for name in ("nvml", "host", "jobs")} == {0}
    assert own_values["source_inference_outcome"].reason == "unsupported"
    for gpu, want in zip(found.gpus, expected, strict=True):
        got = {v.metric: v.value for v in gpu.values if v.present}
        for name, value in want.items():
            assert got[name] == pytest.approx(value, abs=BY_NAME[name].step / 2 + 1e-12), (gpu.gpu, name)
        assert gpu.serial and gpu.uuid and gpu.pci and gpu.model
    assert {m.name for m in of_agents(Scope.GPU)} == names, "NVML and GPM give every GPU row of an agent"


CASE = Path(__file__).resolve().parents[1] / "cases/agent/infiniband/ndr"
PORTS = CASE / "tree.txt"
# One step of job 4242, whose process NVML shows on GPU 0 (the stand-in numbers them 1000 x (slot + 1)).
JOB = """
[proc/1]
comm: systemd
stat: 1 (systemd) S 0 1 1 0 -1 4194304
cgroup: 0::/init.scope
[proc/900]
comm: slurmstepd
stat: 900 (slurmstepd) S 1 900 900 0 -1 4194304
cgroup: 0::/system.slice/slurmstepd.scope/job_4242/step_0/slurm
cmdline: slurmstepd: [4242.0]\\0
task/900/children: 1000
[proc/1000]
comm: python
stat: 1000 (python) S 900 1000 1000 0 -1 4194304
cgroup: 0::/system.slice/slurmstepd.scope/job_4242/step_0/user/task_0
environ: SLURM_JOB_ID=4242\\0SLURM_STEP_GPUS=0\\0
"""


@pytest.fixture
def fake(tmp_path: Path) -> FakeNvml:
    if shutil.which("gcc") is None:
        pytest.skip("the stand-in for NVML is compiled with gcc: apt-get install gcc libc6-dev")
    found = FakeNvml(tmp_path / "nvml.script", build(tmp_path))
    found.healthy(GPUS)
    return found


def codes(stub: FleetStub) -> list[str]:
    """Codes of the node's events, oldest first."""
    return [json.loads(text)["code"] for text in reversed(detail(stub).events_json)]


def stored(folder: Path, scope: Scope) -> list[dict[str, object]]:
    """Rows of a collector that has ended, without time and node and what is absent; in a process of its own, for a
    store is open in one only."""
    script = (
        "import json, sys, time; from drover_collector.store import Store; "
        "from drover_core.metrics.catalog import Scope; "
        "tables = Store.open(sys.argv[1]).export.tables(Scope(sys.argv[2]), 0, time.time_ns() // 1_000_000); "
        "print(json.dumps([row for table in tables for row in table.to_pylist()], default=str))"
    )
    command = [sys.executable, "-c", script, f"chdb://{folder}/store", str(scope)]
    out = subprocess.run(command, check=True, timeout=120, capture_output=True, text=True).stdout
    rows = json.loads(out.splitlines()[-1])
    return [{k: v for k, v in row.items() if v is not None and k not in ("ts", "node")} for row in rows]


@contextlib.contextmanager
def agent(*args: str, env: dict[str, str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """An agent whose process is at hand; what is left of it is killed."""
    with log.open("ab") as output:
        child = subprocess.Popen([sys.executable, "-m", "drover_agent.main", *args], stderr=output, env=env)
        try:
            yield child
        finally:
            child.send_signal(signal.SIGCONT)
            child.kill()
            child.wait(STOP_S)


def test_ports_jobs_mig_and_training_steps_reach_the_store(tmp_path: Path, fake: FakeNvml) -> None:
    (tmp_path / "job.txt").write_text(JOB)
    root = plant(tmp_path / "job.txt", plant(PORTS, tmp_path / "root"))
    fake.mig(7, (0, 1))
    steps = tmp_path / "steps.sock"
    settings = ("kmsg_enabled=false", f"sys_root={root}/sys", f"proc_root={root}/proc", f"steps_socket={steps}")
    reporter = Reporter("pretrain", tokens_per_step=1000.0, socket_path=str(steps))
    with collector(tmp_path, FLEET) as (address, _, stub):

        def ports() -> dict[str, dict[str, float]]:
            return {link.link: {v.metric: v.value for v in link.values if v.present} for link in detail(stub).links}

        args = agent_args(tmp_path, address, *settings)
        with running(tmp_path, "drover_agent.main", *args, env={**os.environ, **fake.env()}):
            wait_until(steps.exists, "the socket of training loops")
            reporter.step(step_time_s=0.25)
            wait_until(lambda: "symbol_errors" in ports().get("mlx5_0", {}), "the port's counters")
            wait_until(lambda: detail(stub).gpus[0].job == "4242", "the job that holds GPU 0")
            wait_until(lambda: any(v.present for v in detail(stub).gpus[7].values), "the GPU in MIG mode")
            found = detail(stub)
            assert ports()["mlx5_0"] == json.loads((CASE / "expected.json").read_text())["rows"]["n1/mlx5_0"]
    assert [gpu.job for gpu in found.gpus] == ["4242", *[""] * 7]
    assert len(found.gpus) == GPUS, "MIG instances are no GPUs more"
    assert {v.metric: v.value for v in found.gpus[7].values if v.present}["framebuffer_total_bytes"] == 85520809984.0
    steps = {"workload": "pretrain", "step_time_s": 0.25, "tokens_per_step": 1000.0}
    assert stored(tmp_path, Scope.WORKLOAD) == [steps]


def test_a_paused_agent_goes_on_and_blames_nobody(tmp_path: Path, served: Collector, fake: FakeNvml) -> None:
    address, _, stub = served
    args = agent_args(tmp_path, address, "kmsg_enabled=false", "steps_socket=")

    def newest_ms() -> int:
        return max((v.ts_ms for gpu in detail(stub).gpus for v in gpu.values if v.present), default=0)

    with agent(*args, env={**os.environ, **fake.env()}, log=tmp_path / "agent.log") as child:
        wait_until(newest_ms, "values arrive")
        child.send_signal(signal.SIGSTOP)
        stopped_ms = time.time_ns() // 1_000_000
        wait_until(lambda: time.time_ns() // 1_000_000 > stopped_ms + 6_000, "longer than any read may take")
        child.send_signal(signal.SIGCONT)
        resumed_ms = time.time_ns() // 1_000_000
        wait_until(lambda: newest_ms() > resumed_ms + 2_000, "new values")
        logged = codes(stub)
    assert logged == ["agent_started"]


def test_a_killed_agent_is_started_again_and_goes_on(tmp_path: Path, served: Collector, fake: FakeNvml) -> None:
    address, _, stub = served
    args = agent_args(tmp_path, address, "kmsg_enabled=false", "steps_socket=")
    env = {**os.environ, **fake.env()}

    def present(since_ms: int) -> bool:
        gpus = detail(stub).gpus
        return all(any(v.present and v.ts_ms > since_ms for v in gpu.values) for gpu in gpus)

    with agent(*args, env=env, log=tmp_path / "agent.log") as child:
        wait_until(lambda: present(0), "values arrive")
        child.kill()
        child.wait(STOP_S)
        killed_ms = time.time_ns() // 1_000_000
    with agent(*args, env=env, log=tmp_path / "agent.log") as child:
        wait_until(lambda: present(killed_ms), "values of the second run")
        child.terminate()
        assert child.wait(STOP_S) == 0
    wait_until(lambda: codes(stub)[-1:] == ["agent_stopped"], "its last words")
    assert codes(stub) == ["agent_started", "agent_started", "agent_stopped"]


def without_rights() -> list[str]:
    """Root keeps its name and its files, and no capability: the kernel then treats it as anybody."""
    if os.geteuid() != 0:
        return []
    return ["setpriv", "--bounding-set=-all", "--inh-caps=-all", "--no-new-privs"]


def test_without_any_right_what_is_absent_says_so(tmp_path: Path, served: Collector, fake: FakeNvml) -> None:
    address, _, stub = served
    root = plant(PORTS, tmp_path / "root")
    [refused] = (root / "sys/class/infiniband/mlx5_0/ports/1").glob("counters/symbol_error")
    refused.chmod(0)
    fake.error(3, "nvmlDeviceGetCurrPcieLinkWidth", "NO_PERMISSION")
    log = tmp_path / "kmsg"
    log.write_text("")
    log.chmod(0)
    args = agent_args(tmp_path, address, f"sys_root={root}/sys", f"kmsg_path={log}", "steps_socket=")

    def refused(values: Iterable[pb.Value], metric: str) -> bool:
        """Until the agent's record of it is there, the reason is "not reported"."""
        return any(v.metric == metric and not v.present and v.reason == "no-permission" for v in values)

    with running(tmp_path, "drover_agent.main", *args, env={**os.environ, **fake.env()}, prefix=without_rights()):
        wait_until(lambda: "kmsg_unreadable" in codes(stub), "the kernel log as an event")
        wait_until(lambda: any(refused(link.values, "symbol_errors") for link in detail(stub).links), "the counter")
        wait_until(lambda: refused(detail(stub).gpus[3].values, "pcie_width"), "the refused NVML call")
        found = detail(stub)
    [event] = [json.loads(text) for text in found.events_json if json.loads(text)["code"] == "kmsg_unreadable"]
    assert "CAP_SYSLOG" in event["message"]


@pytest.mark.system
def test_a_line_in_the_kernel_log_becomes_an_incident(tmp_path: Path, served: Collector) -> None:
    address, _, stub = served
    args = agent_args(tmp_path, address, "hardware=none", "kmsg_accept_user_facility=true")

    def incidents() -> list[Incident]:
        reply = stub.ListIncidents(pb.ListIncidentsRequest(state="all"), timeout=CALL_S)
        return [from_json(Incident, text) for text in reply.incidents_json]

    def critical_xids() -> list[Incident]:
        return [i for i in incidents() if i.cause == "xid_79" and i.severity == "critical"]

    with running(tmp_path, "drover_agent.main", *args):
        wait_until(lambda: detail(stub).row.last_seen_ms, "the agent streams")
        line = "NVRM: Xid (PCI:0000:3b:00): 79, pid=4242, name=drover-test, GPU has fallen off the bus."
        with Path("/dev/kmsg").open("w") as kernel_log:
            kernel_log.write(f"<4>{line}\n")
        wait_until(critical_xids, "the line becomes an incident")
        found = critical_xids()
        events = [json.loads(text) for text in detail(stub).events_json]
    assert len(found) == 1
    assert found[0].node == NODE
    assert any("drover-test" in e.text for e in found[0].evidence)
    # lines of earlier runs are still in the log: they come as backlog, and alone they alarm nobody
    assert [e["code"] for e in events if e["kind"] == "xid" and not e["backlog"]] == ["79"]


@pytest.mark.system
def test_a_line_that_user_space_could_have_forged_is_kept_but_not_acted_on(tmp_path: Path, served: Collector) -> None:
    address, _, stub = served
    with running(tmp_path, "drover_agent.main", *agent_args(tmp_path, address, "hardware=none")):
        wait_until(lambda: detail(stub).row.last_seen_ms, "the agent streams")
        with Path("/dev/kmsg").open("w") as kernel_log:
            kernel_log.write("<4>NVRM: Xid (PCI:0000:3b:00): 79, pid=4242, name=drover-forged, GPU has fallen off.\n")
        wait_until(lambda: any("drover-forged" in text for text in detail(stub).events_json), "the event is kept")
        reply = stub.ListIncidents(pb.ListIncidentsRequest(state="all", min_severity="warning"), timeout=CALL_S)
    assert not [text for text in reply.incidents_json if "xid_79" in text]
