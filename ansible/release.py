#!/usr/bin/env python3
"""Drover's releases on one machine: installs the bundle that this lies in, goes back to the one before, removes all.

Needs Python's standard library only, no internet, no compiler. A release is a virtual environment of its own; one link
says which is in use, so that an upgrade and a way back are one rename:

    PREFIX/releases/0.2.0/     bin, lib, share of that version
    PREFIX/current             -> releases/0.2.0        PREFIX/previous -> releases/0.1.0
    PREFIX/bin, PREFIX/share   -> current/bin, current/share: what units and people name
    PREFIX/agent, agent-previous   the same of an agent next to a collector, which goes forward and back for itself

    ./release.py install            what is running goes on with the old files until it is restarted
    PREFIX/release.py use VERSION   one that is there
    PREFIX/release.py rollback      to `previous`
    PREFIX/release.py status        which are there
    PREFIX/release.py remove        all of PREFIX that this program made; settings and data stay

With `--link agent` the first four speak of that link.

Each prints one JSON line; `changed` says whether anything was done. Exit code 2: it could not, with the reason.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

KEPT = 3  # releases: the current one, that before it, and one more
PIP_S = 900
COMPLETE = ".complete"  # in a release that was installed to its end
LINKS = ("bin", "share")
BEFORE = {"current": "previous", "agent": "agent-previous"}


class ReleaseError(Exception):
    """What is wrong and what to do."""


def install(prefix: Path, bundle: Path, link: str) -> dict[str, Any]:
    """
    Raises:
        ReleaseError: nothing has changed but a release that nothing uses.
    """
    manifest = _manifest(bundle)
    for path in (prefix / name for name in (link, "current", *LINKS)):
        if path.exists() and not path.is_symlink():
            text = f"{path} is in the way, of an installation by hand (`python3 -m venv`)"
            raise ReleaseError(f"{text}: stop its services, move {prefix} aside and try again")
    made = _build(prefix / "releases" / str(manifest["version"]), bundle, manifest)
    own = prefix / "release.py"
    text = Path(__file__).read_bytes()
    if not own.exists() or own.read_bytes() != text:
        _write(own, text)
    found = use(prefix, str(manifest["version"]), link)
    return found | {"changed": made or found["changed"]}


def use(prefix: Path, version: str, link: str) -> dict[str, Any]:
    """
    Raises:
        ReleaseError: it is not there.
    """
    if not (prefix / "releases" / version / COMPLETE).exists():
        raise ReleaseError(f"release {version} is not under {prefix}; install its bundle")
    before = _target(prefix / link)
    if before != version:
        if before is not None:
            _link(prefix / BEFORE[link], f"releases/{before}")
        _link(prefix / link, f"releases/{version}")
    # `bin` and `share` are of `current`: units and people need them, whichever came first.
    moved = [] if (prefix / "current").is_symlink() else [_link(prefix / "current", f"releases/{version}")]
    moved += [_link(prefix / name, f"current/{name}") for name in LINKS]
    _prune(prefix)
    return {"changed": before != version or any(moved), "version": version, "previous": before}


def rollback(prefix: Path, link: str) -> dict[str, Any]:
    """
    Raises:
        ReleaseError: there is no release before this one.
    """
    version, before = _target(prefix / link), _target(prefix / BEFORE[link])
    if before is None or before == version or not (prefix / "releases" / before / COMPLETE).exists():
        raise ReleaseError(
            f"no release before {version} is kept under {prefix}; install the bundle of the one you want"
        )
    _link(prefix / link, f"releases/{before}")
    if version is not None:
        _link(prefix / BEFORE[link], f"releases/{version}")
    return {"changed": True, "version": before, "previous": version}


def status(prefix: Path, link: str) -> dict[str, Any]:
    releases = prefix / "releases"
    found = sorted(path.parent.name for path in releases.glob(f"*/{COMPLETE}")) if releases.is_dir() else []
    current, before = _target(prefix / link), _target(prefix / BEFORE[link])
    return {"changed": False, "version": current, "previous": before, "releases": found}


def remove(prefix: Path) -> dict[str, Any]:
    """What else lies in PREFIX stays, and PREFIX with it."""
    changed = (prefix / "releases").is_dir()
    for name in (*LINKS, *BEFORE, *BEFORE.values()):
        if (prefix / name).is_symlink():
            (prefix / name).unlink()
            changed = True
    shutil.rmtree(prefix / "releases", ignore_errors=True)
    (prefix / "release.py").unlink(missing_ok=True)
    if prefix.is_dir() and not any(prefix.iterdir()):
        prefix.rmdir()
    return {"changed": changed, "version": None, "previous": None}


def _manifest(bundle: Path) -> dict[str, Any]:
    try:
        manifest: dict[str, Any] = json.loads((bundle / "MANIFEST.json").read_bytes())
    except (OSError, ValueError) as error:
        raise ReleaseError(f"{bundle} is no bundle of Drover ({error}); unpack one that `make dist` made") from None
    if not re.fullmatch(r"[0-9A-Za-z][0-9A-Za-z.+!_-]*", str(manifest.get("version", ""))):
        raise ReleaseError(f"{bundle}/MANIFEST.json has no version that could name a folder; make the bundle again")
    python, machine = f"{sys.version_info.major}.{sys.version_info.minor}", platform.machine()
    if python not in manifest["python"]:
        one = ", ".join(manifest["python"])
        text = (
            f"this is Python {python}, the bundle is for {one}: name another (ansible_python_interpreter), or make one"
        )
        raise ReleaseError(f"{text} with `make dist`")
    if machine != manifest["machine"]:
        raise ReleaseError(f"this machine is {machine}, the bundle for {manifest['machine']}")
    return manifest


def _build(release: Path, bundle: Path, manifest: dict[str, Any]) -> bool:
    """Whether there was anything to do."""
    wanted = json.dumps(manifest, sort_keys=True)
    done = release / COMPLETE
    if done.exists() and done.read_text() == wanted:
        return False
    if release.exists():
        if done.exists() and release.name in _named(release.parents[1], BEFORE):
            # Replacing files under a running service could leave it with half of each.
            text = f"release {release.name} is in use and has other contents than this bundle of the same version"
            raise ReleaseError(f"{text}; raise the version, or install another one first")
        shutil.rmtree(release)
    release.parent.mkdir(parents=True, exist_ok=True)
    _run([sys.executable, "-m", "venv", "--without-pip", str(release)], os.environ)
    pip = next(bundle.glob("pip-*.whl"), None)
    if pip is None:
        raise ReleaseError(f"{bundle} lacks its pip-*.whl; unpack the bundle again")
    environment = {"PATH": os.environ.get("PATH", ""), "PYTHONPATH": str(pip), "PIP_CONFIG_FILE": os.devnull}
    environment |= {name: value for name, value in os.environ.items() if name in ("HOME", "LANG", "LC_ALL", "TMPDIR")}
    command = [str(release / "bin" / "python"), "-m", "pip", "install", "--quiet", "--no-index", "--no-cache-dir"]
    command += ["--disable-pip-version-check", "--root-user-action=ignore", "--find-links", str(bundle / "wheels")]
    _run([*command, "--require-hashes", "--requirement", str(bundle / "requirements.txt")], environment)
    _write(done, wanted.encode())
    return True


def _run(command: list[str], environment: Any) -> None:
    try:
        found = subprocess.run(
            command, env=dict(environment), capture_output=True, text=True, timeout=PIP_S, check=False
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ReleaseError(f"{command[0]}: {error}") from None
    if found.returncode:
        printed = (found.stderr or found.stdout).strip().splitlines()
        hint = "; on Debian or Ubuntu: apt-get install python3-venv" if "venv" in command else ""
        first = next((line for line in printed if line.startswith("ERROR")), "")
        printed = [first, *(line.strip() for line in printed[-2:] if line != first)]
        raise ReleaseError(f"{' '.join(command[:4])} ... failed: {' / '.join(filter(None, printed))}{hint}")


def _target(link: Path) -> str | None:
    return link.readlink().name if link.is_symlink() else None


def _link(link: Path, target: str) -> bool:
    """Whether it pointed elsewhere; changed in one step, so that there is never none."""
    if link.is_symlink() and link.readlink() == Path(target):
        return False
    new = link.with_name(f".{link.name}.new")
    new.unlink(missing_ok=True)
    new.symlink_to(target)
    new.replace(link)
    return True


def _write(path: Path, content: bytes) -> None:
    new = path.with_name(f".{path.name}.new")
    new.write_bytes(content)
    new.chmod(0o755 if path.suffix == ".py" else 0o644)
    new.replace(path)


def _named(prefix: Path, links: Iterable[str]) -> set[str]:
    """Releases that these links name."""
    return {name for name in (_target(prefix / link) for link in links) if name is not None}


def _prune(prefix: Path) -> None:
    """Older releases, by when they were installed; never one that a link names."""
    used = _named(prefix, (*BEFORE, *BEFORE.values()))
    rest = [path for path in (prefix / "releases").iterdir() if path.name not in used]
    rest.sort(key=lambda path: path.stat().st_mtime, reverse=True)
    for path in rest[max(0, KEPT - len(used)) :]:
        shutil.rmtree(path, ignore_errors=True)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("install", "use", "rollback", "status", "remove"))
    parser.add_argument("version", nargs="?", help="of `use`")
    parser.add_argument("--link", choices=tuple(BEFORE), default="current", help="default current")
    parser.add_argument("--prefix", type=Path, default=Path("/opt/drover"), help="default /opt/drover")
    args = parser.parse_args(argv)
    if (args.what == "use") != (args.version is not None):
        parser.error("a version goes with `use`, and with nothing else")
    prefix = args.prefix.absolute()
    os.umask(0o022)
    try:
        if args.what == "install":
            found = install(prefix, Path(__file__).resolve().parent, args.link)
        elif args.what == "use":
            found = use(prefix, args.version, args.link)
        elif args.what == "remove":
            found = remove(prefix)
        else:
            found = {"rollback": rollback, "status": status}[args.what](prefix, args.link)
    except (ReleaseError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
