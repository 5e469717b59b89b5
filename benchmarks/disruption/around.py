"""What surrounds the collector of the chaos run: certificates, disks, Slurm, receivers, a driver; and its settings."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from durability.content import GPUS, name

import drover_collector
from disruption.faults_network import role
from disruption.place import Place, Process
from disruption.proxy import Proxy
from disruption.run import Run
from testbed import alertmanager as manager
from testbed import slurm
from testbed.certificates import Fleet as Authority
from testbed.nvml import FakeNvml, build
from testbed.receivers import HttpReceiver
from testbed.system_processes import free_port

STORE_BYTES, SPOOL_BYTES = 768 << 20, 48 << 20
ROLES = {  # which node stands for what; n03 belongs to Slurm too
    "slurm_node": "n02", "hook_node": "n00", "alert_node": "n01", "spool_node": "n04", "cut_node": "n05",
    "clock_node": "n03", "rival_node": "n02", "ending_node": "n01", "denied_node": "n03",
}  # fmt: skip
NODES = 6


def main_place(folder: Path, stack: ExitStack) -> Run:
    """Everything that the main part needs, running; closed with `stack`."""
    agents, api, metrics = free_port(), free_port(), free_port()
    proxy = Proxy(("127.0.0.1", agents))
    stack.callback(proxy.close)
    certificates, issued, authority = issue(folder)
    place = Place(
        folder, NODES, (f"127.0.0.1:{proxy.port}",), {"c1": f"127.0.0.1:{api}"}, certificates=certificates
    )  # fmt: skip
    stack.callback(place.close)
    disk = mounted(folder / "disk", STORE_BYTES, stack)
    store = (disk or folder) / "store"
    spool_disk = mounted(place.journals / ROLES["spool_node"], SPOOL_BYTES, stack)
    hook = HttpReceiver()
    stack.callback(hook.close)
    scheduler = real_slurm(folder / "slurm", stack)
    alerts, alerts_url = real_alertmanager(folder, stack)
    secret = folder / "secret"
    secret.write_text("whsec_" + "QUFB" * 8)
    secret.chmod(0o600)
    (folder / "denied.txt").write_text("")
    (folder / "policy.toml").write_text(enforcing())
    (folder / "fleet.toml").write_text(
        f'[[nodes]]\nnames = "n[00-01,04-05]"\nrack = "r1"\nsku = "H100-SXM"\ngpus = {GPUS}\n'
        f'[[nodes]]\nnames = "n[02-03]"\nrack = "r2"\npool = "slurm"\nsku = "H100-SXM"\ngpus = {GPUS}\n'
        f'[[nodes]]\nnames = "real"\nrack = "r3"\nsku = "H100-SXM"\ngpus = {GPUS}\n'
    )
    text = (
        f'fleet = "{folder}/fleet.toml"\n[store]\nurl = "chdb://{store}"\nkeep_free_bytes = 1048576\n'
        f'[ingest]\nlisten = "127.0.0.1:{agents}"\n[api]\nlisten = "127.0.0.1:{api}"\n'
        f'[metrics]\nlisten = "127.0.0.1:{metrics}"\n[detect]\nlag_s = 2.0\n'
        f'[policy]\npath = "{folder}/policy.toml"\n'
        f'[tls]\nca = "{certificates}/ca.pem"\ncert = "{certificates}/c1.pem"\nkey = "{certificates}/c1.key"\n'
        f'denied_serials_file = "{folder}/denied.txt"\n'
        f'[[notify.webhook]]\nname = "ops"\nurl = "{hook.url}/"\nsecret_file = "{secret}"\nmin_severity = "info"\n'
    )
    if scheduler is not None:
        text += '[act]\nmode = "enforce"\nvalidate = false\n[act.slurm]\nenabled = true\npools = ["slurm"]\n'
        text += f'conf = "{folder}/slurm/slurm.conf"\n'
    if alerts_url:
        text += f'[[notify.alertmanager]]\nname = "am"\nurls = ["{alerts_url}"]\nrepeat_s = 10\n'
    (folder / "c1.toml").write_text(text)
    run = Run(place, folder)
    run.with_ |= ROLES | {
        "proxy": proxy, "disk": disk, "store": store, "spool_disk": spool_disk, "hook": hook, "slurm": scheduler,
        "alertmanager": alerts, "certificates": certificates, "issued": issued, "authority": authority,
        "ingest": f"127.0.0.1:{agents}", "metrics": f"127.0.0.1:{metrics}",
    }  # fmt: skip
    place.start_collector()
    place.start_agents()
    run.with_["nvml"], run.with_["kmsg"] = real_agent(run, proxy.port, stack)
    return run


def enforcing() -> str:
    """The shipped preset with its guard unchanged, allowed to act."""
    preset = Path(drover_collector.__file__).parent / "policy" / "presets" / "nvidia.toml"
    return preset.read_text("utf-8").replace('mode = "observe"', 'mode = "enforce"')


def issue(folder: Path) -> tuple[Path, dict[str, Any], Authority]:
    """A folder with a pair for each who takes part, and ca.pem."""
    authority = Authority(folder / "ca", "chaos-ca")
    at = folder / "certificates"
    at.mkdir()
    (at / "ca.pem").write_bytes(authority.ca.read_bytes())
    issued = {}
    for who in ("c1", "viewer", "real", *(name(number) for number in range(NODES))):
        files = authority.issue(role(who), who)
        shutil.copy(files.cert, at / f"{who}.pem")
        shutil.copy(files.key, at / f"{who}.key")
        issued[who] = files
    return at, issued, authority


def mounted(folder: Path, size: int, stack: ExitStack) -> Path | None:
    """A disk of its own of so many bytes; None where this user may not mount one."""
    folder.mkdir(parents=True)
    words = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(words, capture_output=True, check=False).returncode:
        return None
    stack.callback(subprocess.run, ["umount", "-l", str(folder)], check=False)
    return folder


def real_slurm(folder: Path, stack: ExitStack) -> slurm.Slurm | None:
    if os.geteuid() != 0 or any(shutil.which(program, path=slurm._path()) is None for program in slurm.PROGRAMS):
        return None
    folder.mkdir()
    return stack.enter_context(slurm.running(folder, ("n02", "n03"), GPUS))


def real_alertmanager(
    folder: Path, stack: ExitStack
) -> tuple[tuple[Callable[[], None] | None, Callable[[], None], Callable[[], set[str]]], str]:
    """((start, stop, ids of incidents that fire there), its address); no start where it is not installed."""
    if shutil.which("prometheus-alertmanager") is None:
        return (None, lambda: None, set), ""
    (folder / "alertmanager.yml").write_text("route: {receiver: nobody}\nreceivers: [{name: nobody}]\n")
    port = free_port()
    held: list[Process] = []
    url = f"http://127.0.0.1:{port}"
    words = [
        "prometheus-alertmanager", f"--config.file={folder}/alertmanager.yml", f"--storage.path={folder}/am",
        f"--web.listen-address=127.0.0.1:{port}", "--cluster.listen-address=",
    ]  # fmt: skip

    def start() -> None:
        held.append(Process(folder / "alertmanager.log", *words))

    def stop() -> None:
        held.pop().stop()

    def end() -> None:
        for process in held:
            process.kill()

    def firing() -> set[str]:
        if not manager.ready(url):
            return set()
        return {label for labels in manager.Running((url,)).firing() for label in labels.values()}

    start()
    stack.callback(end)
    return (start, stop, firing), url


def real_agent(run: Run, port: int, stack: ExitStack) -> tuple[FakeNvml | None, Path]:
    """The whole agent on node `real`, its eight GPUs on the stand-in, its kernel log a pipe."""
    folder = run.folder / "real"
    folder.mkdir()
    pipe = folder / "kmsg"
    os.mkfifo(pipe)
    kept = os.open(pipe, os.O_RDWR)
    stack.callback(os.close, kept)
    if shutil.which("gcc") is None:
        return None, pipe
    fake = FakeNvml(folder / "nvml.script", build(folder))
    fake.healthy(GPUS)
    settings = {
        "node": "real", "collectors": f'["127.0.0.1:{port}"]', "spool.dir": str(folder / "spool"), "batch_s": "1",
        "kmsg_path": str(pipe), "steps_socket": "", "kubelet_socket": "", "dcgm_url": "",
        "tls.ca": f"{run['certificates']}/ca.pem", "tls.cert": f"{run['certificates']}/real.pem",
        "tls.key": f"{run['certificates']}/real.key",
    }  # fmt: skip
    words = [sys.executable, "-m", "disruption.quick_agent", "run"]
    for key, value in settings.items():
        words += ["--set", f"{key}={value}"]
    process = Process(run.folder / "real.log", *words, env=fake.env())
    stack.callback(process.kill)
    return fake, pipe
