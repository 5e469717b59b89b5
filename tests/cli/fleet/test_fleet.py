"""`drover fleet discover` and `diff`: from what reports, Slurm, Kubernetes and Ansible to a fleet file, and back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from drover_cli.errors import CliError
from drover_cli.fleet.files import compress
from drover_cli.fleet.sources import Found, of_ansible, of_kubernetes, of_scontrol, of_topology
from drover_cli.main import main
from drover_core.model.fleet import FleetError, NodeSpec, expand, load_toml
from drover_proto import fleet_pb2 as pb
from testbed.fleet_stand_in import FleetStandIn

NOW_MS = 1_800_000_000_000
# As scontrol 22.05 prints, shortened; the reason is a person's.
SCONTROL = """\
NodeName=r01n01 Arch=x86_64 AvailableFeatures=(null) Gres=gpu:h100:8(S:0-1) State=IDLE Partitions=train,all Weight=1
NodeName=r01n02 Arch=x86_64 Gres=gpu:h100:8(S:0-1),shard:32 State=DOWN Partitions=train Reason=Gres=gpu:9 [root@x]
NodeName=login1 Arch=x86_64 Gres=(null) State=IDLE Partitions=login
"""
TOPOLOGY = """\
# trees
SwitchName=leaf01 Nodes=r01n[01-02],r01n04
SwitchName=spine01 Switches=leaf[01-02]
BlockName=block1 Nodes=r01n[01-04]
"""
KUBERNETES = {
    "items": [
        {
            "metadata": {
                "name": "gke-1",
                "labels": {
                    "nvidia.com/gpu.product": "NVIDIA-GB200", "nvidia.com/gpu.clique": "c0ffee.1",
                    "network.topology.nvidia.com/leaf": "leaf7", "topology.kubernetes.io/zone": "zone-b",
                },
            },
            "status": {"capacity": {"nvidia.com/gpu": "4"}},
        },
        {"metadata": {"name": "cp", "labels": {}}, "status": {"capacity": {"cpu": "8"}}},
    ]
}  # fmt: skip
ANSIBLE = {
    "_meta": {"hostvars": {"a1": {"rack": "r9", "drover_pool": "dev", "gpus": 2}, "a2": {}}},
    "all": {"children": ["drover_agents", "drover_collectors"]},
    "drover_agents": {"children": ["left", "right"]},
    "left": {"hosts": ["a1"]},
    "right": {"hosts": ["a2"], "children": ["left"]},
    "drover_collectors": {"hosts": ["c1"]},
}
FILED = pb.ReportingNode(
    name="r01n01", in_file=True, rack="r01", pool="train", sku="H100-SXM", gpus=8, gpus_reported=8,
    model="NVIDIA H100 80GB HBM3", last_seen_ms=NOW_MS,
)  # fmt: skip
STRANGER = pb.ReportingNode(name="r01n02", gpus_reported=7, model="NVIDIA H100 80GB HBM3", last_seen_ms=NOW_MS)
SILENT = pb.ReportingNode(name="r01n03", in_file=True, rack="r01", gpus=8)


def test_what_slurm_says() -> None:
    assert of_scontrol(SCONTROL) == {
        "r01n01": Found(pool="train", sku="h100", gpus=8), "r01n02": Found(pool="train", sku="h100", gpus=8),
        "login1": Found(pool="login", gpus=0),
    }  # fmt: skip
    assert of_topology(TOPOLOGY) == {
        "r01n01": Found("block1", "leaf01"), "r01n02": Found("block1", "leaf01"), "r01n03": Found("block1"),
        "r01n04": Found("block1", "leaf01"),
    }  # fmt: skip


def test_what_kubernetes_and_ansible_say() -> None:
    assert of_kubernetes(json.dumps(KUBERNETES)) == {
        "gke-1": Found("c0ffee.1", "leaf7", "zone-b", "NVIDIA-GB200", 4), "cp": Found(),
    }  # fmt: skip
    assert of_ansible(json.dumps(ANSIBLE)) == {"a1": Found("r9", pool="dev", gpus=2), "a2": Found()}


@pytest.mark.parametrize(
    ("read", "text"),
    [
        (of_scontrol, "slurm_load_node: Unable to contact slurm controller"), (of_topology, "SwitchName=a Switches=b"),
        (of_topology, "SwitchName=a Nodes=n[1-x]"), (of_kubernetes, "[]"), (of_kubernetes, '{"items": [1]}'),
        (of_ansible, "all: hosts"), (of_ansible, '{"all": {}}'),
    ],
)  # fmt: skip
def test_something_else_is_refused_in_one_line(read: Any, text: str) -> None:
    with pytest.raises(CliError, match=r"^[^\n]+$"):
        read(text)


@pytest.mark.parametrize(
    ("names", "lists"),
    [
        (["r01n02", "r01n01", "r01n04"], ["r01n[01-02,04]"]), (["n9", "n10", "n011"], ["n011", "n10", "n9"]),
        (["login"], ["login"]), (["a-1-x", "a-2-x"], ["a-[1-2]-x"]), (["7", "8"], ["[7-8]"]),
    ],
)  # fmt: skip
def test_names_become_host_lists_that_expand_to_them(names: list[str], lists: list[str]) -> None:
    assert compress(names) == lists
    assert sorted(name for each in lists for name in expand(each)) == sorted(names)


adopted: list[pb.AdoptRequest] = []  # what the collector was asked


@pytest.fixture
def fleet(monkeypatch: pytest.MonkeyPatch) -> list[pb.ReportingNode]:
    """What the collector answers."""
    rows = [FILED, STRANGER]
    adopted.clear()

    class Stub(FleetStandIn):
        def AdoptNode(self, request: pb.AdoptRequest) -> pb.AdoptReply:  # gRPC's name
            adopted.append(request)
            return pb.AdoptReply(detail="it is adopted")

        def ListReporting(self, request: pb.ReportingRequest) -> pb.ReportingList:  # gRPC's name
            return pb.ReportingList(nodes=rows)

    Stub().install(monkeypatch)
    monkeypatch.setattr("drover_cli.commands.fleet.time.time", lambda: NOW_MS / 1000)
    return rows


def given(folder: Path) -> list[str]:
    """The options that name all sources."""
    files = {"slurm": SCONTROL, "topology": TOPOLOGY, "kubernetes": json.dumps(KUBERNETES)}
    for name, text in files.items():
        (folder / name).write_text(text)
    return [word for name in files for word in (f"--{name}", str(folder / name))]


def test_a_file_is_made_of_all_and_the_collector_reads_it(
    fleet: list[pb.ReportingNode], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What stands in the file wins over others, the agents' count of GPUs over schedulers for the others."""
    path = tmp_path / "fleet.toml"
    assert main(["fleet", "discover", *given(tmp_path), "-o", str(path)]) == 0
    assert load_toml(path).by_name == {
        "gke-1": NodeSpec("gke-1", "c0ffee.1", "leaf7", "zone-b", "NVIDIA-GB200", 4),
        "r01n01": NodeSpec("r01n01", "r01", "leaf01", "train", "H100-SXM", 8),
        "r01n02": NodeSpec("r01n02", "block1", "leaf01", "train", "H100 80GB HBM3", 7),
        "r01n03": NodeSpec("r01n03", "block1"), "r01n04": NodeSpec("r01n04", "block1", "leaf01"),
        "cp": NodeSpec("cp"),
    }  # fmt: skip
    assert path.read_text().count("# gpus = ?") == 3, "nobody knows how many: it is said"
    said = "counts of GPUs differ, the one that reports is written: 'r01n02' (7 report, 8 by a scheduler or inventory)"
    assert said in capsys.readouterr().err, "one may be lost, and this file would never miss it"
    before = path.read_text()
    assert main(["fleet", "discover", "-o", str(path)]) == 2, "a file that people may have mended is not replaced"
    assert path.read_text() == before


def test_what_reports_and_is_not_in_the_file_can_be_appended(
    fleet: list[pb.ReportingNode], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "fleet.toml").write_text('[[nodes]]\nnames = "r01n01"\n\n')
    assert main(["fleet", "discover", "--new", *given(tmp_path)]) == 0
    with (tmp_path / "fleet.toml").open("a") as file:
        file.write(capsys.readouterr().out)
    assert list(load_toml(tmp_path / "fleet.toml").by_name) == ["r01n01", "r01n02"]
    fleet.pop()
    assert main(["fleet", "discover", "--new"]) == 1


def test_offline_asks_no_collector(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given(tmp_path)
    assert main(["fleet", "discover", "--offline", "--slurm", str(tmp_path / "slurm")]) == 0
    assert 'names = "r01n[01-02]"' in capsys.readouterr().out
    assert main(["fleet", "discover", "--offline", "--json", "--slurm", str(tmp_path / "slurm")]) == 0
    first = json.loads(capsys.readouterr().out.splitlines()[0])
    assert first == {"node": "r01n01", "rack": "", "leaf": "", "pool": "train", "sku": "h100", "gpus": 8}
    assert main(["fleet", "discover", "--offline", "--slurm", str(tmp_path / "none")]) == 2


def test_the_differences(fleet: list[pb.ReportingNode], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fleet.append(SILENT)
    assert main(["fleet", "diff", "--json", *given(tmp_path)]) == 1
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(line["node"], line["what"], line["in_file"], line["found"]) for line in lines] == [
        ("r01n01", "rack", "r01", "block1"), ("r01n01", "leaf", "-", "leaf01"),
        ("r01n02", "node", "-", "it reports: 7 GPUs H100 80GB HBM3; 8 by a scheduler or inventory"),
        ("r01n03", "node", "it should exist", "it has never reported"), ("r01n03", "rack", "r01", "block1"),
        ("cp", "node", "-", "a scheduler or inventory has it; it does not report"),
        ("gke-1", "node", "-", "a scheduler or inventory has it; it does not report"),
        ("r01n04", "node", "-", "a scheduler or inventory has it; it does not report"),
    ]  # fmt: skip
    fleet[:] = [FILED]
    assert main(["fleet", "diff"]) == 0
    fleet[:] = [pb.ReportingNode(name="n", in_file=True, gpus=8, gpus_reported=7, last_seen_ms=NOW_MS - 120_000)]
    assert main(["fleet", "diff", "--json"]) == 1
    assert [json.loads(line)["found"] for line in capsys.readouterr().out.splitlines()[-2:]] == [
        "it last reported 2 min ago", "7 report",
    ]  # fmt: skip


def test_odd_names_and_counts_still_make_a_file_that_is_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hosts = {"n1": {"rack": '\U0001f600\x7f"\\\n', "pool": None}, "n2": {"gpus": 400}, 'a"]\nb': {}, "n[1-9]": {}}
    inventory = {"_meta": {"hostvars": hosts}, "all": {"hosts": list(hosts)}}
    (tmp_path / "ansible").write_text(json.dumps(inventory))
    path = tmp_path / "fleet.toml"
    assert main(["fleet", "discover", "--offline", "--ansible", str(tmp_path / "ansible"), "-o", str(path)]) == 0
    assert load_toml(path).by_name == {"n1": NodeSpec("n1", '\U0001f600\x7f"\\\n'), "n2": NodeSpec("n2")}
    said = capsys.readouterr().err
    assert "left out: 2" in said
    assert "more than 255 GPUs, so unknown: 'n2'" in said


def test_a_node_that_agent_and_scheduler_call_differently_is_named(
    fleet: list[pb.ReportingNode], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both would stand in the file, and the one that no agent uses would be silent for ever."""
    (tmp_path / "slurm").write_text(SCONTROL.replace("r01n02", "r01n02.example.org"))
    assert main(["fleet", "discover", "--slurm", str(tmp_path / "slurm")]) == 0
    said = capsys.readouterr()
    assert 'names = "r01n02.example.org"' in said.out
    assert "one node by two names? r01n02 and r01n02.example.org: keep the one" in said.err


def test_what_is_appended_begins_on_a_line_of_its_own(
    fleet: list[pb.ReportingNode], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["fleet", "discover", "--new"]) == 0
    assert capsys.readouterr().out.startswith("\n[[nodes]]")


def test_a_topology_goes_on_after_a_backslash_and_a_list_has_an_end() -> None:
    assert list(of_topology("SwitchName=s1 \\\n  Nodes=n[1-2]\n")) == ["n1", "n2"]
    for pattern in ("n[1-1000]m[1-1000]", "n[\u00b2]"):
        with pytest.raises(FleetError):
            list(expand(pattern))


def test_shared_gpus_are_counted_once() -> None:
    labels = {"nvidia.com/gpu.count": "4", "nvidia.com/gpu.replicas": "10"}
    node = {"metadata": {"name": "n", "labels": labels}, "status": {"capacity": {"nvidia.com/gpu": "40"}}}
    assert of_kubernetes(json.dumps({"items": [node]}))["n"].gpus == 4


def test_a_node_is_adopted_by_one_command(fleet: list[pb.ReportingNode], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fleet", "adopt", "r01n02", "--rack", "r01", "--why", "new"]) == 0
    assert main(["fleet", "adopt", "r01n02", "--gpus", "0", "--forget", "--why", "gone"]) == 0
    first, second = adopted
    assert (first.node, first.rack, first.why, first.HasField("gpus"), first.forget) == (
        "r01n02",
        "r01",
        "new",
        False,
        False,
    )
    assert (second.gpus, second.HasField("gpus"), second.forget) == (0, True, True)
    assert "it is adopted" in capsys.readouterr().out
    assert main(["fleet", "adopt", "r01n02", "--gpus", "-1", "--why", "x"]) == 2


def test_an_adopted_node_is_shown_until_the_file_has_it(
    fleet: list[pb.ReportingNode], capsys: pytest.CaptureFixture[str]
) -> None:
    fleet[:] = [
        pb.ReportingNode(name="r01n02", in_file=True, gpus=8, gpus_reported=8, last_seen_ms=NOW_MS, adopted=True)
    ]
    assert main(["fleet", "diff"]) == 1
    assert "adopted; add it to the fleet file" in capsys.readouterr().out
