"""What `make packages` and `make images` put together, without wheels; `make test-rollout` installs real ones."""

from __future__ import annotations

import importlib
import shutil
import subprocess
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


def module(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "packages"))
    return importlib.import_module(name)


@pytest.fixture
def staged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The agent's tree; its environment is empty but for the files of systemd that a wheel brings."""
    tree = module("tree", monkeypatch)
    package = tree.PACKAGES[0]

    def environment(package: object, wheels: Path, root: Path, python: str) -> None:
        folder = root / f"opt/drover/env/agent/lib/python{python}/site-packages/share/drover/systemd"
        shutil.copytree(ROOT / "agent/systemd", folder)
        (root / "opt/drover/env/agent/bin").mkdir()

    monkeypatch.setattr(tree, "environment", environment)
    monkeypatch.setattr(tree, "compile_all", lambda *_: None)
    monkeypatch.setattr(tree, "settings", lambda package, root, python: _write(root / "etc/drover/agent.toml"))
    tree.stage(package, tmp_path, tmp_path / "root", "3.11")
    return tmp_path / "root"


def _write(path: Path) -> None:
    path.parent.mkdir(parents=True)
    path.write_text('collectors = ["127.0.0.1:7301"]\n')


def test_a_package_has_ansibles_units_and_its_own_settings(staged: Path) -> None:
    found = {path.relative_to(staged).as_posix() for path in staged.rglob("*") if not path.is_dir()}
    units = {path.name for path in (ROOT / "agent/systemd").iterdir() if path.suffix in (".service", ".path", ".timer")}
    assert {Path(name).name for name in found if name.startswith("usr/lib/systemd/system/")} == units
    for name in units:
        assert (staged / "usr/lib/systemd/system" / name).read_bytes() == (ROOT / "agent/systemd" / name).read_bytes()
    assert {"etc/drover/agent.toml", "usr/bin/drover-agent", "opt/drover/bin/drover-agent"} <= found
    assert "/etc/systemd" not in "".join(found)  # nothing is enabled
    program = (staged / "opt/drover/bin/drover-agent").resolve().read_text()
    assert program.startswith("#!/opt/drover/env/agent/bin/python\n")


@pytest.mark.skipif(shutil.which("dpkg-deb") is None, reason="dpkg-deb is not here")
def test_a_deb_keeps_settings_and_its_scripts_are_sound(
    staged: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree, deb = module("tree", monkeypatch), module("deb", monkeypatch)
    made = [deb.build(tree.PACKAGES[0], staged, "1.0", "3.11", "x86_64", tmp_path)]
    control = tmp_path / "control"
    subprocess.run(["dpkg-deb", "--control", str(made[0]), str(control)], check=True)
    assert (control / "conffiles").read_text() == "/etc/drover/agent.toml\n"
    assert "Version: 1.0+py3.11\nArchitecture: amd64\n" in (control / "control").read_text()
    for name in deb.SCRIPTS:
        subprocess.run(["sh", "-n", str(control / name)], check=True)
        text = (control / name).read_text()
        assert "systemctl enable" not in text.replace(tree.PACKAGES[0].first_steps[-1], "")
    listed = subprocess.run(["dpkg-deb", "-c", str(made[0])], check=True, capture_output=True, text=True).stdout
    assert all(line.split()[1] == "root/root" for line in listed.splitlines())


def test_an_rpm_lists_every_file_once_and_keeps_settings(staged: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree, rpm = module("tree", monkeypatch), module("rpm", monkeypatch)
    lines = rpm.file_list(tree.PACKAGES[0], staged)
    paths = [line.split('"')[1] for line in lines]
    assert len(set(paths)) == len(paths)
    files = {f"/{path.relative_to(staged)}" for path in staged.rglob("*") if path.is_symlink() or not path.is_dir()}
    assert files <= set(paths)
    assert '%config(noreplace) %attr(0640,root,drover) "/etc/drover/agent.toml"\n' in lines
    assert not {"/etc", "/opt", "/usr/bin"} & set(paths)  # the system's own


@pytest.mark.parametrize("number", [0, 1, 2])
def test_each_package_has_a_unit_that_exists_and_steps_that_start_it(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = module("tree", monkeypatch).PACKAGES[number]
    names = {path.name for path in ROOT.glob("*/systemd/*")}
    assert {package.service, *package.units, *package.drop_ins} <= names
    assert any(f"systemctl enable --now {package.full}" in step for step in package.first_steps)


@pytest.mark.parametrize("number", [0, 1, 2])
def test_an_image_follows_its_target_of_the_containerfile(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    tree, images = module("tree", monkeypatch), module("images", monkeypatch)
    package = tree.PACKAGES[number]
    text = images.instructions(package)
    assert text.startswith("FROM localhost/drover-base\n")
    assert "COPY opt/drover /opt/drover\n" in text
    assert "--from=" not in text and text.count("FROM ") == 1
    assert f'ENTRYPOINT ["/opt/drover/bin/{package.full}"]' in text
    assert ("USER 1000" in text) == (package.name != "agent")


def test_a_bill_of_materials_takes_hashes_from_the_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    sbom = module("sbom", monkeypatch)
    found = sbom.locked((ROOT / "ansible/locks/agent-x86_64.txt").read_text())
    assert {"grpcio", "protobuf", "psutil", "nvidia-ml-py"} <= {name for name, _ in found}
    assert all(hashes for hashes in found.values())


class Purge:
    """The agent's purge with all its folders below another root, and accounts of a file."""

    def __init__(self, root: Path, text: str) -> None:
        self.root = root
        for top in ("/etc/", "/var/", "/opt/", "/run/"):
            text = text.replace(top, f"{root}{top}")
        self._script = root / "postrm"
        self._script.write_text(text)
        for name in ("userdel", "groupdel"):
            self._program(name, f'echo {name} >> "{root}/accounts"')
        for name in ("etc/drover/agent.toml", "etc/drover/mine.txt", "var/lib/drover/agent/spool/1", "etc/group"):
            self.add(name)
        self.add("etc/passwd", "drover:x:997:997::/var/lib/drover:/usr/sbin/nologin\n")

    def _program(self, name: str, text: str) -> None:
        path = self.root / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)

    def add(self, name: str, text: str = "x\n") -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def has(self, name: str) -> bool:
        return (self.root / name).exists()

    def run(self) -> None:
        environment = {"PATH": f"{self.root}/bin:/usr/bin:/bin"}
        subprocess.run(["sh", str(self._script), "purge"], check=True, env=environment)


@pytest.fixture
def purge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Purge:
    tree = module("tree", monkeypatch)
    return Purge(tmp_path, tree.script(tree.PACKAGES[0], "deb", "postrm"))


@pytest.mark.parametrize("number", [0, 1])
def test_a_service_that_does_not_start_after_an_upgrade_leaves_no_package_half_configured(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its unit goes on trying. dpkg would refuse each later apt-get on that node, also the one that mends it."""
    tree = module("tree", monkeypatch)
    package = tree.PACKAGES[number]
    text = tree.script(package, "deb", "postinst")
    for top in ("/etc/", "/var/", "/opt/", "/run/"):
        text = text.replace(top, f"{tmp_path}{top}")
    (tmp_path / "run/systemd/system").mkdir(parents=True)
    (tmp_path / f"run/{package.full}.was-running").touch()
    (tmp_path / "bin").mkdir()
    programs = {"systemctl": '[ "$1" = daemon-reload ]', "systemd-sysusers": "cat", "systemd-tmpfiles": ":"}
    for name, line in programs.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{line}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    (tmp_path / "postinst").write_text(text)
    for _ in ("it ran before", "it was restarted in place"):
        done = subprocess.run(
            ["sh", str(tmp_path / "postinst"), "configure", "0.1.9"], check=False, capture_output=True, text=True,
            env={"PATH": f"{tmp_path}/bin:/usr/bin:/bin"},
        )  # fmt: skip
        assert (done.returncode, f"journalctl -u {package.service}" in done.stderr) == (0, True), done.stderr


def test_a_purge_of_the_last_package_removes_settings_data_and_the_user(purge: Purge) -> None:
    purge.run()
    assert not purge.has("etc/drover") and not purge.has("var/lib/drover")
    assert (purge.root / "accounts").read_text() == "userdel\n"


@pytest.mark.parametrize("other", ["opt/drover/current", "etc/systemd/system/drover-agent.service"])
def test_a_purge_leaves_an_installation_of_another_way_alone(purge: Purge, other: str) -> None:
    """The package was removed, Ansible installed Drover since, and `apt-get purge` cleans up what was left."""
    purge.add(other)
    purge.run()
    assert purge.has("etc/drover/agent.toml") and purge.has("var/lib/drover/agent/spool/1")
    assert not purge.has("accounts")


def test_a_purge_leaves_the_authoritys_key_and_other_accounts_alone(purge: Purge) -> None:
    purge.add("etc/drover/pki/ca.key")
    purge.run()
    assert purge.has("etc/drover/pki/ca.key") and not purge.has("var/lib/drover/agent")
    (purge.root / "etc/drover/pki/ca.key").unlink()
    purge.add("etc/passwd", "drover:x:1004:1004:Anna Drover:/home/drover:/bin/bash\n")
    purge.run()
    assert not purge.has("etc/drover") and not purge.has("accounts")
