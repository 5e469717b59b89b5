#!/usr/bin/env python3
"""`make dist`: Drover's wheels, and bundles that install it without internet or compiler (release.py).

    dist/drover-0.2.0-py3-none-any.whl          all of it
    dist/drover_agent-0.2.0-py3-none-any.whl    for nodes: no simulator, collector, console or command line
    dist/drover-agent-0.2.0-x86_64.tar.gz       the second one and what it depends on
    dist/drover-server-0.2.0-x86_64.tar.gz      for the collector's machine: collector, console, authority

What a bundle may hold stands in locks/: name, version and hashes of every dependency. Other downloads are refused.

    python ansible/dist.py [--only agent] [--machine aarch64] [--python 3.11 3.12]
    python ansible/dist.py --lock       write the locks again after pyproject.toml's ranges changed; look at the diff
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
PYTHONS = ("3.11", "3.12", "3.13")  # Debian 12, Ubuntu 24.04, Debian 13
MACHINES = ("x86_64", "aarch64")
GLIBCS = ("2014", "_2_17", "_2_28")  # of manylinux: Debian 10, RHEL 8 and newer
PIP = "pip==26.3"  # travels in the bundle: a node's Python may have none


@dataclass(frozen=True, slots=True)
class Bundle:
    """What a role needs.

    Attributes:
        package: folder of its pyproject.toml. extras: of that file.
        loaded: modules that its wheel must be able to import.
    """

    name: str
    package: str
    extras: tuple[str, ...]
    loaded: tuple[str, ...]
    most_mb: float = 1000.0  # of the packed bundle: it goes over ssh to every node

    def lock(self, machine: str) -> Path:
        return HERE / "locks" / f"{self.name}-{machine}.txt"


BUNDLES = (
    Bundle("agent", "agent", (), ("drover_agent.app",), 30.0),
    Bundle(
        "server",
        ".",
        ("apprise", "certs", "collector", "dashboard", "signin"),
        ("drover_collector.pipeline.pipeline", "drover_collector.api.service", "drover_cli.main"),
    ),
)


class DistError(Exception):
    """What is wrong and what to do."""


def project(package: str = ".") -> dict[str, object]:
    return dict(tomllib.loads((ROOT / package / "pyproject.toml").read_text())["project"])


def requirements(bundle: Bundle) -> list[str]:
    """Return the ranges that a bundle's packages must be within, and the pip that travels with them."""
    found = project(bundle.package)
    extras = found["optional-dependencies"]
    assert isinstance(extras, dict) and isinstance(found["dependencies"], list)
    return sorted({*found["dependencies"], *(line for extra in bundle.extras for line in extras[extra]), PIP})


def wheel(bundle: Bundle, version: str, into: Path) -> Path:
    """Build the bundle's own wheel from the files that git tracks, with `version` in place of their own."""
    own = str(project()["version"])
    with tempfile.TemporaryDirectory(prefix="drover-dist-") as folder:
        copy = Path(folder) / "drover"
        listed = _run(["git", "-C", str(ROOT), "ls-files", "-z"]).split("\0")
        for name in filter(None, listed):
            needless = name.startswith(("tests/", "benchmarks/", "docs/")) and not name.startswith("docs/runbooks/")
            if (ROOT / name).is_file() and not needless:
                target = copy / name
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, target)
        if version != own:
            for name in ("pyproject.toml", "core/drover_core/__init__.py"):
                text = (copy / name).read_text()
                if f'"{own}"' not in text:
                    raise DistError(f"{name} does not give the version {own}, as pyproject.toml does")
                (copy / name).write_text(text.replace(f'"{own}"', f'"{version}"', 1))
        _run(
            [
                sys.executable,
                "-m",
                "pip",
                "wheel",
                "--quiet",
                "--no-deps",
                "--wheel-dir",
                str(into),
                str(copy / bundle.package),
            ]
        )
    made = next(into.glob(f"{name_of(bundle)}-*.whl"))
    # A file that git does not track is missing in it: better found here than on the first host that is upgraded.
    others = "[m for m in sys.modules if m.startswith('drover_') and sys.path[0] not in str(sys.modules[m].__file__)]"
    program = (
        f"import sys; sys.path.insert(0, {str(made)!r}); import {', '.join(bundle.loaded)}; sys.exit({others} or 0)"
    )
    _run([sys.executable, "-c", program])
    return made


def download(requirements: Iterable[str], into: Path, python: str, machine: str, *, hashed: Path | None = None) -> None:
    platforms = [part for glibc in GLIBCS for part in ("--platform", f"manylinux{glibc}_{machine}")]
    what = ["--require-hashes", "--requirement", str(hashed)] if hashed is not None else list(requirements)
    _run(
        [sys.executable, "-m", "pip", "download", "--quiet", "--only-binary=:all:", "--implementation", "cp",
         "--python-version", python, *platforms, "--dest", str(into), *what]
    )  # fmt: skip


def name_of(bundle: Bundle) -> str:
    """Return the name of the bundle's own wheel, as wheels spell it."""
    return str(project(bundle.package)["name"]).replace("-", "_")


def lock(bundle: Bundle, machine: str, pythons: Iterable[str]) -> None:
    """Ask the registry what the requirements depend on, and write all of it with hashes."""
    with tempfile.TemporaryDirectory(prefix="drover-lock-") as folder:
        for python in pythons:
            download(requirements(bundle), Path(folder), python, machine)
        text = "# Made by `python ansible/dist.py --lock`; every dependency, direct or not, with its wheels' hashes.\n"
        found = requirements_of(Path(folder))
    names = Counter(re.findall(r"^(\S+)==", found, re.MULTILINE))
    if twice := sorted(name for name, count in names.items() if count > 1):
        raise DistError(
            f"the newest {', '.join(twice)} does not run on every Python, so a lock would have two versions of it:"
            " bound it in pyproject.toml"
        )
    bundle.lock(machine).write_text(text + found)


def requirements_of(folder: Path) -> str:
    hashes: dict[tuple[str, str], set[str]] = defaultdict(set)
    for path in folder.glob("*.whl"):
        name, version = path.name.split("-")[:2]
        hashes[(re.sub(r"[-_.]+", "-", name).lower(), version)].add(hashlib.sha256(path.read_bytes()).hexdigest())
    lines = []
    for (name, version), found in sorted(hashes.items()):
        lines.append(f"{name}=={version} " + " ".join(f"--hash=sha256:{digest}" for digest in sorted(found)))
    return "\n".join(lines) + "\n"


def bundle_up(bundle: Bundle, own: Path, version: str, machine: str, pythons: tuple[str, ...], into: Path) -> Path:
    locked = bundle.lock(machine)
    if not locked.exists():
        raise DistError(f"{locked} is not there; `python ansible/dist.py --lock --machine {machine}` makes it")
    if lacking := unmet(bundle, locked.read_text()):
        raise DistError(
            f"{locked} lacks {', '.join(lacking)}: run `python ansible/dist.py --lock` and look at the diff"
        )
    name = f"drover-{bundle.name}-{version}"
    with tempfile.TemporaryDirectory(prefix="drover-bundle-") as folder:
        base = Path(folder) / name
        wheels = base / "wheels"
        wheels.mkdir(parents=True)
        for python in pythons:
            download((), wheels, python, machine, hashed=locked)
        shutil.move(next(wheels.glob("pip-*.whl")), base)
        shutil.copy2(own, wheels)
        (base / "requirements.txt").write_text(requirements_of(wheels))
        shutil.copy2(HERE / "release.py", base / "release.py")
        contents = hashlib.sha256((base / "requirements.txt").read_bytes()).hexdigest()
        manifest = {
            "version": version,
            "role": bundle.name,
            "machine": machine,
            "python": pythons,
            "contents": contents,
        }
        (base / "MANIFEST.json").write_text(json.dumps(manifest))
        target = into / f"{name}-{machine}.tar.gz"
        with tarfile.open(target, "w:gz", compresslevel=1) as archive:  # wheels are packed already
            archive.add(base, name, filter=_nobody)
    if (size_mb := target.stat().st_size / 1e6) > bundle.most_mb:
        target.unlink()
        raise DistError(f"{name} would have {size_mb:.1f} MB, more than {bundle.most_mb:g}: name fewer with --python")
    return target


def _nobody(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = "root"
    entry.mode = 0o755 if entry.isdir() or entry.name.endswith("release.py") else 0o644
    return entry


def unmet(bundle: Bundle, lock_text: str) -> list[str]:
    """Return the requirements of a bundle that its lock does not meet."""
    locks = dict(re.findall(r"^(\S+)==(\S+) ", lock_text, re.MULTILINE))
    return [line for line in requirements(bundle) if not _is_met(Requirement(line), locks)]


def _is_met(wanted: Requirement, locks: Mapping[str, str]) -> bool:
    version = locks.get(re.sub(r"[-_.]+", "-", wanted.name).lower())
    return version is not None and wanted.specifier.contains(version, prereleases=True)


def _run(command: list[str]) -> str:
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    if found.returncode:
        printed = [line for line in found.stderr.strip().splitlines() if not line.startswith("WARNING")]
        raise DistError(f"{' '.join(command[:4])} ... failed:\n" + "\n".join(printed[-8:]))
    return found.stdout


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=[bundle.name for bundle in BUNDLES], help="this bundle alone")
    parser.add_argument("--machine", choices=MACHINES, default="x86_64")
    parser.add_argument("--python", nargs="+", default=list(PYTHONS), choices=(*PYTHONS, "3.14"))
    parser.add_argument("--version", default=str(project()["version"]), help="in the place of pyproject.toml's")
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    parser.add_argument("--lock", action="store_true", help="write the locks again, build nothing")
    args = parser.parse_args(argv)
    wanted = [bundle for bundle in BUNDLES if args.only in (None, bundle.name)]
    pythons = tuple(args.python)
    try:
        if args.lock:
            for bundle in wanted:
                lock(bundle, args.machine, PYTHONS)
                print(bundle.lock(args.machine).relative_to(ROOT))
            return 0
        args.out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="drover-wheel-") as folder:
            for bundle in wanted:
                own = wheel(bundle, args.version, Path(folder))
                print(shutil.copy2(own, args.out))
                made = bundle_up(bundle, own, args.version, args.machine, pythons, args.out)
                print(f"{made}  {made.stat().st_size / 1e6:.1f} MB")
    except DistError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
