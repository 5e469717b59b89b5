"""What each package puts on a machine: the table of packages, and the file tree that dpkg and rpm then carry.

/opt/drover/env/NAME              a Python environment of that package alone, with bytecode, out of a bundle
/opt/drover/bin/PROGRAM           -> ../env/NAME/bin/PROGRAM: what units and people name, as with Ansible
/opt/drover/share/drover/systemd  the units, and the drop-ins that an operator may copy
/usr/lib/systemd/system           the units, the same files that Ansible links
/etc/drover                       settings: conffiles, every key with its default
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tarfile
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
UNITS = Path("usr/lib/systemd/system")
SHARE = Path("opt/drover/share/drover/systemd")
SETTINGS = Path("etc/drover")
DEBIAN_MACHINES = {"x86_64": "amd64", "aarch64": "arm64"}


class PackageError(Exception):
    """What is wrong and what to do."""


@dataclass(frozen=True, slots=True)
class Package:
    """One package.

    Attributes:
        bundle: of `make dist`, that has its wheels. wanted: what pip installs out of it.
        programs: command -> the function that it calls.
        service: the unit that people start. units, drop_ins: what else it has of systemd's files, by name.
        settings: its file below /etc/drover. data: folders that a purge removes.
    """

    name: str
    bundle: str
    wanted: str
    programs: dict[str, str]
    service: str
    settings: str
    units: tuple[str, ...] = ()
    drop_ins: tuple[str, ...] = ()
    data: tuple[str, ...] = ()
    leftovers: tuple[str, ...] = ()
    stop_first: bool = False
    summary: str = ""
    description: str = ""
    first_steps: tuple[str, ...] = ()

    @property
    def full(self) -> str:
        return f"drover-{self.name}"

    @property
    def wheel(self) -> str:
        """Name of Drover's own wheel in the bundle, as wheels spell it."""
        return self.wanted.partition("[")[0].replace("-", "_")

    @property
    def environment(self) -> Path:
        return Path("opt/drover/env") / self.name


PACKAGES = (
    Package(
        name="agent",
        bundle="agent",
        wanted="drover-agent",
        programs={"drover-agent": "drover_agent.main:main"},
        service="drover-agent.service",
        settings="agent.toml",
        units=("drover-probe.path", "drover-probe.service", "drover-renew.service", "drover-renew.timer"),
        drop_ins=("drover.udev.rules", "job-environment.conf", "kubernetes.conf", "probe-group.conf"),
        data=("/var/lib/drover/agent", "/var/lib/drover/probe"),
        leftovers=("agent.*", "enrol.env", "tls/agent.*"),
        summary="telemetry of a GPU node, for Drover's collector",
        description=(
            "Reads the node's GPUs, kernel log, network and jobs each second, spools them on disk and streams them to a"
            " collector. It opens no port, runs as user drover and needs one capability, for the kernel log."
        ),
        first_steps=(
            "set `collectors` and [tls] in /etc/drover/agent.toml",
            "drover-agent check",
            "systemctl enable --now drover-agent",
        ),
    ),
    Package(
        name="collector",
        bundle="server",
        wanted="drover[apprise,certs,collector]",
        programs={"drover": "drover_cli.main:main", "drover-collector": "drover_collector.main:program"},
        service="drover-collector.service",
        settings="collector.toml",
        data=("/var/lib/drover/store", "/var/lib/drover/backups"),
        leftovers=("collector.*", "fleet.toml", "policy.toml", "secrets", "tls/collector.*", "tls/denied.txt"),
        stop_first=True,
        summary="ingest, detection and command line of Drover",
        description=(
            "Takes telemetry of GPU nodes, stores it, finds faults and says why. It observes: nothing is done to a node"
            " unless its settings say otherwise. Has the command line `drover` and its authority for certificates."
        ),
        first_steps=(
            "set [ingest], [api] and [tls] in /etc/drover/collector.toml",
            "drover-collector check --config /etc/drover/collector.toml",
            "systemctl enable --now drover-collector",
            "it observes: no node is drained or reset unless [act] mode says otherwise",
        ),
    ),
    Package(
        name="dashboard",
        bundle="server",
        wanted="drover[dashboard,signin]",
        programs={"drover-dashboard": "drover_dashboard.main:main"},
        service="drover-dashboard.service",
        settings="dashboard.env",
        leftovers=("dashboard.*", "tls/console.*"),
        summary="Drover's console for browsers",
        description=(
            "Shows a fleet's health, incidents and their evidence. It listens on loopback unless its options say"
            " otherwise, and writes nothing."
        ),
        first_steps=(
            "set DROVER_DASHBOARD_OPTIONS in /etc/drover/dashboard.env",
            "systemctl enable --now drover-dashboard",
        ),
    ),
)
DASHBOARD_ENV = """\
# Options of the console: `drover-dashboard --help`. Everyone who reaches it may act: docs/how-to/console.md.
DROVER_DASHBOARD_OPTIONS=--collector 127.0.0.1:7302
"""
PROGRAM = """\
#!/{environment}/bin/python
import sys

from {module} import {function}

sys.exit({function}())
"""


def unpack(bundle: Path, into: Path) -> Path:
    """Return the folder of wheels of a bundle of `make dist`; its manifest says what they may be."""
    if not bundle.exists():
        raise PackageError(f"{bundle} is not there; `make packages` makes it first")
    with tarfile.open(bundle) as archive:
        archive.extractall(into, filter="data")
    return next(into.glob("drover-*/wheels"))


def stage(package: Package, wheels: Path, root: Path, python: str) -> None:
    """Fill `root` with all that a package has, except what dpkg or rpm alone want."""
    environment(package, wheels, root, python)
    programs(package, root)
    units_of(package, _site(package, root, python) / "share/drover/systemd", root)
    shutil.rmtree(_site(package, root, python) / "share")
    settings(package, root, python)
    compile_all(package, root, python)
    _plain_modes(root)


def _site(package: Package, root: Path, python: str) -> Path:
    return root / package.environment / f"lib/python{python}/site-packages"


def environment(package: Package, wheels: Path, root: Path, python: str) -> None:
    """Install out of the bundle's wheels, whose hashes `make dist` compared with the locks; nothing is downloaded."""
    base = root / package.environment
    site = _site(package, root, python)
    site.mkdir(parents=True)
    command = [f"python{python}", "-m", "pip", "--isolated", "install", "--quiet", "--disable-pip-version-check"]
    command += ["--no-index", "--find-links", str(wheels), "--only-binary=:all:", "--no-compile", "--no-cache-dir"]
    # Until 0.1 one wheel held all; a bundle of then still makes a package.
    wanted = package.wanted if any(wheels.glob(f"{package.wheel}-*.whl")) else "drover"
    run([*command, "--root-user-action=ignore", "--target", str(site), wanted])
    shutil.rmtree(site / "bin", ignore_errors=True)  # of dependencies; ours are written below, with their interpreter
    (base / "bin").mkdir()
    (base / "bin/python").symlink_to(f"/usr/bin/python{python}")
    (base / "bin/python3").symlink_to("python")
    text = f"home = /usr/bin\ninclude-system-site-packages = false\nversion = {python}\n"
    (base / "pyvenv.cfg").write_text(text)


def programs(package: Package, root: Path) -> None:
    for folder in ("opt/drover/bin", "usr/bin"):
        (root / folder).mkdir(parents=True, exist_ok=True)
    for name, target in package.programs.items():
        module, _, function = target.partition(":")
        path = root / package.environment / "bin" / name
        path.write_text(PROGRAM.format(environment=package.environment, module=module, function=function))
        path.chmod(0o755)
        (root / "opt/drover/bin" / name).symlink_to(f"../env/{package.name}/bin/{name}")
        (root / "usr/bin" / name).symlink_to(f"/opt/drover/bin/{name}")


def units_of(package: Package, source: Path, root: Path) -> None:
    """Bring the files of systemd out of the wheel: Ansible links the same ones."""
    for name in (package.service, *package.units):
        _copy(source / name, root / UNITS / name)
    for name in (package.service, *package.units, *package.drop_ins):
        _copy(source / name, root / SHARE / name)
    # Of each package by itself: dpkg lets no two packages have one file.
    _copy(source / "drover.sysusers.conf", root / f"usr/lib/sysusers.d/{package.full}.conf")
    _copy(source / "drover.tmpfiles.conf", root / f"usr/lib/tmpfiles.d/{package.full}.conf")


def settings(package: Package, root: Path, python: str) -> None:
    """Write the settings file with every key and its default, as the program itself explains them."""
    path = root / SETTINGS / package.settings
    path.parent.mkdir(parents=True)
    if path.suffix == ".env":
        path.write_text(DASHBOARD_ENV)
        return
    program = root / package.environment / "bin" / package.full
    site = str(_site(package, root, python))
    path.write_text(run([f"python{python}", "-B", "-P", str(program), "config"], {"PYTHONPATH": site}))


def compile_all(package: Package, root: Path, python: str) -> None:
    """Bring bytecode along: the services may not write it. Without times in it, so that two builds are the same."""
    site = _site(package, root, python)
    options = ["-q", "-q", "-s", str(root), "-p", "/", "--invalidation-mode", "unchecked-hash"]
    done = subprocess.run([f"python{python}", "-m", "compileall", *options, str(site)], check=False)
    # Some dependency may ship a file for other versions of Python; the program of this package may not.
    if done.returncode and not list(site.glob("drover_core/__pycache__/*.pyc")):
        raise PackageError(f"compiling {package.full} failed; run it again without -q in packages/tree.py")


def _plain_modes(root: Path) -> None:
    for path in root.rglob("*"):
        if not path.is_symlink():
            runs = path.is_dir() or (path.parent.name == "bin" and path.parent.parent.parent.name == "env")
            path.chmod(0o755 if runs else 0o644)


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)


def script(package: Package, kind: str, name: str) -> str:
    """Return a maintainer script: what is of this package, the functions of all, then the part of dpkg or rpm."""
    steps = "\n".join(f"  {number}. {step}" for number, step in enumerate(package.first_steps, 1))
    rest = [other for other in PACKAGES if other.name != package.name]
    others = [f"/{path}" for other in rest for path in (other.environment, SETTINGS / other.settings)]
    head = {
        "NAME": package.full,
        "SERVICE": package.service,
        "UNITS": " ".join((package.service, *package.units)),
        "SETTINGS": f"/{SETTINGS}/{package.settings}",
        "STOP_FIRST": "yes" if package.stop_first else "no",
        "DATA": " ".join(package.data),
        "LEFTOVERS": " ".join(f"/{SETTINGS}/{one}" for one in package.leftovers),
        "ENVIRONMENT": f"/{package.environment}",
        "OTHERS": " ".join(others),
        "USER_LINE": _user_line(),
        "STEPS": steps,
    }
    variables = "\n".join(f"{key}='{value}'" for key, value in head.items())
    functions = (HERE / "scripts/functions.sh").read_text()
    return f"#!/bin/sh\nset -e\n{variables}\n{functions}{(HERE / 'scripts' / kind / name).read_text()}"


def _user_line() -> str:
    lines = (ROOT / "agent/systemd/drover.sysusers.conf").read_text().splitlines()
    return next(line for line in lines if not line.startswith("#"))


def run(command: list[str], more: dict[str, str] | None = None) -> str:
    """Run it with an environment in which nothing of this checkout's shows through."""
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "LANG", "TMPDIR") if name in os.environ}
    epoch = {"SOURCE_DATE_EPOCH": str(epoch_s()), "TZ": "UTC", "LC_ALL": "C.UTF-8"}
    found = subprocess.run(command, capture_output=True, text=True, check=False, env={**kept, **epoch, **(more or {})})
    if found.returncode:
        raise PackageError(f"{' '.join(command[:5])} ... failed:\n{(found.stderr or found.stdout)[-2000:]}")
    return found.stdout


def epoch_s() -> int:
    """Return the time that every file of a package gets: SOURCE_DATE_EPOCH, else that of the last commit."""
    if given := os.environ.get("SOURCE_DATE_EPOCH"):
        return int(given)
    found = subprocess.run(
        ["git", "-C", str(ROOT), "log", "-1", "--format=%ct"], capture_output=True, text=True, check=False
    )
    if found.returncode:
        raise PackageError("git does not say when this was committed; set SOURCE_DATE_EPOCH")
    return int(found.stdout)


def manifest(wheels: Path) -> dict[str, object]:
    found: dict[str, object] = json.loads((wheels.parent / "MANIFEST.json").read_text())
    return found
