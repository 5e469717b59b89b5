"""Whether the NVIDIA library in this process is still the one that the node would load now."""

from __future__ import annotations

from pathlib import Path

SONAME = "libnvidia-ml.so.1"


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
