"""deploy/kubernetes on one node: the overlay for a lone node, as its pods' specs say, from nothing to first incidents.

`make test-rollout` runs it, as root on Debian. Images of `make images` run by podman, with the mounts, users and
capabilities of the rendered manifests (testbed/pods.py says what is no kubelet's); the kernel's log is this machine's,
NVML's library the stand-in. DROVER_IMAGES=FOLDER has images of a run before, while you mend.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from testbed import nvml
from testbed.pods import Node, rendered
from testbed.rollout_log import saw
from testbed.rollout_packages import BUILD_S, NEW, ROOT
from testbed.waiting import wait_until

NAME, NAMESPACE = "gpu-node-7", "drover-pods"
AGENT, COLLECTOR, CONSOLE = "drover-agent", "drover-collector", "drover-console"
REPORT_S, INCIDENT_S = 300, 400
LIBRARY = f"/usr/lib/x86_64-linux-gnu/{nvml.SONAME}"


@pytest.fixture(scope="module")
def fake(tmp_path_factory: pytest.TempPathFactory) -> nvml.FakeNvml:
    folder = tmp_path_factory.mktemp("nvml")
    made = nvml.FakeNvml(folder / "script", nvml.build(folder))
    made.healthy(8)
    for path in folder.iterdir():
        path.chmod(0o755)
    return made


@pytest.fixture(scope="module")
def node(images: list[Path], fake: nvml.FakeNvml, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    for archive in images:
        subprocess.run(["podman", "load", "--quiet", "--input", str(archive)], check=True, timeout=600)
    names = {name: f"localhost/{name}:{NEW}" for name in (AGENT, COLLECTOR, "drover-dashboard")}
    folder = tmp_path_factory.mktemp("node")
    folder.chmod(0o755)
    own = folder / "kubernetes"
    shutil.copytree(ROOT / "deploy/kubernetes", own)
    overlay = own / "overlays/lone-node"
    fleet = (overlay / "fleet.toml").read_text()
    assert fleet.count("gpu-node-1") == 1
    (overlay / "fleet.toml").write_text(fleet.replace("gpu-node-1", NAME))
    with (overlay / "agent.toml").open("a") as file:  # the test writes as user space what a driver writes as the kernel
        file.write("kmsg_accept_user_facility = true\n")
    subprocess.run(["ip", "netns", "add", NAMESPACE], check=True)
    subprocess.run(["ip", "-n", NAMESPACE, "link", "set", "lo", "up"], check=True)
    (folder / "root/var/lib/kubelet/pod-resources").mkdir(parents=True)  # each kubelet has it
    script = str(fake.script.parent)
    nvidia = {script: script, str(fake.library): LIBRARY}, {nvml.SCRIPT_VARIABLE: str(fake.script)}
    made = Node(NAME, folder / "root", NAMESPACE, rendered(overlay), names, nvidia)
    try:
        yield made
    finally:
        (ROOT / "test-artifacts").mkdir(exist_ok=True)
        for workload in made.started:
            (ROOT / f"test-artifacts/{workload}.log").write_text(made.log(workload))
        made.close()
        subprocess.run(["ip", "netns", "delete", NAMESPACE], check=True)


def drover(node: Node, *words: str) -> list[dict[str, object]]:
    """Return what the collector answers; nothing while it starts."""
    try:
        text = node.run(COLLECTOR, "/opt/drover/bin/drover", *words, "--json", "--collector=127.0.0.1:7302")
    except RuntimeError as error:
        assert "does not answer" in str(error), error
        return []
    return [json.loads(line) for line in text.splitlines()]


def incidents(node: Node, words: str) -> list[dict[str, object]]:
    return [row for row in drover(node, "incidents") if NAME in json.dumps(row) and words in json.dumps(row)]


def reports(node: Node) -> bool:
    since_ms = time.time() * 1000 - 15_000
    return any(row["name"] == NAME and int(str(row["last_seen_ms"])) > since_ms for row in drover(node, "nodes"))


@pytest.mark.timeout(4 * BUILD_S)
def test_from_nothing_to_a_first_incident(node: Node, fake: nvml.FakeNvml) -> None:
    began = time.monotonic()
    for workload in (COLLECTOR, AGENT, CONSOLE):
        node.start(workload)
    wait_until(lambda: reports(node), "the agent reports", REPORT_S)
    reports_s = time.monotonic() - began
    lost = time.monotonic()
    fake.lose(3)
    wait_until(lambda: incidents(node, "gpu_lost"), "an incident of the lost GPU", INCIDENT_S)
    saw(
        f"three pods start, first report in {reports_s:.0f} s; a GPU lost by the stand-in for NVML is an incident after"
        f" {time.monotonic() - lost:.0f} s more: {incidents(node, 'gpu_lost')[0]['summary']!r}"
    )
    check = "import socket; socket.create_connection(('127.0.0.1', 8501), 3)"
    wait_until(lambda: _console_answers(node, check), "the console's readiness probe", REPORT_S)
    saw("the console's readiness probe passes")


def _console_answers(node: Node, check: str) -> bool:
    try:
        node.run(CONSOLE, "/opt/drover/bin/python", "-c", check)
    except RuntimeError:
        return False
    return True


@pytest.mark.timeout(2 * INCIDENT_S)
def test_the_agent_reads_the_kernel_log_of_its_node(node: Node) -> None:
    address = nvml.pci_of(5).removesuffix(".0")
    line = f"NVRM: Xid (PCI:{address}): 79, pid=4242, name=drover-test, GPU has fallen off the bus."
    wrote = time.monotonic()
    with Path("/dev/kmsg").open("w") as kernel_log:
        kernel_log.write(f"<4>{line}\n")
    wait_until(lambda: incidents(node, "xid_79"), "an incident of the XID", INCIDENT_S)
    saw(f"an XID in the kernel's log is an incident after {time.monotonic() - wrote:.0f} s")


@pytest.mark.timeout(2 * INCIDENT_S)
def test_services_have_no_more_rights_than_their_manifests_say(node: Node) -> None:
    for workload, user in ((COLLECTOR, 10001), (CONSOLE, 10002)):
        lines = [line.split() for line in node.run(workload, "cat", "/proc/1/status").splitlines()]
        rights = {words[0].removesuffix(":"): words[1] for words in lines if len(words) > 1}
        assert rights["Uid"] == str(user)
        assert int(rights["CapEff"], 16) == int(rights["CapBnd"], 16) == 0
        assert (rights["NoNewPrivs"], rights["Seccomp"]) == ("1", "2")
    for workload in (AGENT, COLLECTOR, CONSOLE):
        with pytest.raises(RuntimeError, match="Read-only file system"):
            node.run(workload, "touch", "/opt/drover/written")
    saw("collector and console run as their users without capabilities; all three roots are read-only")


@pytest.mark.timeout(4 * REPORT_S)
def test_pods_that_are_replaced_go_on_where_those_before_them_were(node: Node) -> None:
    before = {str(row["id"]) for row in incidents(node, "")}
    assert before
    began = time.monotonic()
    for workload in (COLLECTOR, AGENT):
        node.stop(workload)
    for workload in (AGENT, COLLECTOR):  # in this order its collector is away when the agent starts
        node.start(workload)
    wait_until(lambda: reports(node), "the new agent reports to the new collector", REPORT_S)
    assert before <= {str(row["id"]) for row in incidents(node, "")}
    saw(f"both pods replaced: reports again after {time.monotonic() - began:.0f} s, incidents are kept")
