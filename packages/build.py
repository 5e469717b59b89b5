#!/usr/bin/env python3
"""`make packages`: drover-agent, drover-collector and drover-dashboard as .deb and .rpm, out of `make dist`'s bundles.

    dist/drover-agent_0.2.0+py3.11_amd64.deb    for Debian 12; --python 3.12: Ubuntu 24.04; 3.13: Debian 13
    dist/drover-agent-0.2.0-1.py311.x86_64.rpm  for distributions with a package python3.11

Each has a Python environment of its own (tree.py). It needs dpkg-deb, rpmbuild (Debian: `apt-get install rpm`) and
that Python with pip, for the bytecode. Two runs from one commit give the same bytes.

    python packages/build.py [--only agent] [--kind deb] [--python 3.12] [--version 0.2.1] [--bundles FOLDER]
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import deb
import rpm
from tree import DEBIAN_MACHINES, PACKAGES, ROOT, Package, PackageError, manifest, stage, unpack

NEEDED = {"deb": "dpkg-deb", "rpm": "rpmbuild"}


def bundles(folder: Path, version: str, machine: str, python: str, wanted: list[Package]) -> None:
    """Make the bundles that are not there: `make dist` compares each wheel with ansible/locks/."""
    for name in sorted({package.bundle for package in wanted}):
        if not (folder / f"drover-{name}-{version}-{machine}.tar.gz").exists():
            command = [sys.executable, str(ROOT / "ansible/dist.py"), "--only", name, "--version", version]
            command += ["--machine", machine, "--python", python, "--out", str(folder)]
            if subprocess.run(command, stdout=subprocess.DEVNULL, check=False).returncode:
                raise PackageError(f"`make dist` failed for the bundle {name}: see above")


def build(package: Package, kinds: list[str], args: argparse.Namespace) -> list[Path]:
    with tempfile.TemporaryDirectory(prefix=f"{package.full}-") as folder:
        packed = args.bundles / f"drover-{package.bundle}-{args.version}-{args.machine}.tar.gz"
        wheels = unpack(packed, Path(folder) / "bundle")
        if args.python not in str(manifest(wheels)["python"]):
            raise PackageError(f"{packed} is not for Python {args.python}; delete it and run `make packages` again")
        root = Path(folder) / "root"
        stage(package, wheels, root, args.python)
        made = []
        for kind in kinds:
            copy = Path(folder) / kind
            shutil.copytree(root, copy, symlinks=True, copy_function=os.link)
            builder = deb.build if kind == "deb" else rpm.build
            made.append(builder(package, copy, args.version, args.python, args.machine, args.out))
            shutil.rmtree(copy)
        return made


def check_tools(kinds: list[str], python: str) -> None:
    for program in [*(NEEDED[kind] for kind in kinds), f"python{python}"]:
        if shutil.which(program) is None:
            raise PackageError(f"{program} is not here; on Debian: apt-get install dpkg rpm python3 python3-pip")


def default_version() -> str:
    sys.path.insert(0, str(ROOT / "core"))
    from drover_core import VERSION

    return VERSION


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=[package.name for package in PACKAGES], help="this package alone")
    parser.add_argument("--kind", choices=tuple(NEEDED), help="this kind alone")
    parser.add_argument("--machine", choices=tuple(DEBIAN_MACHINES), default="x86_64")
    parser.add_argument("--python", default="3.11", help="of the distribution that it is for (3.11)")
    parser.add_argument("--version", default=default_version())
    parser.add_argument("--bundles", type=Path, default=ROOT / "build/packages", help="folder of bundles to use")
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    args = parser.parse_args(argv)
    wanted = [package for package in PACKAGES if args.only in (None, package.name)]
    kinds = [kind for kind in NEEDED if args.kind in (None, kind)]
    try:
        check_tools(kinds, args.python)
        args.out.mkdir(parents=True, exist_ok=True)
        bundles(args.bundles, args.version, args.machine, args.python, wanted)
        for package in wanted:
            for path in build(package, kinds, args):
                print(f"{path}  {path.stat().st_size / 1e6:.1f} MB")
    except PackageError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
