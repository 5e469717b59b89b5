"""Build each image twice and compare: docs/evidence/images.md has sizes, digests, parts and a start in namespaces.

    python benchmarks/images_twice.py [--only agent] [--packages dist]

Needs root, mmdebstrap, buildah, podman and runc (Debian), and the .debs of `make packages`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/evidence/images.md"
# A machine whose own limits are lower than podman's wish, or whose cgroups are in hybrid mode, needs these.
LOCAL = ["--ulimit", "nofile=4096:4096", "--ulimit", "nproc=4096:4096"]


def build(only: str | None, packages: Path, out: Path) -> float:
    began = time.monotonic()
    command = [sys.executable, str(ROOT / "packages/images.py"), "--packages", str(packages), "--out", str(out)]
    subprocess.run([*command, *(["--only", only] if only else [])], check=True)
    return time.monotonic() - began


def start(archive: Path, name: str) -> str:
    """Return the first line that the image's program prints in namespaces: read-only, without capabilities."""
    subprocess.run(["podman", "load", "--quiet", "--input", str(archive)], check=True, stdout=subprocess.DEVNULL)
    command = ["podman", "--runtime", "runc", "run", "--rm", *LOCAL, "--read-only", "--cap-drop=all", "--tmpfs", "/tmp"]
    image = f"localhost/{name}:{archive.stem.removeprefix(name + '-')}"
    done = subprocess.run([*command, image, "--help"], check=False, capture_output=True, text=True, timeout=300)
    text = (done.stdout if done.returncode == 0 else done.stderr).strip()
    return f"exit code {done.returncode}: `{text.splitlines()[0][:70]}`"


def rows(first: Path, second: Path) -> list[str]:
    digests = [json.loads((folder / "digests.json").read_text()) for folder in (first, second)]
    found = []
    for name, one in digests[0].items():
        two = digests[1][name]
        archive = next(first.glob(f"{name}-*.tar"))
        parts = json.loads(next(first.glob(f"{name}-*.cdx.json")).read_text())["components"]
        wheels = sum(part["purl"].startswith("pkg:pypi/") for part in parts)
        same = "the same" if one["digest"] == two["digest"] else f"DIFFERS: {two['digest']}"
        found.append(
            f"| {name} | {archive.stat().st_size / 1e6:.1f} | `{one['digest'][:23]}...` | {same} |"
            f" {len(parts) - wheels} and {wheels} | {start(archive, name)} |"
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only")
    parser.add_argument("--packages", type=Path, default=ROOT / "dist")
    args = parser.parse_args()
    git = ["git", "-C", str(ROOT), "log", "-1", "--format=%h %ct"]
    commit, epoch = subprocess.run(git, check=True, capture_output=True, text=True).stdout.split()
    os.environ["SOURCE_DATE_EPOCH"] = epoch
    with tempfile.TemporaryDirectory(prefix="drover-images-") as folder:
        first, second = Path(folder) / "1", Path(folder) / "2"
        took = [build(args.only, args.packages, out) for out in (first, second)]
        table = rows(first, second)
    lines = [
        "# Images: two builds",
        "",
        "<!-- written by benchmarks/images_twice.py -->",
        "",
        f"{time.strftime('%d %B %Y', time.gmtime())}, commit {commit}, SOURCE_DATE_EPOCH {epoch}:"
        f" {' and '.join(f'{seconds:.0f} s' for seconds in took)} on {os.cpu_count()} shared cores.",
        "",
        "| image | MB of the archive | digest | second build | parts: Debian's, wheels | started by podman |",
        "| --- | --- | --- | --- | --- | --- |",
        *table,
        "",
        "An image that is not listed was not built in this run. Started: with a read-only root, without",
        "capabilities, by podman and runc; this machine needs `--runtime runc` (its cgroups are in hybrid",
        "mode, which Debian 12's crun refuses) and `--ulimit` (its own limit is below podman's).",
        "",
    ]
    PAGE.write_text("\n".join(lines))
    print("\n".join(table))


if __name__ == "__main__":
    main()
