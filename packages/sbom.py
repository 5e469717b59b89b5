"""What is in an image, as a CycloneDX bill of materials (https://cyclonedx.org/docs/1.5/json/).

Debian's packages are those that dpkg lists in the base. Wheels are those that the .deb has in its environment; their
hashes are those of ansible/locks/, which `make dist` compared with what it downloaded.
"""

from __future__ import annotations

import re
import subprocess
from datetime import UTC, datetime
from email.parser import HeaderParser
from pathlib import Path

from tree import ROOT, Package, PackageError, epoch_s

MAGIC_FIELDS = {"bomFormat": "CycloneDX", "specVersion": "1.5", "version": 1}


def bill(package: Package, packed: Path, debian: list[str], version: str) -> dict[str, object]:
    """Return the bill of one image; the same for the same parts."""
    parts = [*(_of_debian(line) for line in debian), *_wheels(package, packed)]
    when = datetime.fromtimestamp(epoch_s(), UTC).isoformat()
    own = {"type": "container", "name": package.full, "version": version, "bom-ref": package.full}
    return {**MAGIC_FIELDS, "metadata": {"timestamp": when, "component": own}, "components": parts}


def _of_debian(line: str) -> dict[str, object]:
    name, version, machine = line.split()
    purl = f"pkg:deb/debian/{name}@{version.replace('+', '%2B').replace(':', '%3A')}?arch={machine}"
    return {"type": "library", "name": name, "version": version, "purl": purl, "bom-ref": purl}


def _wheels(package: Package, packed: Path) -> list[dict[str, object]]:
    hashes = locked((ROOT / f"ansible/locks/{package.bundle}-x86_64.txt").read_text())
    found = []
    for text in _metadata(package, packed):
        fields = HeaderParser().parsestr(text)
        name = re.sub(r"[-_.]+", "-", str(fields["Name"])).lower()
        version = str(fields["Version"])
        purl = f"pkg:pypi/{name}@{version}"
        part: dict[str, object] = {
            "type": "library", "name": name, "version": version, "purl": purl, "bom-ref": purl,
        }  # fmt: skip
        if not name.startswith("drover"):
            if (name, version) not in hashes:
                raise PackageError(f"{name} {version} of {packed} is not in ansible/locks; make the package again")
            part["hashes"] = [{"alg": "SHA-256", "content": digest} for digest in hashes[name, version]]
        if licence := fields["License-Expression"]:
            part["licenses"] = [{"expression": licence}]
        found.append(part)
    return sorted(found, key=lambda part: str(part["name"]))


def locked(text: str) -> dict[tuple[str, str], list[str]]:
    """Return (name, version) -> hashes of its wheels, of a lock."""
    found = {}
    for name, version, rest in re.findall(r"^(\S+)==(\S+) (.*)$", text, re.MULTILINE):
        found[name, version] = re.findall(r"sha256:([0-9a-f]{64})", rest)
    return found


def _metadata(package: Package, packed: Path) -> list[str]:
    pattern = f"./{package.environment}/lib/*/site-packages/*.dist-info/METADATA"
    with subprocess.Popen(["dpkg-deb", "--fsys-tarfile", str(packed)], stdout=subprocess.PIPE) as child:
        command = ["tar", "-x", "--wildcards", pattern, "--to-command=cat; printf '\\0'"]
        done = subprocess.run(command, stdin=child.stdout, capture_output=True, text=True, check=False)
    if done.returncode or child.returncode:
        raise PackageError(f"{packed} cannot be read; make it again with `make packages`")
    return [text for text in done.stdout.split("\0") if text]
