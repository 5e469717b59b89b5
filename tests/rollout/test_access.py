"""The roles that give a collector its rights, on a real Slurm with accounting and a real Kubernetes API server.

Part of `make test-rollout`. Slurm's role is played on this machine, with a user drover for as long as it takes;
Kubernetes' on a machine of its own.
"""

from __future__ import annotations

import json
import os
import pwd
import re
import shutil
import ssl
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from testbed import slurm
from testbed.hosts import hosts
from testbed.kubernetes_server import ADMIN, KubernetesServer, kubernetes
from testbed.rollout_log import saw
from testbed.slurm import Slurm
from testbed.system_processes import free_port, listens
from testbed.waiting import wait_until

ROOT = Path(__file__).resolve().parents[2]
PLAY_S, START_S = 600, 120
NODE = "gpu01"


def play(inventory: Path, *options: str) -> tuple[int, dict[str, int], str]:
    """(exit code, host -> how many tasks changed something, what it printed)"""
    command = [str(Path(sys.executable).parent / "ansible-playbook"), "-i", str(inventory)]
    environment = os.environ | {"ANSIBLE_CONFIG": str(ROOT / "ansible/ansible.cfg"), "ANSIBLE_NOCOLOR": "1"}
    found = subprocess.run(
        [*command, str(ROOT / "ansible/access.yml"), *options],
        env=environment, capture_output=True, text=True, timeout=PLAY_S, check=False,
    )  # fmt: skip
    text = found.stdout + found.stderr
    changed = re.findall(r"^(\S+)\s+: ok=\d+\s+changed=(\d+)", text, re.MULTILINE)
    ends = ", ".join(f"{host} changed={n}" for host, n in changed)
    said = " ".join(["ansible-playbook", "access.yml", *options])
    saw(f"`{said}`: exit code {found.returncode}; {ends}")
    return found.returncode, {name: int(n) for name, n in changed}, text


# ---- Slurm


@contextmanager
def user_drover() -> Iterator[None]:
    try:
        pwd.getpwnam("drover")
        made = False
    except KeyError:
        subprocess.run(["useradd", "--system", "--shell", "/usr/sbin/nologin", "drover"], check=True)
        made = True
    try:
        yield
    finally:
        if made:
            subprocess.run(["userdel", "drover"], check=True)


@contextmanager
def accounting(found: Slurm) -> Iterator[None]:
    """MariaDB and slurmdbd next to a Slurm, which then keeps accounts."""
    folder, db_port, dbd_port = found.folder, free_port(), free_port()
    data, socket = folder / "mysql", folder / "mysql.sock"
    install = ["mariadb-install-db", "--no-defaults", "--user=root", "--auth-root-authentication-method=normal"]
    subprocess.run([*install, f"--datadir={data}"], check=True, capture_output=True, timeout=START_S)
    found.start("mariadb", [
        "/usr/sbin/mariadbd", "--no-defaults", "--user=root", f"--datadir={data}", f"--socket={socket}",
        f"--port={db_port}", "--bind-address=127.0.0.1", "--innodb-buffer-pool-size=64M",
    ])  # fmt: skip
    wait_until(lambda: listens(socket), "MariaDB listens", START_S)
    sql = "CREATE USER 'slurm'@'127.0.0.1' IDENTIFIED BY 'tests'; GRANT ALL ON slurm_acct.* TO 'slurm'@'127.0.0.1'"
    subprocess.run(["mariadb", f"--socket={socket}", "-e", sql], check=True, timeout=60)
    conf = folder / "slurmdbd.conf"
    conf.write_text("\n".join([
        "AuthType=auth/munge", f"AuthInfo=socket={folder}/munge.sock", "DbdHost=localhost", f"DbdPort={dbd_port}",
        "SlurmUser=root", "StorageType=accounting_storage/mysql", "StorageHost=127.0.0.1", f"StoragePort={db_port}",
        "StorageUser=slurm", "StoragePass=tests", "StorageLoc=slurm_acct", f"PidFile={folder}/slurmdbd.pid", "",
    ]))  # fmt: skip
    conf.chmod(0o600)
    with (folder / "slurm.conf").open("a") as file:
        file.write(
            f"AccountingStorageType=accounting_storage/slurmdbd\nAccountingStorageHost=localhost\n"
            f"AccountingStoragePort={dbd_port}\nAccountingStoragePass={folder}/munge.sock\n"
        )
    found.start("slurmdbd", ["slurmdbd", "-D"])
    found.wait(lambda: _answers(found, "sacctmgr", "--noheader", "list", "cluster"), "slurmdbd answers")
    found.stop("slurmctld")
    if "drover" not in found.command("sacctmgr", "--noheader", "list", "cluster"):
        found.command("sacctmgr", "--immediate", "add", "cluster", "drover")
    found.start_controller()
    found.wait(lambda: _answers(found, "scontrol", "ping"), "slurmctld is back")
    yield


def _answers(found: Slurm, *words: str) -> bool:
    return subprocess.run(words, env=found.env, capture_output=True, check=False, timeout=30).returncode == 0


def as_drover(found: Slurm, *words: str) -> tuple[int, str]:
    command = ["runuser", "-u", "drover", "--", "env", f"SLURM_CONF={found.env['SLURM_CONF']}", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, done.stdout + done.stderr


@pytest.fixture
def real_slurm() -> Iterator[Slurm]:
    folder = Path(tempfile.mkdtemp(prefix="drover-slurm-", dir="/var/tmp"))  # user drover must reach it
    folder.chmod(0o755)
    try:
        with user_drover(), slurm.running(folder, [NODE], gpus=1) as found, accounting(found):
            (folder / "munge.sock").chmod(0o777)
            yield found
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.timeout(PLAY_S * 3)
def test_slurm_access_lets_the_collector_drain_and_nothing_before(real_slurm: Slurm, tmp_path: Path) -> None:
    drain = ("scontrol", "update", f"nodename={NODE}", "state=drain", "reason=drover-test")
    code, text = as_drover(real_slurm, *drain)
    assert code != 0
    assert "invalid user" in text.lower() or "denied" in text.lower()

    inventory = tmp_path / "inventory.yml"
    variables = {
        "ansible_connection": "local",
        "ansible_python_interpreter": sys.executable,
        "drover_slurm_environment": {"SLURM_CONF": real_slurm.env["SLURM_CONF"]},
    }
    inventory.write_text(json.dumps({"drover_collectors": {"hosts": {"localhost": variables}}}))
    # An operator, the level below, may reserve nodes and not drain them: there is no lesser right that does.
    code, changed, text = play(inventory, "--tags", "slurm", "-e", "drover_slurm_level=Operator")
    assert code == 0, text[-3000:]
    reserve = ("scontrol", "create", "reservation=r", "starttime=now", "duration=1", "users=root", f"nodes={NODE}")
    real_slurm.wait(lambda: as_drover(real_slurm, *reserve)[0] == 0, "slurmctld knows the operator")
    real_slurm.command("scontrol", "delete", "reservation=r")
    assert as_drover(real_slurm, *drain)[0] != 0

    code, changed, text = play(inventory, "--tags", "slurm")
    assert code == 0, text[-3000:]
    assert changed["localhost"] == 1, text

    real_slurm.wait(lambda: as_drover(real_slurm, *drain)[0] == 0, "slurmctld knows the right")
    assert "DRAIN" in real_slurm.command("scontrol", "show", "node", NODE, "-o")
    saw("real Slurm 22.05 with slurmdbd: an operator may reserve and not drain, an administrator drains and resumes")
    code, text = as_drover(real_slurm, "scontrol", "update", f"nodename={NODE}", "state=resume")
    assert code == 0, text
    assert "DRAIN" not in real_slurm.command("scontrol", "show", "node", NODE, "-o")

    code, changed, text = play(inventory, "--tags", "slurm")
    assert code == 0, text[-3000:]
    assert changed["localhost"] == 0, text


# ---- Kubernetes


def may(server: KubernetesServer, token: str, verb: str, resource: str, group: str = "") -> bool:
    """What the API server itself says that this token may."""
    name, _, sub = resource.partition("/")
    attributes = {"verb": verb, "group": group, "resource": name, "subresource": sub, "namespace": "default"}
    request = urllib.request.Request(
        f"{server.url}/apis/authorization.k8s.io/v1/selfsubjectaccessreviews",
        json.dumps({"spec": {"resourceAttributes": attributes}}).encode(),
        {"Authorization": f"Bearer {token}", "Content-Type": "application/json"},
    )
    context = ssl.create_default_context(cafile=str(server.ca))
    with urllib.request.urlopen(request, timeout=20, context=context) as answer:
        return bool(json.loads(answer.read())["status"]["allowed"])


@pytest.mark.timeout(PLAY_S * 3)
def test_kubernetes_access_gives_a_token_of_least_rights(tmp_path: Path) -> None:
    (tmp_path / "kubernetes").mkdir()
    with kubernetes(tmp_path / "kubernetes") as server, hosts(tmp_path, ["head"]) as (head,):
        head.ssh("useradd --system drover && mkdir -p /etc/drover")
        config = tmp_path / "kubeconfig"
        config.write_text(json.dumps({
            "apiVersion": "v1", "kind": "Config", "current-context": "c",
            "clusters": [{"name": "c", "cluster": {"server": server.url, "certificate-authority": str(server.ca)}}],
            "users": [{"name": "u", "user": {"token": ADMIN}}],
            "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
        }))  # fmt: skip
        inventory = tmp_path / "inventory.yml"
        inventory.write_text(json.dumps({"drover_collectors": {"hosts": {"head": {
            "ansible_host": "127.0.0.1", "ansible_user": "root", "ansible_port": head.port,
            "ansible_ssh_private_key_file": str(head.key),
            "ansible_ssh_common_args": f"-o UserKnownHostsFile={head.known}",
            "drover_kubectl": f"kubectl --kubeconfig {config}",
        }}}}))  # fmt: skip
        code, changed, text = play(inventory, "--tags", "kubernetes")
        assert code == 0, text[-3000:]
        assert changed["head"] > 0
        path = "/etc/drover/secrets/kubernetes.token"
        assert head.ssh("stat", "-c", "%a:%U", path).strip() == "400:drover"
        token = head.ssh("cat", path).strip()
        assert token not in text

        assert [line for line in ALLOWED if not may(server, token, *line)] == []
        assert [line for line in FORBIDDEN if may(server, token, *line)] == []
        saw(f"real API server 1.20: {len(ALLOWED)} rights given, {len(FORBIDDEN)} others refused by the server itself")

        code, changed, text = play(inventory, "--tags", "kubernetes")
        assert code == 0, text[-3000:]
        assert changed["head"] == 0, text


ALLOWED = [
    ("get", "nodes"), ("list", "nodes"), ("patch", "nodes"), ("patch", "nodes/status"), ("list", "pods"),
    ("create", "pods/eviction"),
]  # fmt: skip
FORBIDDEN = [
    ("delete", "nodes"), ("create", "nodes"), ("delete", "pods"), ("create", "pods"), ("create", "pods/exec"),
    ("get", "secrets"), ("list", "secrets"), ("create", "serviceaccounts/token"), ("get", "configmaps"),
    ("create", "clusterrolebindings", "rbac.authorization.k8s.io"), ("impersonate", "users"), ("*", "*", "*"),
]  # fmt: skip
