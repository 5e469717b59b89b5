"""`drover certs`: what it writes, what it refuses, and that openssl agrees."""

from __future__ import annotations

import json
import re
import stat
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization

from drover_cli.main import main
from drover_cli.pki import authority as certs
from drover_collector.auth.identity import Denied, parse
from drover_core import x509
from testbed.certificates import Fleet


def drover(*words: object) -> int:
    return main(["certs", *map(str, words)])


@pytest.fixture
def ca(tmp_path: Path) -> Path:
    folder = tmp_path / "ca"
    assert drover("init", folder) == 0
    return folder


def openssl(*words: object) -> str:
    return subprocess.run(["openssl", *map(str, words)], check=True, capture_output=True, text=True).stdout


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def fails(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    capsys.readouterr()
    assert drover(*words) == 2
    error = capsys.readouterr().err
    assert error.startswith("drover: ")
    assert error.count("\n") == 1
    return error


def test_an_authority_and_what_openssl_says_of_it(ca: Path) -> None:
    assert mode(ca) == 0o700
    assert mode(ca / "ca.key") == 0o600
    text = openssl("x509", "-in", ca / "ca.pem", "-noout", "-text")
    assert "CA:TRUE, pathlen:0" in text
    assert "Certificate Sign, CRL Sign" in text
    assert "prime256v1" in text


@pytest.mark.parametrize(
    ("words", "names", "usage", "days"),
    [
        (("agent", "r01n01"), "URI:drover://agent/r01n01", "TLS Web Client Authentication", 90),
        (("admin", "alex"), "URI:drover://admin/alex", "TLS Web Client Authentication", 30),
        (("operator", "alex"), "URI:drover://operator/alex", "TLS Web Client Authentication", 30),
        (("viewer", "grüße"), "URI:drover://viewer/gr%C3%BC%C3%9Fe", "TLS Web Client Authentication", 90),
        (("collector", "c1", "--host", "c.example", "10.0.0.5", "::1"),
         "DNS:c.example, IP Address:10.0.0.5, IP Address:0:0:0:0:0:0:0:1", "TLS Web Server Authentication", 90),
    ],
)  # fmt: skip
def test_what_is_issued(ca: Path, words: tuple[str, ...], names: str, usage: str, days: int) -> None:
    assert drover("issue", "--dir", ca, *words) == 0
    (path,) = (ca / words[0]).glob("*.pem")
    key = certs.key_path(path)
    assert mode(key) == 0o600
    assert mode(path) == 0o644
    assert "OK" in openssl("verify", "-CAfile", ca / "ca.pem", path)
    text = openssl("x509", "-in", path, "-noout", "-text")
    for word in (names, usage, "CA:FALSE", "Digital Signature", "prime256v1"):
        assert word in text
    assert "CRL Sign" not in text
    files = x509.read_files(ca / "ca.pem", path, key)  # as services read it
    assert abs(files.own.days_left(datetime.now(UTC).timestamp()) - days) <= 1
    if words[0] != "collector":
        assert str(parse(files.own.uris[0]).name) == words[1]


def test_serials_are_random_and_nothing_shows_a_key(ca: Path, capsys: pytest.CaptureFixture[str]) -> None:
    drover("issue", "--dir", ca, "agent", *(f"n{i}" for i in range(12)))
    serials = {line.serial for line in certs.issued(ca)}
    assert len(serials) == 12
    assert min(map(len, serials)) > 30
    assert drover("list", "--dir", ca) == 0
    assert drover("show", *ca.glob("agent/*.pem")) == 0
    shown = capsys.readouterr()
    assert "PRIVATE" not in shown.out + shown.err
    assert not [line for line in shown.out.splitlines() if len(line) > 200]


def test_nothing_is_replaced_without_force(ca: Path, capsys: pytest.CaptureFixture[str]) -> None:
    drover("issue", "--dir", ca, "agent", "n0")
    before = {path: path.read_bytes() for path in ca.rglob("*") if path.is_file()}
    assert "is there already" in fails(capsys, "init", ca)
    assert "is there already; `drover certs renew" in fails(capsys, "issue", "--dir", ca, "agent", "n0")
    (ca / "agent/n0.pem").unlink()
    assert "is there already" in fails(capsys, "issue", "--dir", ca, "agent", "n0")
    (ca / "agent/n0.pem").write_bytes(before[ca / "agent/n0.pem"])
    assert {path: path.read_bytes() for path in ca.rglob("*") if path.is_file()} == before
    assert drover("issue", "--dir", ca, "agent", "n0", "--force") == 0
    assert (ca / "agent/n0.pem").read_bytes() != before[ca / "agent/n0.pem"]
    assert drover("init", ca, "--force") == 0
    assert (ca / "ca.key").read_bytes() != before[ca / "ca.key"]


def test_one_line_for_each_mistake(ca: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    issue = ("issue", "--dir", ca)
    for name in ("", "a/b", "a b", "..", "x" * 300, "tab\t"):
        assert "is no name for an agent" in fails(capsys, *issue, "agent", name), name
    assert "give a name" in fails(capsys, *issue, "viewer")
    assert "needs --host" in fails(capsys, *issue, "collector")
    assert "neither a host's name nor an address" in fails(capsys, *issue, "collector", "--host", "c.example:7301")
    assert "--host is for collectors" in fails(capsys, *issue, "agent", "n0", "--host", "x")
    assert "at most 825" in fails(capsys, *issue, "agent", "n0", "--days", "4000")
    assert "--out is one file" in fails(capsys, *issue, "agent", "a", "b", "--out", tmp_path / "x.pem")
    assert "no authority there" in fails(capsys, "issue", "--dir", tmp_path, "agent", "n0")
    assert "No such file" in fails(capsys, *issue, "agent", "--fleet", tmp_path / "fleet.toml")
    assert "No such file" in fails(capsys, "show", tmp_path / "x.pem")
    assert "holds no certificate" in fails(capsys, "show", ca / "ca.key")
    assert "name the files to renew" in fails(capsys, "renew", "--dir", ca)
    assert "no certificate in force has this name" in fails(capsys, "revoke", "--dir", ca, "nobody")
    with pytest.raises(SystemExit) as error:  # argparse: the choices are in its line
        drover(*issue, "root", "x")
    assert error.value.code == 2
    assert not list(ca.glob("*/*"))
    (ca / "ca.key").chmod(0o640)
    assert "chmod 600" in fails(capsys, *issue, "agent", "n0")
    (ca / "ca.key").chmod(0o600)
    key = serialization.load_pem_private_key((ca / "ca.key").read_bytes(), None)
    good = (ca / "ca.key").read_bytes()
    locked = serialization.BestAvailableEncryption(b"secret")
    (ca / "ca.key").write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, locked)
    )
    assert "is encrypted; decrypt it" in fails(capsys, *issue, "agent", "n0")
    (ca / "ca.key").write_bytes(b"junk")
    assert "holds no private key" in fails(capsys, *issue, "agent", "n0")
    drover("init", tmp_path / "other")
    (ca / "ca.key").write_bytes((tmp_path / "other/ca.key").read_bytes())
    assert "does not belong to" in fails(capsys, *issue, "agent", "n0")
    (ca / "ca.key").write_bytes(good)
    assert drover(*issue, "agent", "n0") == 0


def test_an_ended_authority(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ca = tmp_path / "ca"
    certs.init(ca, "old", 100, force=False, now=datetime.now(UTC) - timedelta(days=99))
    assert drover("issue", "--dir", ca, "agent", "n0") == 0
    assert "ends with the authority" in capsys.readouterr().err
    certs.init(ca, "old", 100, force=True, now=datetime.now(UTC) - timedelta(days=101))
    assert re.search(
        r"ca\.pem ended at 20.* renew it with `drover certs renew", fails(capsys, "issue", "--dir", ca, "agent", "n1")
    )
    assert drover("renew", "--dir", ca, ca / "ca.pem") == 0
    assert drover("issue", "--dir", ca, "agent", "n1") == 0


def test_a_renewed_authority_keeps_what_it_signed(ca: Path) -> None:
    drover("issue", "--dir", ca, "agent", "n0")
    before, key = (ca / "ca.pem").read_bytes(), (ca / "ca.key").read_bytes()
    assert drover("renew", "--dir", ca, ca / "ca.pem", "--days", "3650") == 0
    assert (ca / "ca.pem").read_bytes() != before
    assert (ca / "ca.key").read_bytes() == key
    assert "OK" in openssl("verify", "-CAfile", ca / "ca.pem", ca / "agent/n0.pem")


def test_renewal_keeps_names_and_makes_new_keys(ca: Path, capsys: pytest.CaptureFixture[str]) -> None:
    drover("issue", "--dir", ca, "agent", "soon", "--days", "10")
    drover("issue", "--dir", ca, "agent", "later", "--days", "80")
    drover("issue", "--dir", ca, "collector", "c1", "--host", "c.example", "10.0.0.5", "--days", "10")
    drover("issue", "--dir", ca, "viewer", "gone", "--days", "10")
    drover("revoke", "--dir", ca, "viewer/gone")
    before = {path: path.read_bytes() for path in ca.glob("*/*")}
    assert drover("renew", "--dir", ca, "--all-expiring-within", "30") == 0
    changed = {str(path.relative_to(ca)) for path, data in before.items() if path.read_bytes() != data}
    assert changed == {"agent/soon.pem", "agent/soon.key", "collector/c1.pem", "collector/c1.key"}
    line = certs.describe(certs.read_certificate(ca / "collector/c1.pem"))
    assert (line.role, line.name) == ("collector", "c1")
    assert certs.hosts_of(certs.read_certificate(ca / "collector/c1.pem")) == ["c.example", "10.0.0.5"]
    x509.read_files(ca / "ca.pem", ca / "agent/soon.pem", ca / "agent/soon.key")
    assert "is revoked" in fails(capsys, "renew", "--dir", ca, ca / "viewer/gone.pem")


def test_what_another_authority_signed_is_not_renewed(
    ca: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stranger = Fleet(tmp_path / "other", "other-ca").issue("agent", "n0")
    assert "is of another authority" in fails(capsys, "renew", "--dir", ca, stranger.cert)


def test_a_whole_fleet_at_once(ca: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fleet = tmp_path / "fleet.toml"
    fleet.write_text('name = "test"\n[[nodes]]\nnames = "n[000-299]"\ngpus = 8\n')
    drover("issue", "--dir", ca, "agent", "n007")
    own = (ca / "agent/n007.pem").read_bytes()
    capsys.readouterr()
    assert drover("issue", "--dir", ca, "agent", "--fleet", fleet) == 0
    assert "299 certificates; 1 were there already" in capsys.readouterr().out
    assert (ca / "agent/n007.pem").read_bytes() == own
    assert len(list((ca / "agent").glob("*.pem"))) == len(list((ca / "agent").glob("*.key"))) == 300
    assert len({line.serial for line in certs.issued(ca)}) == 300
    assert "OK" in openssl("verify", "-CAfile", ca / "ca.pem", ca / "agent/n299.pem")


def test_revoked_by_name_with_all_that_was_issued_under_it(ca: Path, capsys: pytest.CaptureFixture[str]) -> None:
    drover("issue", "--dir", ca, "agent", "n0")
    drover("renew", "--dir", ca, ca / "agent/n0.pem")
    drover("issue", "--dir", ca, "viewer", "n0")
    drover("issue", "--dir", ca, "operator", "alex")
    assert "say which, as in agent/n0" in fails(capsys, "revoke", "--dir", ca, "n0")
    assert drover("revoke", "--dir", ca, "agent/n0") == 0
    by_name = {int(line.serial, 16) for line in certs.issued(ca) if line.uri == "agent/n0"}
    assert len(by_name) == 2
    denied = Denied(ca / "denied.txt")  # as the collector reads it
    assert denied.serials() == by_name
    alex = next(line for line in certs.issued(ca) if line.name == "alex")
    colons = ":".join(re.findall("..", f"{int(alex.serial, 16):040x}"))
    assert drover("revoke", "--dir", ca, colons, "drover://agent/n0", "00AB12CD34EF") == 0
    assert denied.serials() == by_name | {int(alex.serial, 16), 0xAB12CD34EF}
    assert mode(ca / "denied.txt") == 0o644
    capsys.readouterr()
    assert drover("list", "--dir", ca, "--json") == 0
    states = {(line["role"], line["name"], line["state"]) for line in json.loads(capsys.readouterr().out)}
    assert states == {
        ("authority", "drover-ca", "good"),
        ("agent", "n0", "denied"),
        ("viewer", "n0", "good"),
        ("operator", "alex", "denied"),
    }


def test_a_full_disk_leaves_the_old_files(
    ca: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    drover("issue", "--dir", ca, "agent", "n0")
    before = (ca / "agent/n0.pem").read_bytes(), (ca / "agent/n0.key").read_bytes()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device", str(ca / "agent/n0.key.new"))

    monkeypatch.setattr("os.fsync", full)
    assert "No space left on device" in fails(capsys, "issue", "--dir", ca, "agent", "n0", "--force")
    assert ((ca / "agent/n0.pem").read_bytes(), (ca / "agent/n0.key").read_bytes()) == before


def test_cryptography_is_imported_by_this_command_only() -> None:
    code = (
        "import sys; from drover_cli.main import build_parser; build_parser();"
        "import drover_agent.main, drover_collector.main, drover_dashboard.client, drover_cli.client;"
        "sys.exit('cryptography' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
