"""A real Kubernetes API server (1.20.2) with etcd and the disruption controller, all in a folder and on loopback.

Built by tests/kubernetes_setup.sh out of Debian's source package. There is no kubelet and no scheduler: nodes and pods
are objects that a test makes, and a pod that is evicted stays Terminating until the test deletes it with no grace, as
a kubelet would. Serves policy/v1beta1 evictions only; a current cluster serves policy/v1 as well.
"""

from __future__ import annotations

import base64
import fcntl
import hashlib
import json
import ssl
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import padding, rsa

from testbed.system_processes import free_port
from testbed.waiting import wait_until

PROGRAMS = Path("/var/cache/drover-testbed/kubernetes")
LOCK, LOG = PROGRAMS.with_suffix(".lock"), PROGRAMS.with_suffix(".log")  # of the build
BUILD_S = 3000.0  # three minutes where nothing else runs
START_S = 300.0  # five where nothing else runs
STOP_S = 20.0
ISSUER = "https://kubernetes.default.svc"
ADMIN = "the-tests-admin-token"


def _part(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


@dataclass
class KubernetesServer:
    """A running one. `stop` and `start` restart the API server over the same etcd."""

    folder: Path
    port: int
    etcd_port: int
    key: rsa.RSAPrivateKey
    synced: bool = False  # etcd writes to the disk before it answers, as a cluster's does
    children: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self.port}"

    @property
    def ca(self) -> Path:
        return self.folder / "certs/apiserver.crt"  # it signs its own

    def call(self, method: str, path: str, body: Mapping[str, Any] | None = None, **headers: str) -> dict[str, Any]:
        """As cluster-admin; it must succeed."""
        status, text = self._ask(method, path, body, {"Content-Type": "application/json", **headers})
        assert 200 <= status < 300, f"{method} {path}: {status} {text}"
        found: dict[str, Any] = json.loads(text)
        return found

    def _ask(
        self, method: str, path: str, body: Mapping[str, Any] | None, headers: Mapping[str, str]
    ) -> tuple[int, str]:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            self.url + path, data, {"Authorization": f"Bearer {ADMIN}", **headers}, method=method
        )
        try:
            context = ssl.create_default_context(cafile=str(self.ca))
            with urllib.request.urlopen(request, timeout=120, context=context) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def token(self, account: str, seconds: float = 3600) -> str:
        """A service account's token ("namespace/name") as the server itself signs it; `seconds` may be negative."""
        namespace, _, name = account.partition("/")
        uid = self.call("GET", f"/api/v1/namespaces/{namespace}/serviceaccounts/{name}")["metadata"]["uid"]
        now = int(time.time())
        claims = {
            "iss": ISSUER, "aud": [ISSUER], "sub": f"system:serviceaccount:{namespace}:{name}",
            "iat": now - 7200, "nbf": now - 7200, "exp": now + int(seconds),
            "kubernetes.io": {"namespace": namespace, "serviceaccount": {"name": name, "uid": uid}},
        }  # fmt: skip
        public = self.key.public_key().public_bytes(
            serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
        )
        header = {"alg": "RS256", "kid": _part(hashlib.sha256(public).digest())}
        text = ".".join(_part(json.dumps(part).encode()) for part in (header, claims))
        return f"{text}.{_part(self.key.sign(text.encode(), padding.PKCS1v15(), hashes.SHA256()))}"

    def start(self) -> None:
        """Start the API server; returns when it is ready."""
        self._run(
            "kube-apiserver", str(PROGRAMS / "kube-apiserver"), f"--etcd-servers=http://127.0.0.1:{self.etcd_port}",
            "--bind-address=127.0.0.1", f"--secure-port={self.port}", f"--cert-dir={self.folder}/certs",
            f"--token-auth-file={self.folder}/tokens.csv", "--authorization-mode=RBAC",
            f"--service-account-key-file={self.folder}/account.key", f"--service-account-issuer={ISSUER}",
            f"--service-account-signing-key-file={self.folder}/account.key", "--service-cluster-ip-range=10.0.0.0/24",
            "--disable-admission-plugins=ServiceAccount", "--allow-privileged=true", "--anonymous-auth=false",
        )  # fmt: skip
        wait_until(self.ready, "the API server is ready", START_S)

    def stop(self, program: str = "kube-apiserver", kill: bool = False) -> None:
        """`kill`: at once. Asked to end, an API server waits long for those who watch."""
        child = self.children.pop(program, None)
        if child is not None:
            child.kill() if kill else child.terminate()
            try:
                child.wait(STOP_S)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait(STOP_S)

    def ready(self) -> bool:
        if (ended := self.children["kube-apiserver"].poll()) is not None:
            raise AssertionError(f"kube-apiserver ended with {ended}: {self.log('kube-apiserver')}")
        if not self.ca.exists():
            return False
        try:
            return self._ask("GET", "/readyz", None, {})[0] == 200
        except OSError:
            return False

    def log(self, program: str) -> str:
        return (self.folder / f"{program}.log").read_text(errors="replace")[-3000:]

    def controllers(self) -> None:
        """The disruption controller: it fills in what a budget allows."""
        config = {
            "apiVersion": "v1", "kind": "Config", "current-context": "c",
            "clusters": [{"name": "c", "cluster": {"server": self.url, "certificate-authority": str(self.ca)}}],
            "users": [{"name": "u", "user": {"token": ADMIN}}],
            "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
        }  # fmt: skip
        (self.folder / "admin.json").write_text(json.dumps(config))  # a kubeconfig may be JSON
        self._run(
            "kube-controller-manager", str(PROGRAMS / "kube-controller-manager"), "--controllers=disruption",
            f"--kubeconfig={self.folder}/admin.json", "--leader-elect=false", "--secure-port=0", "--port=0",
        )  # fmt: skip

    def _run(self, name: str, *command: str) -> None:
        with (self.folder / f"{name}.log").open("ab") as output:
            self.children[name] = subprocess.Popen(command, stdout=output, stderr=output, cwd=self.folder)

    def etcd(self) -> None:
        peer = free_port()
        self._run(
            "etcd", "etcd", f"--data-dir={self.folder}/etcd",
            f"--listen-client-urls=http://127.0.0.1:{self.etcd_port}",
            f"--advertise-client-urls=http://127.0.0.1:{self.etcd_port}",
            f"--listen-peer-urls=http://127.0.0.1:{peer}", *(() if self.synced else ("--unsafe-no-fsync",)),
        )  # fmt: skip


def _is_built() -> bool:
    """Return whether the programs are there. Fails if nothing builds them."""
    if PROGRAMS.exists():
        return True
    with LOCK.open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    assert PROGRAMS.exists(), f"the build of the API server failed: {LOG.read_text()[-2000:]}"
    return True


@contextmanager
def kubernetes(folder: Path, synced: bool = False) -> Iterator[KubernetesServer]:
    """A server without any node, once it is built. The API server is stopped before etcd, or it would wait for it.

    `synced`: its etcd waits for the disk.
    """
    wait_until(_is_built, "the build of the API server that tests/system_setup.sh began", BUILD_S, 1.0)
    key = rsa.generate_private_key(65537, 2048)
    server = KubernetesServer(folder, free_port(), free_port(), key, synced)
    (folder / "account.key").write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.TraditionalOpenSSL, serialization.NoEncryption()
        )
    )
    (folder / "tokens.csv").write_text(f'{ADMIN},admin,admin,"system:masters"\n')
    try:
        server.etcd()
        server.start()
        server.controllers()
        yield server
    finally:
        for program in ("kube-controller-manager", "kube-apiserver", "etcd"):
            server.stop(program)
