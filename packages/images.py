#!/usr/bin/env python3
"""`make images`: images of agent, collector and console, out of Debian's packages and ours, without a registry.

    dist/images/drover-agent-0.2.0.tar        an OCI archive: `podman load -i`, `skopeo copy oci-archive:...`
    dist/images/drover-agent-0.2.0.cdx.json   its SBOM (CycloneDX): Debian's packages, and wheels with their hashes
    dist/images/digests.json                  image -> digest and bytes

The base is a Debian 12 with Python and no apt, made by mmdebstrap; what comes on top is what the .deb has below
/opt/drover; the rest is what containers/Containerfile says of each target. Needs mmdebstrap and buildah
(Debian: `apt-get install mmdebstrap buildah`). Two runs from one commit on one state of Debian's archive give the same
digests; --mirror names a snapshot.debian.org address to hold that state.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import sbom
from build import default_version
from deb import version_of
from tree import PACKAGES, ROOT, Package, PackageError, epoch_s, run

PYTHON, SUITE = "3.11", "bookworm"  # Debian 12
INCLUDED = f"python{PYTHON},libstdc++6,ca-certificates,passwd"
NEEDLESS = ("/usr/share/doc/*", "/usr/share/man/*", "/usr/share/info/*", "/usr/share/locale/*")
BASE = "localhost/drover-base"


def base(context: Path, mirror: str | None) -> list[str]:
    """Make the base image; return its packages, `name version architecture` each."""
    archive, listed = context / "base.tar", context / "packages"
    command = ["mmdebstrap", "--quiet", "--variant=essential", f"--include={INCLUDED}"]
    command += [f"--dpkgopt=path-exclude={pattern}" for pattern in NEEDLESS]
    command += ["--dpkgopt=path-include=/usr/share/doc/*/copyright"]
    query = 'dpkg-query --root="$1" --show --showformat="\\${Package} \\${Version} \\${Architecture}\\n"'
    command += [f"--customize-hook={query} > {listed}", SUITE, str(archive)]
    run([*command, *([mirror] if mirror else [])])
    (context / "Containerfile").write_text("FROM scratch\nADD base.tar /\n")
    _buildah(context, BASE, context / "Containerfile")
    return sorted(listed.read_text().splitlines())


def instructions(package: Package) -> str:
    """Return a target of containers/Containerfile with our .deb's files in the place of what it installs itself."""
    text = (ROOT / "containers/Containerfile").read_text()
    found = re.search(rf"^FROM \$\{{BASE\}} AS {package.name}\n(.*?)(?=^FROM |\Z)", text, re.MULTILINE | re.DOTALL)
    if found is None:
        raise PackageError(f"containers/Containerfile has no target {package.name}")
    lines = re.sub(r"^COPY --from=\S+ ", "COPY ", found[1], flags=re.MULTILINE).replace(
        "COPY /opt/drover", "COPY opt/drover"
    )
    return f"FROM {BASE}\nARG SOURCE_DATE_EPOCH\n{lines}"


def image(package: Package, packed: Path, version: str, out: Path) -> dict[str, object]:
    name = f"localhost/{package.full}:{version}"
    with tempfile.TemporaryDirectory(prefix="drover-image-") as folder:
        context = Path(folder)
        _extract(packed, context)
        # Of the Containerfile's health checks.
        (context / "opt/drover/bin/python").symlink_to(f"../env/{package.name}/bin/python")
        path = context / "Containerfile"
        path.write_text(instructions(package))
        _buildah(context, name, path)
        target = out / f"{package.full}-{version}.tar"
        target.unlink(missing_ok=True)
        digest = context / "digest"
        run(["buildah", "push", "--quiet", "--digestfile", str(digest), name, f"oci-archive:{target}"])
        return {"digest": digest.read_text().strip(), "bytes": target.stat().st_size}


def _extract(packed: Path, into: Path) -> None:
    """Only what lies below /opt: users, units and settings are the container's own business."""
    with subprocess.Popen(["dpkg-deb", "--fsys-tarfile", str(packed)], stdout=subprocess.PIPE) as child:
        done = subprocess.run(["tar", "-x", "-C", str(into), "./opt"], stdin=child.stdout, check=False)
    if done.returncode or child.returncode:
        raise PackageError(f"{packed} cannot be unpacked; make it again with `make packages`")


def _buildah(context: Path, name: str, file: Path) -> None:
    command = ["buildah", "build", "--quiet", "--isolation", "chroot", "--layers=false"]
    command += ["--timestamp", str(epoch_s()), "--build-arg", f"SOURCE_DATE_EPOCH={epoch_s()}"]
    run([*command, "--tag", name, "--file", str(file), str(context)])


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=[package.name for package in PACKAGES], help="this image alone")
    parser.add_argument("--version", default=default_version())
    parser.add_argument("--mirror", help="of Debian (that of this machine)")
    parser.add_argument("--packages", type=Path, default=ROOT / "dist", help="folder of the .debs")
    parser.add_argument("--out", type=Path, default=ROOT / "dist/images")
    args = parser.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    wanted = [package for package in PACKAGES if args.only in (None, package.name)]
    digests: dict[str, object] = {}
    try:
        for program in ("mmdebstrap", "buildah"):
            if shutil.which(program) is None:
                raise PackageError(f"{program} is not here; on Debian: apt-get install mmdebstrap buildah")
        with tempfile.TemporaryDirectory(prefix="drover-base-") as folder:
            Path(folder).chmod(0o711)  # mmdebstrap may change its user
            debian = base(Path(folder), args.mirror)
        for package in wanted:
            packed = args.packages / f"{package.full}_{version_of(args.version, PYTHON)}_amd64.deb"
            if not packed.exists():
                raise PackageError(f"{packed} is not there; `make packages` makes it")
            digests[package.full] = found = image(package, packed, args.version, args.out)
            bill = sbom.bill(package, packed, debian, args.version)
            path = args.out / f"{package.full}-{args.version}.cdx.json"
            path.write_text(json.dumps(bill, indent=1) + "\n")
            print(f"{package.full}:{args.version} {found['digest']} {path}")
    except PackageError as error:
        print(error, file=sys.stderr)
        return 2
    (args.out / "digests.json").write_text(json.dumps(digests, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
