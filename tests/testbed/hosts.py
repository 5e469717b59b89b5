"""Machines with a real systemd and sshd (systemd-nspawn), for the playbooks. They share this machine's network."""

from __future__ import annotations

import contextlib
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from testbed import nvml
from testbed.system_processes import free_port, reachable
from testbed.waiting import wait_until

CACHE = Path("/var/cache/drover-testbed/hosts")
TEMPLATE = CACHE / "template"
PACKAGES = "systemd,systemd-sysv,dbus,python3,python3-venv,openssh-server,iproute2"
DROP_IN = "etc/systemd/system/drover-agent.service.d/nvml.conf"
BUILD_S, BOOT_S, STOP_S = 1800, 60, 30


def template() -> Path:
    """A Debian, made once and kept; a fresh host is an empty layer above it."""
    if not (TEMPLATE / ".complete").exists():
        shutil.rmtree(TEMPLATE, ignore_errors=True)
        TEMPLATE.parent.mkdir(parents=True, exist_ok=True)
        command = ["mmdebstrap", "--quiet", "--variant=minbase", f"--include={PACKAGES}", "bookworm", str(TEMPLATE)]
        subprocess.run(command, check=True, timeout=BUILD_S, stdout=subprocess.DEVNULL)
        (TEMPLATE / ".complete").touch()
    return TEMPLATE


@dataclass(frozen=True, slots=True)
class Host:
    name: str
    port: int  # of its sshd, on 127.0.0.1
    root: Path
    key: Path
    known: Path

    def ssh(self, *command: str, check: bool = True, timeout_s: float = 60) -> str:
        options = ["-i", str(self.key), "-p", str(self.port), "-o", f"UserKnownHostsFile={self.known}"]
        found = subprocess.run(
            ["ssh", *options, "-o", "BatchMode=yes", "root@127.0.0.1", *command],
            capture_output=True, text=True, timeout=timeout_s, check=False,
        )  # fmt: skip
        if check and found.returncode:
            raise RuntimeError(f"{self.name}: {' '.join(command)}: {found.stderr or found.stdout}")
        return found.stdout


def give_gpus(host: Host, folder: Path) -> nvml.FakeNvml:
    """Give a host the stand-in for NVIDIA's library with eight GPUs, which its agent finds when it starts next."""
    library = nvml.build(folder)
    there = host.root / "opt/nvml"
    there.mkdir()
    shutil.copyfile(library, there / nvml.SONAME)
    fake = nvml.FakeNvml(there / "script", library)
    fake.healthy(8)
    for path in (there, *there.iterdir()):
        path.chmod(0o755)
    drop_in = host.root / DROP_IN
    drop_in.parent.mkdir()
    drop_in.write_text(f"[Service]\nEnvironment=LD_LIBRARY_PATH=/opt/nvml {nvml.SCRIPT_VARIABLE}=/opt/nvml/script\n")
    host.ssh("systemctl", "daemon-reload")
    return fake


def take_gpus(host: Host) -> None:
    """Take away what `give_gpus` gave."""
    shutil.rmtree(host.root / "opt/nvml")
    shutil.rmtree((host.root / DROP_IN).parent)
    host.ssh("systemctl", "daemon-reload")


@contextlib.contextmanager
def hosts(folder: Path, names: Sequence[str]) -> Iterator[list[Host]]:
    """Booted, and answering ssh as root with a key of `folder`; gone with all they held when left."""
    template()
    key, known = folder / "id_ed25519", folder / "known_hosts"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True)
    with contextlib.ExitStack() as stack:
        # On a disk, not below /tmp of pytest: an overlay cannot lie on another.
        layers = Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="run-", dir=CACHE, ignore_cleanup_errors=True))
        )
        found = [_boot(stack, layers, name, key, known) for name in names]
        for host in found:
            wait_until(lambda host=host: reachable("127.0.0.1", host.port), f"sshd of {host.name}", BOOT_S)
            scan = ["ssh-keyscan", "-p", str(host.port), "127.0.0.1"]
            with known.open("a") as file:
                subprocess.run(scan, check=True, stdout=file, stderr=subprocess.DEVNULL)
            wait_until(lambda host=host: _running(host), f"systemd of {host.name} to be up", BOOT_S)
        yield found


def _boot(stack: contextlib.ExitStack, layers: Path, name: str, key: Path, known: Path) -> Host:
    upper, work, root = (layers / name / part for part in ("upper", "work", "root"))
    for path in (upper, work, root):
        path.mkdir(parents=True)
    options = f"lowerdir={TEMPLATE},upperdir={upper},workdir={work}"
    subprocess.run(["mount", "-t", "overlay", "overlay", "-o", options, str(root)], check=True)
    stack.callback(subprocess.run, ["umount", "--lazy", str(root)], check=True)
    port = free_port()
    (root / "etc/ssh/sshd_config.d/drover-test.conf").write_text(f"Port {port}\nListenAddress 127.0.0.1\n")
    (root / "root/.ssh").mkdir(mode=0o700, exist_ok=True)
    (root / "root/.ssh/authorized_keys").write_text(key.with_suffix(".pub").read_text())
    (root / "etc/hostname").write_text(f"{name}\n")
    (root / "etc/hosts").write_text("127.0.0.1 localhost\n")
    machine = subprocess.Popen(
        ["systemd-nspawn", "-D", str(root), "--boot", "--register=no", "--keep-unit", "-M", name,
         f"--hostname={name}", "--capability=all", "--link-journal=no", "--console=pipe"],
        stdin=subprocess.DEVNULL, stdout=(layers / name / "console").open("w"), stderr=subprocess.STDOUT,
    )  # fmt: skip
    stack.callback(_off, machine)
    return Host(name, port, root, key, known)


def _off(machine: subprocess.Popen[bytes]) -> None:
    machine.send_signal(signal.SIGTERM)  # a poweroff
    try:
        machine.wait(STOP_S)
    except subprocess.TimeoutExpired:
        machine.kill()
        machine.wait(STOP_S)


def _running(host: Host) -> bool:
    return host.ssh("systemctl", "is-system-running", check=False).strip() in ("running", "degraded")
