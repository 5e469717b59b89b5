"""The NVIDIA library: why the loader does not take it, and whether the one in this process is still the node's."""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Iterable
from pathlib import Path

SONAME = "libnvidia-ml.so.1"
NOT_FOUND = f"{SONAME} was not found: install the NVIDIA driver if this node has GPUs"
# Where drivers, containers and WSL put it; the loader's own list is longer, and names the file itself when it finds it.
FOLDERS = (
    "/lib64", "/usr/lib64", "/lib/x86_64-linux-gnu", "/usr/lib/x86_64-linux-gnu", "/lib/aarch64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu", "/lib", "/usr/lib", "/usr/local/lib", "/usr/local/nvidia/lib64",
    "/run/nvidia/driver/usr/lib64", "/run/nvidia/driver/usr/lib/x86_64-linux-gnu", "/usr/lib/wsl/lib",
)  # fmt: skip


def why_not_loaded(folders: Iterable[str] = FOLDERS) -> str:
    """Return why the loader does not load the library, in its own words, then ": " and what to do; "" when it does.

    nvidia-ml-py reports every failure of the loader as "not found", and drops the loader's words.
    """
    try:
        ctypes.CDLL(SONAME)
    except OSError as error:
        words = str(error)
    else:
        return ""
    if not words.startswith(f"{SONAME}:"):  # glibc names the file that it opened, or the part that the file needs
        return _found(words, "")
    # It opened none. It passes over one of another architecture or without permission as if there were none.
    searched = [part for part in os.environ.get("LD_LIBRARY_PATH", "").split(":") if part]
    paths = [Path(folder) / SONAME for folder in [*searched, *folders]]
    there = [path for path in paths if os.path.lexists(path)]
    for path in there:
        if why := _unusable(path):
            return _found(words, f"{path} {why}")
    if there:
        return _found(words, f"{there[0]} is in none of the folders that the loader searches")
    return NOT_FOUND


def _found(words: str, why: str) -> str:
    """The loader's words come with ";" for ":", as the first ": " parts what is wrong from what to do."""
    detail = "; ".join(filter(None, (why, f"the loader says {words!r}"))).replace(": ", "; ")
    return (
        f"{SONAME} was found and could not be loaded ({detail}): install the NVIDIA driver's libraries for this machine"
        f" ({platform.machine()}) again, whole and readable for the agent's user; `ldconfig -p` lists what is found"
    )


def _unusable(path: Path) -> str:
    """What is wrong with a file that the loader passes over; "" where nothing is seen."""
    try:
        with path.open("rb") as file:
            head = file.read(20)
        with Path("/proc/self/exe").open("rb") as file:
            own = file.read(20)
    except FileNotFoundError:
        return f"links to {path.readlink()}, which is not there" if path.is_symlink() else ""
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    if head[:4] != b"\x7fELF" or len(head) < 20:
        return "is not a library"
    # ELF: byte 4 is the class (1: 32 bits, 2: 64), bytes 18 and 19 the machine (elf.h).
    if head[4] != own[4]:
        return f"is of {32 * head[4]} bits, and this process of {32 * own[4]}"
    return "is of another architecture" if head[18:20] != own[18:20] else ""


def replaced_by(maps: Path = Path("/proc/self/maps")) -> str:
    """The library's file now, when this process has another one loaded; "" when a new process would load the same.

    An upgrade of the driver brings a file with its version in the name, moves the link with the soname to it and
    removes the old file, which stays mapped here. (Inodes are not compared: overlayfs shows others in `maps`.)
    """
    for line in maps.read_text("utf-8", "replace").splitlines():
        path = line.split(maxsplit=5)[5:]
        if not path or "libnvidia-ml.so" not in path[0]:
            continue
        loaded = Path(path[0].removesuffix(" (deleted)"))
        now = (loaded.parent / SONAME).resolve()
        return str(now) if now.exists() and (path[0].endswith(" (deleted)") or now != loaded) else ""
    return ""
