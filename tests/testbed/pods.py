"""A node of Kubernetes without a kubelet: pods of rendered manifests as real containers, started by podman and runc.

What a pod's spec says of mounts, users, capabilities, namespaces, environment and a read-only root is what its
container gets, as the kubelet would ask its runtime; what is not known here is refused. A folder stands for the node's
own file system below `hostPath`, but for devices, which are this machine's; a network namespace stands for the node's
network. Not here: a scheduler, Services, NetworkPolicies, restarts, probes, limits of CPU and memory. For NVIDIA's
container runtime, which mounts the driver's libraries where NVIDIA_VISIBLE_DEVICES is set, `nvidia` stands in.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Json = dict[str, Any]
# runc, and limits: crun of Debian 12 refuses cgroups in hybrid mode, and a machine may allow less than podman asks for.
RUN = ("podman", "--runtime", "runc", "run", "--detach", "--ulimit", "nofile=4096:4096", "--ulimit", "nproc=4096:4096")
WORKLOADS = ("DaemonSet", "StatefulSet", "Deployment")
START_S = 120


def rendered(folder: Path) -> list[Json]:
    """Return the manifests of a Kustomize folder, as kubectl renders them."""
    import yaml

    command = ["kubectl", "kustomize", str(folder)]
    text = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout
    return [each for each in yaml.safe_load_all(text) if each]


@dataclass
class Node:
    """One node and the pods on it.

    Attributes:
        name: in Kubernetes. root: stands for its file system. namespace: its network's, of `ip netns`.
        images: name in the manifests -> one that podman has.
        nvidia: mounts (path on this machine -> path in the container) and environment of NVIDIA's runtime.
        started: workload -> its container.
    """

    name: str
    root: Path
    namespace: str
    manifests: Sequence[Json]
    images: Mapping[str, str]
    nvidia: tuple[Mapping[str, str], Mapping[str, str]] = ({}, {})
    started: dict[str, str] = field(default_factory=dict)

    def start(self, workload: str) -> None:
        """Start the pod of a workload; its claims keep what a pod before it wrote.

        Raises:
            ValueError: its spec says what is not known here.
        """
        done = subprocess.run(
            self._command(self._manifest(workload)), capture_output=True, text=True, timeout=START_S, check=False
        )
        if done.returncode:
            raise RuntimeError(f"{workload}: {done.stderr}")
        self.started[workload] = done.stdout.strip()

    def stop(self, workload: str) -> None:
        """Delete the pod, as `kubectl delete pod` does: SIGTERM, and SIGKILL after its grace period."""
        container = self.started.pop(workload)
        grace_s = self._manifest(workload)["spec"]["template"]["spec"].get("terminationGracePeriodSeconds", 30)
        _podman("stop", "--time", str(grace_s), container, timeout_s=grace_s + START_S)
        _podman("rm", "--force", container)

    def close(self) -> None:
        for container in self.started.values():
            _podman("rm", "--force", "--time", "5", container, check=False)

    def run(self, workload: str, *command: str) -> str:
        """Return what a command prints in a pod, as `kubectl exec` does."""
        return _podman("exec", self.started[workload], *command)

    def log(self, workload: str) -> str:
        done = subprocess.run(
            ["podman", "logs", self.started[workload]], capture_output=True, text=True, timeout=60, check=False
        )
        return done.stdout + done.stderr

    def _manifest(self, workload: str) -> Json:
        (found,) = [m for m in self.manifests if m["kind"] in WORKLOADS and m["metadata"]["name"] == workload]
        return found

    def _command(self, workload: Json) -> list[str]:
        spec = workload["spec"]["template"]["spec"]
        (container,) = spec["containers"]
        if "command" in container or spec.get("initContainers"):
            raise ValueError("a command and init containers are not known here")
        if not spec.get("hostNetwork"):
            raise ValueError("only pods of the node's own network are known here")
        env = {each["name"]: self._value(each) for each in container.get("env", ())}
        command = [
            *RUN,
            "--network",
            f"ns:/run/netns/{self.namespace}",
            *(["--pid", "host"] if spec.get("hostPID") else []),
        ]
        command += _security(spec.get("securityContext", {}), container["securityContext"])
        claims = [each["metadata"]["name"] for each in workload["spec"].get("volumeClaimTemplates", ())]
        volumes = {each["name"]: each for each in [*spec["volumes"], *({"name": name, "claim": {}} for name in claims)]}
        group = spec.get("securityContext", {}).get("fsGroup")
        for mount in container["volumeMounts"]:
            source = self._volume(volumes[mount["name"]], workload["metadata"]["name"], group)
            command += ["--volume", f"{source}:{mount['mountPath']}" + (":ro" if mount.get("readOnly") else "")]
        if "NVIDIA_VISIBLE_DEVICES" in env:
            mounts, more = self.nvidia
            env |= more
            command += [word for path, there in mounts.items() for word in ("--volume", f"{path}:{there}:ro")]
        command += [word for name, value in env.items() for word in ("--env", f"{name}={value}")]
        # $(NAME) of a container's arguments is its environment's.
        args = [re.sub(r"\$\((\w+)\)", lambda found: env[found[1]], word) for word in container.get("args", ())]
        return [*command, self.images[container["image"]], *args]

    def _value(self, variable: Json) -> str:
        if "value" in variable:
            return str(variable["value"])
        if variable["valueFrom"].get("fieldRef", {}).get("fieldPath") != "spec.nodeName":
            raise ValueError(f"{variable['name']} is from what is not known here")
        return self.name

    def _volume(self, volume: Json, workload: str, group: int | None) -> Path:
        own = self.root / "var/lib/kubelet/pods" / workload / volume["name"]
        if "hostPath" in volume:
            return self._host_path(volume["hostPath"])
        if "configMap" in volume:
            name = volume["configMap"]["name"]
            (found,) = [m for m in self.manifests if m["kind"] == "ConfigMap" and m["metadata"]["name"] == name]
            shutil.rmtree(own, ignore_errors=True)
            own.mkdir(parents=True)
            for file, text in found["data"].items():
                (own / file).write_text(text)
                (own / file).chmod(0o644)
            return own
        if "emptyDir" in volume:
            shutil.rmtree(own, ignore_errors=True)
        elif "claim" not in volume:
            raise ValueError(f"volume {volume['name']} is of a kind that is not known here")
        own.mkdir(parents=True, exist_ok=True)
        own.chmod(0o777 if "emptyDir" in volume else 0o2770)
        if group is not None:
            os.chown(own, 0, group)
        return own

    def _host_path(self, wanted: Json) -> Path:
        path = Path(wanted["path"])
        if wanted["type"] == "CharDevice":
            return path
        there = self.root / path.relative_to("/")
        if wanted["type"] == "DirectoryOrCreate":
            there.mkdir(parents=True, exist_ok=True)
            there.chmod(0o755)
        elif wanted["type"] != "Directory" or not there.is_dir():
            raise ValueError(f"the kubelet would not start the pod: no {wanted['type']} {path}")
        return there


def _security(pod: Json, container: Json) -> list[str]:
    """Return podman's options for security contexts; a container's own goes before its pod's."""
    both = pod | container
    known = {"runAsUser", "runAsGroup", "runAsNonRoot", "fsGroup", "seccompProfile", "privileged", "capabilities"}
    known |= {"readOnlyRootFilesystem", "allowPrivilegeEscalation"}
    if both.keys() - known:
        raise ValueError(f"not known here: {sorted(both.keys() - known)}")
    if both.get("runAsNonRoot") and not both.get("runAsUser"):
        raise ValueError("the kubelet would not start a container as root")
    options = ["--user", f"{both['runAsUser']}:{both.get('runAsGroup', 0)}"]
    if "fsGroup" in both:
        options += ["--group-add", str(both["fsGroup"])]
    if both.get("readOnlyRootFilesystem"):
        options += ["--read-only", "--read-only-tmpfs=false"]  # a kubelet adds no tmpfs of its own
    if both.get("privileged"):
        options.append("--privileged")
    options += [f"--cap-drop={name}" for name in both.get("capabilities", {}).get("drop", ())]
    if both.get("capabilities", {}).get("add"):
        raise ValueError("added capabilities are not known here")
    if both.get("allowPrivilegeEscalation") is False:
        options.append("--security-opt=no-new-privileges")
    if both.get("seccompProfile") is None:
        options.append("--security-opt=seccomp=unconfined")
    elif both["seccompProfile"] != {"type": "RuntimeDefault"}:
        raise ValueError("only the runtime's own seccomp profile is known here")
    return options


def _podman(*words: str, timeout_s: float = 120, check: bool = True) -> str:
    done = subprocess.run(["podman", *words], capture_output=True, text=True, timeout=timeout_s, check=False)
    if check and done.returncode:
        raise RuntimeError(f"podman {' '.join(words)}: {done.stderr}")
    return done.stdout
