"""From nothing to a first incident, as a new user would, by the packages: docs/evidence/first-incident.md.

    python benchmarks/first_incident.py [--packages FOLDER]

A fresh Debian 12 with a real systemd (systemd-nspawn). What is run there are the lines of docs/how-to/install.md, read
from that page; the editor's part is done by this script, and shown. A stand-in for NVIDIA's library then loses a GPU.

Needs root, systemd-nspawn, debootstrap, ssh and gcc. Without --packages it builds them, which takes minutes.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from testbed import nvml
from testbed.hosts import Host, hosts, template
from testbed.system_processes import free_port
from testbed.waiting import wait_until

GUIDE, ROLLOUT = ROOT / "docs/how-to/install.md", ROOT / "docs/evidence/rollout.md"
PAGE = ROOT / "docs/evidence/first-incident.md"
NAMES = ("drover-collector", "drover-agent", "drover-dashboard")
NODE, GPU = "fresh", 3
APT_S, REPORT_S, INCIDENT_S, BUILD_S = 900, 240, 400, 1800
KUBERNETES = "not measured: no kubelet runs here. `tests/deploy` applies the manifests to a real API server"
FLEET = f'[[nodes]]\nnames = "{NODE}"\nrack = "r1"\nsku = "H100-SXM"\ngpus = 8\n'


@dataclass
class Log:
    """What was done, and how long each step took."""

    rows: list[tuple[str, float, str]] = field(default_factory=list)

    def step(self, what: str, do: Callable[[], str]) -> str:
        began = time.monotonic()
        print(f"$ {what}", flush=True)
        seen = do()
        took = time.monotonic() - began
        print(f"  {took:.1f} s: {seen}", flush=True)
        self.rows.append((what, took, seen))
        return seen


def commands(text: str) -> list[str]:
    """Return the lines that the guide has for the machine that gets the packages. Raises ValueError: they are gone."""
    part = text.partition("\n## Packages\n")[2].partition("\n## ")[0]
    found = [line.strip() for line in part.splitlines() if line.startswith("    ")]
    if [line.split()[0] for line in found[:3]] != ["apt-get", "editor", "systemctl"]:
        raise ValueError(f"{GUIDE} has other steps than this script follows: {found[:3]}")
    return found[:3]


def edit(host: Host, path: str, *changes: tuple[str, str]) -> None:
    file = host.root / path.lstrip("/")
    text = file.read_text()
    for before, after in changes:
        if text.count(before) != 1:
            raise ValueError(f"{path} has {text.count(before)} lines with {before}")
        text = text.replace(before, after)
    file.write_text(text)


def settings(host: Host, ports: Sequence[int]) -> str:
    """Do the editor's part. Ports are other ones, because the machine shares those of this one."""
    ingest, api, console = ports
    edit(
        host, "/etc/drover/collector.toml",
        ('listen = "127.0.0.1:7301"', f'listen = "127.0.0.1:{ingest}"'),
        ('listen = "127.0.0.1:7302"', f'listen = "127.0.0.1:{api}"'),
    )  # fmt: skip
    addresses = ('collectors = ["127.0.0.1:7301"]', f'collectors = ["127.0.0.1:{ingest}"]')
    edit(host, "/etc/drover/agent.toml", addresses)
    edit(host, "/etc/drover/dashboard.env", ("7302", f"{api} --port {console}"))
    (host.root / "etc/drover/fleet.toml").write_text(FLEET)
    return "three ports, because other programs here may have them, and fleet.toml with one node of 8 GPUs"


def stand_in(host: Host, folder: Path) -> nvml.FakeNvml:
    """Put the stand-in for NVIDIA's library where the agent finds it, with eight healthy GPUs."""
    library = nvml.build(folder)
    there = host.root / "opt/nvml"
    there.mkdir()
    shutil.copyfile(library, there / nvml.SONAME)
    fake = nvml.FakeNvml(there / "script", library)
    fake.healthy(8)
    for path in (there, *there.iterdir()):
        path.chmod(0o755)
    drop_in = host.root / "etc/systemd/system/drover-agent.service.d/nvml.conf"
    drop_in.parent.mkdir()
    drop_in.write_text(f"[Service]\nEnvironment=LD_LIBRARY_PATH=/opt/nvml {nvml.SCRIPT_VARIABLE}=/opt/nvml/script\n")
    host.ssh("systemctl", "daemon-reload")
    return fake


def rows_of(host: Host, api: int, *words: str) -> list[dict[str, object]]:
    """Return what `drover` prints as JSON; nothing while the collector starts."""
    try:
        text = host.ssh("drover", *words, "--json", f"--collector=localhost:{api}")
    except RuntimeError as error:
        if "does not answer" not in str(error):
            raise
        return []
    return [json.loads(line) for line in text.splitlines()]


def follow(host: Host, packages: Path, folder: Path, log: Log) -> None:
    ports = [free_port() for _ in range(3)]
    api = ports[1]
    install, editor, start = commands(GUIDE.read_text())
    for path in packages.glob("drover-*.deb"):
        shutil.copyfile(path, host.root / "root" / path.name)
    apt = f"cd /root && DEBIAN_FRONTEND=noninteractive {install.replace('apt-get', 'apt-get -y -q')}"
    log.step(install, lambda: last_line(host.ssh(apt, timeout_s=APT_S)))
    log.step(editor, lambda: settings(host, ports))
    fake = stand_in(host, folder)
    log.step(start, lambda: host.ssh(start, timeout_s=120) or "started")

    def reports() -> str:
        wait_until(lambda: any(r.get("last_seen_ms") for r in rows_of(host, api, "nodes")), "the agent", REPORT_S)
        return f"{NODE} reports"

    log.step("drover nodes", reports)
    fake.lose(GPU)

    def opened() -> str:
        found: list[dict[str, object]] = []

        def there() -> bool:
            found[:] = [row for row in rows_of(host, api, "incidents") if NODE in json.dumps(row)]
            return bool(found)

        wait_until(there, "an incident of the lost GPU", INCIDENT_S)
        return str(found[0].get("summary") or found[0].get("title"))

    log.step(f"drover incidents (the stand-in for NVIDIA's library loses GPU {GPU})", opened)
    one = str(rows_of(host, api, "incidents")[0]["id"])
    log.step("drover explain ID", lambda: host.ssh("drover", "explain", one, f"--collector=localhost:{api}").strip()
             .splitlines()[0])  # fmt: skip


def last_line(text: str) -> str:
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")


def built(packages: Path | None, folder: Path, log: Log) -> Path:
    if packages is not None:
        return packages
    out = folder / "made"
    command = [sys.executable, str(ROOT / "packages/build.py"), "--kind", "deb", "--out", str(out)]

    def build() -> str:
        subprocess.run([*command, "--bundles", str(folder / "bundles")], check=True, timeout=BUILD_S)
        return ", ".join(f"{path.name} {path.stat().st_size / 1e6:.0f} MB" for path in sorted(out.glob("*.deb")))

    log.step("make packages", build)
    return out


def ansible() -> str:
    """Return what the last run of `make test-rollout` took from nothing to a watched fleet."""
    text = ROLLOUT.read_text()
    row = re.search(r"\| one command from nothing to a watched fleet \| passed \| (\d+) \|", text)
    date = re.search(r"^(\d+ \w+ \d{4}), commit (\w+)", text, re.MULTILINE)
    if row is None or date is None:
        return "not measured: docs/evidence/rollout.md has no such step"
    return f"{int(row[1]) / 60:.1f} min for four machines, {date[1]}, commit {date[2]} ([log](rollout.md))"


def page(log: Log, version: str) -> str:
    commit = subprocess.run(
        ["git", "-C", str(ROOT), "rev-parse", "--short=8", "HEAD"], capture_output=True, text=True, check=True
    ).stdout.strip()
    of_machine = [row for row in log.rows if not row[0].startswith("make ")]
    minutes = sum(took for _, took, _ in of_machine) / 60
    rows = "\n".join(f"| `{what}` | {took:.1f} | {seen.replace('|', '/')} |" for what, took, seen in log.rows)
    return f"""# From nothing to a first incident

<!-- written by benchmarks/first_incident.py -->

{time.strftime("%-d %B %Y")}, commit {commit}, packages {version}: **{minutes:.1f} min** and
{len(of_machine)} commands on a fresh Debian 12 with systemd, the packages there. Python
{platform.python_version()}, Linux {platform.release()}, 2 shared cores.

| command | s | seen |
| --- | --- | --- |
{rows}

The commands are the lines of [Install](../how-to/install.md#packages), read from that page when
the script runs. `apt-get` downloads what the packages depend on from Debian's mirror. Collector and
agent are on one machine, over loopback.

## The other ways

| way | measured |
| --- | --- |
| [Ansible](../how-to/roll-out.md): one playbook, to a watched fleet over mutual TLS | {ansible()} |
| [Kubernetes](../how-to/kubernetes.md): `kubectl apply -k` | {KUBERNETES} |

What stands in: the C library for NVIDIA's, and the GPU that it loses. A person who reads and types
takes longer.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--packages", type=Path, help="folder with the three .debs (default: they are built)")
    args = parser.parse_args()
    log = Log()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        packages = built(args.packages, folder, log)
        missing = [each for each in NAMES if len(list(packages.glob(f"{each}_*.deb"))) != 1]
        if missing:
            sys.exit(f"{packages}: one .deb each is needed of {', '.join(missing)}")
        version = next(packages.glob(f"{NAMES[0]}_*.deb")).name.split("_")[1]
        template()  # a Debian, which is made once and is not what is measured
        with hosts(folder, (NODE,)) as (host,):
            follow(host, packages, folder, log)
    PAGE.write_text(page(log, version))
    print(f"{PAGE} written")


if __name__ == "__main__":
    main()
