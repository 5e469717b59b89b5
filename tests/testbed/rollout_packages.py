"""Packages and images for `make test-rollout`, built as `make packages` and `make images` do."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from drover_core import VERSION
from testbed.rollout_fleet import ROOT, older

OLD, NEW = "0.1.9", VERSION  # OLD is of an earlier commit (rollout_fleet.py)
BUILD_S = 1800


def packages(folder: Path) -> Path:
    """Return the folder of the .debs of OLD and NEW: that of DROVER_PACKAGES, if set and there, else new ones."""
    made = Path(os.environ.get("DROVER_PACKAGES") or folder / "made")
    if not made.exists():
        old = folder / "bundles"
        tree = older(folder)
        options = ["--python", "3.11", "--version", OLD, "--out", str(old)]
        subprocess.run([sys.executable, str(tree / "ansible/dist.py"), *options], check=True, timeout=BUILD_S)
        for version, bundles in ((OLD, old), (NEW, folder / "new")):
            command = [sys.executable, str(ROOT / "packages/build.py"), "--kind", "deb", "--version", version]
            subprocess.run([*command, "--bundles", str(bundles), "--out", str(made)], check=True, timeout=BUILD_S)
    return made


def images(made: Path, folder: Path) -> list[Path]:
    """Return the archives of the images of NEW: those of DROVER_IMAGES, if set and there, else out of `made`."""
    out = Path(os.environ.get("DROVER_IMAGES") or folder)
    if not list(out.glob("*.tar")):
        command = [sys.executable, str(ROOT / "packages/images.py"), "--packages", str(made), "--version", NEW]
        subprocess.run([*command, "--out", str(out)], check=True, timeout=2 * BUILD_S)
    return sorted(out.glob(f"*-{NEW}.tar"))
