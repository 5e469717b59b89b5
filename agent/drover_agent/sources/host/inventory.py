"""What the node is made of, as `host.*` of the inventory: read once, at the agent's start.

Sources: /sys/class/dmi/id (kernel: drivers/firmware/dmi-id.c; serials are readable for root only and left out
otherwise), /proc/cpuinfo, /sys/devices/system/cpu/cpu*/topology (Documentation/ABI/stable/sysfs-devices-system-cpu),
/sys/devices/system/node, os-release(5).
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from drover_agent.sources.host.files import text_of

_DMI = {
    "host.vendor": "sys_vendor",
    "host.product": "product_name",
    "host.serial": "product_serial",
    "host.board_vendor": "board_vendor",
    "host.board": "board_name",
    "host.board_serial": "board_serial",
    "host.bios_vendor": "bios_vendor",
    "host.bios_version": "bios_version",
    "host.bios_date": "bios_date",
}
# What makers leave in place of a value.
_EMPTY = frozenset(
    {"", "none", "default string", "to be filled by o.e.m.", "not specified", "system serial number", "0"}
)


def inventory(proc: Path, sys: Path, root: Path) -> dict[str, str]:
    """Never raises; what cannot be read is left out."""
    found = {
        "host.kernel": _try(proc / "sys/kernel/osrelease"),
        "host.os": _os(root),
        "host.arch": os.uname().machine,
        **_cpu(proc, sys),
        "host.memory_bytes": _memory(proc),
        "host.numa_nodes": str(len(_numbered(sys / "devices/system/node", "node")) or ""),
        "host.container": _container(root),
    }
    for key, file in _DMI.items():
        value = _try(sys / "class/dmi/id" / file)
        found[key] = "" if value.lower() in _EMPTY else value
    return {key: value for key, value in found.items() if value}


def _try(path: Path) -> str:
    try:
        return text_of(path)
    except OSError:
        return ""


def _os(root: Path) -> str:
    for path in (root / "etc/os-release", root / "usr/lib/os-release"):
        if found := re.search(r'^PRETTY_NAME="?([^"\n]+)', _try(path), re.MULTILINE):
            return found[1]
    return ""


def _cpu(proc: Path, sys: Path) -> dict[str, str]:
    """Model, sockets, cores, threads, and whether a hypervisor is below."""
    try:
        with (proc / "cpuinfo").open("rb", buffering=0) as file:  # one CPU's part; there may be hundreds
            text = file.read(8192).decode("ascii", "replace")
    except OSError:
        text = ""
    model = re.search(r"^(?:model name|Model|cpu model)\s*: (.+)$", text, re.MULTILINE)
    flags = re.search(r"^flags\s*:.*\bhypervisor\b", text, re.MULTILINE)
    folder = sys / "devices/system/cpu"
    sockets, cores, threads = set(), set(), 0
    for name in _numbered(folder, "cpu"):
        socket = _try(folder / name / "topology/physical_package_id")
        if socket:  # a CPU that is switched off has none
            threads += 1
            sockets.add(socket)
            cores.add((socket, _try(folder / name / "topology/core_id")))
    return {
        "host.cpu": model[1].strip() if model else "",
        "host.sockets": str(len(sockets) or ""),
        "host.cores": str(len(cores) or ""),
        "host.cpus": str(threads or ""),
        "host.hypervisor": _try(sys / "hypervisor/type") or ("yes" if flags else "no" if text else ""),
    }


def _memory(proc: Path) -> str:
    found = re.search(r"^MemTotal:\s+(\d+) kB", _try(proc / "meminfo"), re.MULTILINE)
    return str(int(found[1]) * 1024) if found else ""


def _container(root: Path) -> str:
    """What kind of container the agent runs in, "no" for none: the marks that each kind leaves in its root."""
    if "KUBERNETES_SERVICE_HOST" in os.environ:
        return "kubernetes"
    if kind := _try(root / "run/systemd/container"):
        return kind
    if (root / ".dockerenv").exists():
        return "docker"
    return "podman" if (root / "run/.containerenv").exists() else "no"


def _numbered(folder: Path, prefix: str) -> list[str]:
    try:
        return [name for name in os.listdir(folder) if re.fullmatch(rf"{prefix}\d+", name)]  # noqa: PTH208  # names only
    except OSError:
        return []
