"""deploy/kubernetes: what the settings in it mean to Drover's own programs.

That a real API server takes the manifests is tested in tests/collector/actions/test_kubernetes.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from drover_agent.config import AgentConfig
from drover_collector.config import CollectorConfig, is_loopback
from drover_core.model.fleet import load_toml
from drover_core.settings import load

DEPLOY = Path(__file__).resolve().parents[2] / "deploy/kubernetes"
FOLDERS = sorted({path.parent for path in DEPLOY.glob("**/kustomization.yaml")})


def named(name: str) -> list[Any]:
    return [pytest.param(path, id=str(path.parent.relative_to(DEPLOY))) for path in sorted(DEPLOY.glob(f"**/{name}"))]


@pytest.mark.parametrize("path", named("agent.toml"))
def test_agents_read_their_settings(path: Path) -> None:
    config = load(AgentConfig, path)
    assert (config.tls.ca is None) == is_loopback(config.collectors[0]), "what leaves the node is encrypted"


@pytest.mark.parametrize("path", named("collector.toml"))
def test_collectors_read_their_settings(path: Path) -> None:
    config = load(CollectorConfig, path)
    assert config.fleet == "/etc/drover/settings/fleet.toml"
    assert (config.tls.ca is None) == is_loopback(config.ingest.listen) == is_loopback(config.api.listen)
    assert config.act.mode in ("observe", "approve"), "an example acts on no node without a person"


@pytest.mark.parametrize("path", named("fleet.toml"))
def test_fleet_files_are_good(path: Path) -> None:
    assert load_toml(path).nodes


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: str(folder.relative_to(DEPLOY)))
def test_every_file_that_a_kustomization_names_is_there(folder: Path) -> None:
    content = yaml.safe_load((folder / "kustomization.yaml").read_text("utf-8"))
    names = [*content.get("resources", ()), *content.get("components", ())]
    names += [file for each in content.get("configMapGenerator", ()) for file in each["files"]]
    assert names or content.get("patches")
    for name in names:
        assert (folder / name).exists(), f"{folder.name} names {name}"


def test_services_are_not_root_and_nobody_gets_a_token_unasked() -> None:
    documents = [each for path in DEPLOY.glob("base/*/*.yaml") for each in yaml.safe_load_all(path.read_text("utf-8"))]
    pods = {
        each["metadata"]["name"]: each["spec"]["template"]["spec"]
        for each in documents
        if "template" in each.get("spec", {})
    }
    assert sorted(pods) == ["drover-agent", "drover-collector", "drover-console"]
    for name, pod in pods.items():
        (container,) = pod["containers"]
        assert pod["automountServiceAccountToken"] is False
        assert container["securityContext"]["readOnlyRootFilesystem"] is True
        mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        assert mounts.keys() <= {volume["name"] for volume in pod["volumes"]} | {"store"}, "store is claimed"
        if name != "drover-agent":  # it needs the kernel's log and the kubelet's socket
            assert pod["securityContext"]["runAsNonRoot"] is True
            assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
            assert mounts["tmp"] == "/tmp"


@pytest.mark.parametrize(
    ("labels", "runs"),
    [({"nvidia.com/gpu.present": "true"}, True), ({"nvidia.com/gpu.present": "false"}, True), ({"rack": "r1"}, False)],
)
def test_an_agent_stays_where_the_gpu_operator_finds_no_gpu_any_more(labels: dict[str, str], runs: bool) -> None:
    """The operator resets its label to "false" on a node that has lost its GPUs (its tests of the label say so)."""
    (document,) = yaml.safe_load_all((DEPLOY / "base/agent/daemonset.yaml").read_text("utf-8"))
    pod = document["spec"]["template"]["spec"]
    wanted = [{"key": key, "operator": "In", "values": [value]} for key, value in pod.get("nodeSelector", {}).items()]
    terms = pod.get("affinity", {}).get("nodeAffinity", {}).get("requiredDuringSchedulingIgnoredDuringExecution", {})
    for term in terms.get("nodeSelectorTerms", ()):
        wanted += term["matchExpressions"]
    assert {each["operator"] for each in wanted} <= {"In", "Exists"}
    assert (
        all(each["key"] in labels and labels[each["key"]] in each.get("values", labels.values()) for each in wanted)
        is runs
    )
