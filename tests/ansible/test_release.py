"""Releases side by side on one machine, out of bundles made here of one small wheel."""

from __future__ import annotations

import base64
import ensurepip
import hashlib
import json
import platform
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

RELEASE = Path(__file__).resolve().parents[2] / "ansible/release.py"
# Debian keeps the wheels of ensurepip in a folder of their own.
PIP_WHEELS = (Path(ensurepip.__file__).parent / "_bundled", Path("/usr/share/python-wheels"))
PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"


def wheel(folder: Path, version: str) -> Path:
    """One that gives a command `drover-said`, which prints its version."""
    info, path = f"drover-{version}.dist-info", folder / f"drover-{version}-py3-none-any.whl"
    files = {
        "drover_said.py": f"def main():\n    print({version!r})\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: drover\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": "[console_scripts]\ndrover-said = drover_said:main\n",
    }
    record = "".join(
        f"{name},sha256={base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b'=').decode()},"
        f"{len(text.encode())}\n"
        for name, text in files.items()
    )
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in (files | {f"{info}/RECORD": f"{record}{info}/RECORD,,\n"}).items():
            archive.writestr(name, text)
    return path


def bundle(folder: Path, version: str, python: str = PYTHON, machine: str = "") -> Path:
    base = folder / f"bundle-{version}"
    (base / "wheels").mkdir(parents=True)
    digest = hashlib.sha256(wheel(base / "wheels", version).read_bytes()).hexdigest()
    (base / "requirements.txt").write_text(f"drover=={version} --hash=sha256:{digest}\n")
    manifest = {"version": version, "python": [python], "machine": machine or platform.machine(), "contents": digest}
    (base / "MANIFEST.json").write_text(json.dumps(manifest))
    pip = next(wheel for folder in PIP_WHEELS for wheel in folder.glob("pip-*.whl"))
    shutil.copy2(pip, base)
    shutil.copy2(RELEASE, base)
    return base


def do(program: Path, what: str, prefix: Path, *more: str) -> dict[str, Any]:
    command = [sys.executable, str(program), what, *more, "--prefix", str(prefix)]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    if found.returncode:
        assert found.returncode == 2, found.stderr
        return {"error": found.stderr.strip()}
    return dict(json.loads(found.stdout))


def said(prefix: Path) -> str:
    return subprocess.run([prefix / "bin/drover-said"], capture_output=True, text=True, check=True).stdout.strip()


def test_install_again_upgrade_and_back(tmp_path: Path) -> None:
    prefix = tmp_path / "opt"
    old, new = bundle(tmp_path, "0.1.0"), bundle(tmp_path, "0.2.0")
    assert do(old / "release.py", "install", prefix) == {"changed": True, "version": "0.1.0", "previous": None}
    assert said(prefix) == "0.1.0"
    assert "error" in do(prefix / "release.py", "rollback", prefix)
    assert do(old / "release.py", "install", prefix)["changed"] is False

    assert do(new / "release.py", "install", prefix) == {"changed": True, "version": "0.2.0", "previous": "0.1.0"}
    assert said(prefix) == "0.2.0"
    assert do(prefix / "release.py", "rollback", prefix)["version"] == "0.1.0"
    assert said(prefix) == "0.1.0"
    assert do(prefix / "release.py", "status", prefix)["releases"] == ["0.1.0", "0.2.0"]

    (prefix / "kept").write_text("somebody's")
    assert do(prefix / "release.py", "remove", prefix)["changed"] is True
    assert [path.name for path in prefix.iterdir()] == ["kept"]


def complete(prefix: Path, *versions: str) -> None:
    """Releases as an installation leaves them, without what is in them."""
    for version in versions:
        (prefix / "releases" / version).mkdir(parents=True)
        (prefix / "releases" / version / ".complete").touch()


def test_an_agent_next_to_a_collector_goes_forward_and_back_for_itself(tmp_path: Path) -> None:
    prefix, link = tmp_path / "opt", ("--link", "agent")
    complete(prefix, "0.1.0")
    assert do(RELEASE, "use", prefix, "0.1.0")["version"] == "0.1.0"
    assert do(RELEASE, "use", prefix, "0.1.0", *link) == {"changed": True, "version": "0.1.0", "previous": None}
    for version in ("0.2.0", "0.3.0", "0.4.0"):  # the collector's alone
        complete(prefix, version)
        do(RELEASE, "use", prefix, version)
    assert do(RELEASE, "status", prefix, *link)["version"] == "0.1.0"
    assert do(RELEASE, "status", prefix)["releases"] == ["0.1.0", "0.3.0", "0.4.0"]  # what a link names is never pruned

    assert do(RELEASE, "use", prefix, "0.4.0", *link)["changed"] is True
    assert do(RELEASE, "use", prefix, "0.4.0", *link)["changed"] is False
    assert do(RELEASE, "rollback", prefix, *link)["version"] == "0.1.0"
    assert do(RELEASE, "status", prefix)["version"] == "0.4.0"
    assert "is not under" in do(RELEASE, "use", prefix, "0.9.0", *link)["error"]
    assert do(RELEASE, "remove", prefix)["changed"] is True
    assert not prefix.exists()


def test_an_agent_that_comes_first_leaves_programs_for_people(tmp_path: Path) -> None:
    prefix = tmp_path / "opt"
    complete(prefix, "0.1.0")
    (prefix / "releases/0.1.0/bin").mkdir()
    do(RELEASE, "use", prefix, "0.1.0", "--link", "agent")
    assert (prefix / "bin").resolve() == (prefix / "releases/0.1.0/bin").resolve()
    assert do(RELEASE, "status", prefix)["version"] == "0.1.0"


def test_a_wheel_that_was_changed_is_refused_and_the_release_before_goes_on(tmp_path: Path) -> None:
    prefix = tmp_path / "opt"
    complete(prefix, "0.1.0")
    do(RELEASE, "use", prefix, "0.1.0")
    bad = bundle(tmp_path, "0.2.0")
    with zipfile.ZipFile(bad / "wheels/drover-0.2.0-py3-none-any.whl", "a") as archive:
        archive.writestr("intruder.py", "")
    assert "do not match the hashes" in do(bad / "release.py", "install", prefix)["error"].lower()
    found = do(RELEASE, "status", prefix)
    assert (found["version"], found["releases"]) == ("0.1.0", ["0.1.0"])


def test_a_release_in_use_is_never_replaced_by_another_of_its_version(tmp_path: Path) -> None:
    prefix = tmp_path / "opt"
    complete(prefix, "0.1.0")
    do(RELEASE, "use", prefix, "0.1.0")
    base = bundle(tmp_path, "0.1.0")
    assert "in use and has other contents" in do(base / "release.py", "install", prefix)["error"]


@pytest.mark.parametrize(
    ("given", "expected"), [({"python": "3.1"}, "the bundle is for 3.1"), ({"machine": "vax"}, "the bundle for vax")]
)
def test_a_bundle_for_something_else_says_so(tmp_path: Path, given: dict[str, str], expected: str) -> None:
    assert expected in do(bundle(tmp_path, "0.1.0", **given) / "release.py", "install", tmp_path / "opt")["error"]
    assert not (tmp_path / "opt").exists()


def test_an_installation_by_hand_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "opt/bin").mkdir(parents=True)
    error = do(bundle(tmp_path, "0.1.0") / "release.py", "install", tmp_path / "opt")["error"]
    assert "is in the way" in error
    assert not (tmp_path / "opt/bin").is_symlink()
