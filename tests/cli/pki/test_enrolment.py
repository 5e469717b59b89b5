"""Nodes enrol with a one-time token and renew with what they got: the real agent's command against the real service."""

from __future__ import annotations

import http.client
import json
import socket
import ssl
import stat
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from drover_agent.commands.enrol import SERVER_VARIABLE, TOKEN_VARIABLE
from drover_agent.main import main as agent
from drover_cli.main import main as drover
from drover_cli.pki import authority as certs
from drover_cli.pki import tokens as enrol_tokens
from drover_cli.pki.enrol_commands import fingerprint
from drover_cli.pki.enrolment import (
    MOST_BYTES,
    MOST_CONNECTIONS,
    REFUSALS,
    REFUSALS_S,
    EnrolmentServer,
    EnrolmentService,
    Refusals,
)
from drover_core import x509
from testbed.certificates import Fleet

NODE = "r01n01"
DEADLINE_S = 120


@dataclass(frozen=True)
class Service:
    fleet: Fleet
    address: str
    now: list[float]  # of the refusals' clock

    @property
    def sha256(self) -> str:
        return fingerprint(self.fleet.ca)

    def token(self, node: str = NODE) -> str:
        return enrol_tokens.make(self.fleet.folder, node, 1)

    def ask(self, path: str, body: object, own: Path | None = None, announced: int | None = None) -> tuple[int, str]:
        """What it answers; `own`: with this certificate; `announced`: the body's length as the head has it."""
        context = ssl.create_default_context(cafile=str(self.fleet.ca))
        if own is not None:
            context.load_cert_chain(own, certs.key_path(own))
        host, _, port = self.address.rpartition(":")
        connection = http.client.HTTPSConnection(host, int(port), timeout=DEADLINE_S, context=context)
        head = {} if announced is None else {"Content-Length": str(announced)}
        connection.request("POST", path, body if isinstance(body, bytes) else json.dumps(body), head)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()

    def issued(self) -> list[str]:
        return [line.uri for line in certs.issued(self.fleet.folder)]


@contextmanager
def serving(folder: Path, request_s: float = 10.0) -> Iterator[Service]:
    fleet = Fleet(folder)
    own = fleet.issue("collector", "enrol")
    now = [0.0]
    desk = EnrolmentService(folder, 30, Refusals(lambda: now[0]))
    with EnrolmentServer(("127.0.0.1", 0), desk, own.cert, own.key, request_s=request_s) as server:
        thread = threading.Thread(target=lambda: server.serve_forever(poll_interval=0.01))
        thread.start()
        try:
            yield Service(fleet, f"localhost:{server.server_address[1]}", now)
        finally:
            server.shutdown()
            thread.join(DEADLINE_S)


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    with serving(tmp_path / "ca") as found:
        yield found


@pytest.fixture
def enrol(service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setenv(SERVER_VARIABLE, service.address)
    monkeypatch.setenv(TOKEN_VARIABLE, service.token())
    return ["enrol", "--node", NODE, "--ca-sha256", service.sha256, "--dir", str(tmp_path / "tls")]


def refused(capfd: pytest.CaptureFixture[str], *words: str) -> str:
    capfd.readouterr()
    assert agent([*words]) == 1
    error = capfd.readouterr().err.splitlines()[-1]
    assert error.startswith("drover-agent: ")
    return error


def csr(kind: str = "ec") -> str:
    words = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"] if kind == "ec" else ["-newkey", "rsa:2048"]
    command = ["openssl", "req", "-new", *words, "-nodes", "-keyout", "/dev/null", "-subj", "/CN=drover"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def test_a_node_enrols_with_a_key_that_never_leaves_it(service: Service, enrol: list[str], tmp_path: Path) -> None:
    assert agent(enrol) == 0
    folder = tmp_path / "tls"
    assert sorted(path.name for path in folder.iterdir()) == ["agent.key", "agent.pem", "ca.pem"]
    files = x509.read_files(folder / "ca.pem", folder / "agent.pem", folder / "agent.key")
    assert files.own.uris == (f"drover://agent/{NODE}",)
    assert files.ca == service.fleet.ca.read_bytes()
    assert stat.S_IMODE((folder / "agent.key").stat().st_mode) == 0o400
    (line,) = certs.issued(service.fleet.folder)
    assert (line.uri, int(line.serial, 16)) == (f"agent/{NODE}", files.own.serial)
    secret = files.key.splitlines()[1]
    assert not any(secret in path.read_bytes() for path in service.fleet.folder.rglob("*") if path.is_file())


def test_of_a_token_only_a_hash_is_kept(service: Service) -> None:
    token = service.token()
    (path,) = (service.fleet.folder / "tokens").iterdir()
    assert token.partition(".")[2] not in path.read_text()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_a_token_is_good_once(
    service: Service, enrol: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert agent(enrol) == 0
    before = (tmp_path / "tls/agent.pem").read_bytes()
    assert "the token is refused" in refused(capfd, *enrol, "--force")
    assert "agent.key exists" in refused(capfd, *enrol)
    assert (tmp_path / "tls/agent.pem").read_bytes() == before
    assert service.issued() == [f"agent/{NODE}"]


def test_of_many_that_bring_one_token_at_once_one_gets_a_certificate(service: Service) -> None:
    body = {"node": NODE, "token": service.token(), "csr": csr()}
    found: list[int] = []
    callers = [threading.Thread(target=lambda: found.append(service.ask("/v1/enrol", body)[0])) for _ in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(DEADLINE_S)
    assert sorted(found) == [200, 403, 403, 403]
    assert service.issued() == [f"agent/{NODE}"]


def test_a_token_that_has_ended_or_is_anothers_or_none(service: Service) -> None:
    others = service.token("r01n02")
    guesses = {
        "ended": enrol_tokens.make(service.fleet.folder, NODE, 1, datetime.now(UTC) - timedelta(hours=2)),
        "another's": others,
        "another secret": f"{others.partition('.')[0]}.{'A' * 43}",
        "a path": "../../ca.key.x",
    }
    request = {"node": NODE, "csr": csr()}
    answers = {case: service.ask("/v1/enrol", request | {"token": text}) for case, text in guesses.items()}
    assert {status for status, _ in answers.values()} == {403}
    assert len({text for _, text in answers.values()}) == 1  # nobody learns which of them it was
    assert service.issued() == []
    assert service.ask("/v1/enrol", request | {"node": "r01n02", "token": others})[0] == 200  # not used up by that


def test_guessing_is_slow(service: Service) -> None:
    body = {"node": NODE, "token": f"{'0' * 16}.{'A' * 43}", "csr": csr()}
    assert [service.ask("/v1/enrol", body)[0] for _ in range(REFUSALS + 1)] == [403] * REFUSALS + [429]
    good = body | {"token": service.token()}
    assert service.ask("/v1/enrol", good)[0] == 429  # for a while this address gets nothing, even with a good one
    service.now[0] += REFUSALS_S + 1
    assert service.ask("/v1/enrol", good)[0] == 200


def test_refusals_of_many_addresses_stay_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("drover_cli.pki.enrolment.MOST_ADDRESSES", 10)
    refusals = Refusals(lambda: 0.0)
    for number in range(100):
        refusals.add(f"10.0.0.{number}")
    assert len(refusals._times) == 10


def test_an_authority_with_another_fingerprint_gets_no_token(
    service: Service, enrol: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    enrol[enrol.index(service.sha256)] = fingerprint(Fleet(tmp_path / "other").ca)
    assert "has another authority" in refused(capfd, *enrol)
    assert [path.suffix for path in (service.fleet.folder / "tokens").iterdir()] == [".json"]  # nobody was shown it
    assert not list((tmp_path / "tls").iterdir())


def test_an_impostor_that_shows_the_right_authority_gets_no_token(
    service: Service,
    enrol: list[str],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with serving(tmp_path / "impostor") as impostor:
        monkeypatch.setenv(SERVER_VARIABLE, impostor.address)
        (tmp_path / "impostor/ca.pem").write_bytes(service.fleet.ca.read_bytes())
        assert "nothing was sent to it" in refused(capfd, *enrol)


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"no json", 400),
        (b"[]", 400),
        ({"node": NODE, "token": 7, "csr": ""}, 400),
        ({"node": "../../operator/alex", "token": "x", "csr": ""}, 400),
        ({"node": NODE, "token": "x", "csr": "-----BEGIN CERTIFICATE REQUEST-----\nAAAA\n"}, 400),
    ],
    ids=["no-json", "list", "number", "path", "damaged"],
)
def test_nonsense_is_refused(service: Service, body: object, status: int) -> None:
    assert service.ask("/v1/enrol", body)[0] == status
    assert service.issued() == []


def test_what_is_too_long_is_refused_by_its_head(service: Service) -> None:
    assert service.ask("/v1/enrol", b"", announced=MOST_BYTES + 1)[0] == 413


def test_a_key_of_another_kind_costs_no_token(service: Service) -> None:
    body = {"node": NODE, "token": service.token(), "csr": csr("rsa")}
    assert service.ask("/v1/enrol", body)[0] == 400
    assert service.ask("/v1/enrol", body | {"csr": csr()})[0] == 200


def test_who_holds_all_places_without_a_word_is_cut_off(tmp_path: Path) -> None:
    with serving(tmp_path / "ca", request_s=1.0) as found:
        host, _, port = found.address.rpartition(":")
        held = [socket.create_connection((host, int(port)), DEADLINE_S) for _ in range(MOST_CONNECTIONS)]
        assert [each.recv(1) for each in held] == [b""] * MOST_CONNECTIONS
        status, _ = found.ask("/v1/enrol", {"node": NODE, "token": found.token(), "csr": csr()})
        assert status == 200


def test_who_sends_a_byte_now_and_then_is_cut_off(tmp_path: Path) -> None:
    with serving(tmp_path / "ca", request_s=1.0) as found:
        context = ssl.create_default_context(cafile=str(found.fleet.ca))
        host, _, port = found.address.rpartition(":")
        cut = threading.Event()
        with context.wrap_socket(socket.create_connection((host, int(port)), DEADLINE_S), server_hostname=host) as slow:

            def drip() -> None:
                while not cut.wait(0.05):  # each byte well within the time of one read
                    slow.send(b"x")

            dripping = threading.Thread(target=drip, daemon=True)
            dripping.start()
            with pytest.raises((OSError, EOFError)) as ended:
                if not slow.recv(1):
                    raise EOFError
            cut.set()
            dripping.join(DEADLINE_S)
        assert not isinstance(ended.value, TimeoutError)


def test_no_older_tls_than_1_3(service: Service) -> None:
    context = ssl.create_default_context(cafile=str(service.fleet.ca))
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    host, _, port = service.address.rpartition(":")
    with socket.create_connection((host, int(port)), DEADLINE_S) as raw, pytest.raises(ssl.SSLError, match="VERSION"):
        context.wrap_socket(raw, server_hostname="localhost")


def of_node(folder: Path, service: Service, ends_in: timedelta) -> x509.TlsFiles:
    """A node's folder with a certificate of 90 days that ends so soon."""
    folder.mkdir()
    files = service.fleet.issue("agent", NODE, ends_in=ends_in)
    for source, name in zip(files.paths, ("ca.pem", "agent.pem", "agent.key"), strict=True):
        (folder / name).write_bytes(source.read_bytes())
        (folder / name).chmod(0o600)
    return read(folder)


def read(folder: Path) -> x509.TlsFiles:
    return x509.read_files(folder / "ca.pem", folder / "agent.pem", folder / "agent.key")


def test_a_node_renews_by_the_certificate_in_force(
    service: Service, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "tls"
    before = of_node(folder, service, timedelta(days=10))
    words = ["renew", "--server", service.address, "--dir", str(folder)]
    assert agent([*words, "--within-days", "5"]) == 0
    assert "nothing to do" in capfd.readouterr().out
    assert agent(words) == 0
    after = read(folder)
    assert after.own.uris == before.own.uris
    assert after.own.ends_s > before.own.ends_s
    assert after.key != before.key
    assert service.issued() == [f"agent/{NODE}"]
    assert "it is renewed from" in refused(capfd, *words, "--within-days", "90")  # a new one is not renewed again


def test_a_node_that_renews_too_often_locks_out_nobody_of_its_address(service: Service, tmp_path: Path) -> None:
    """A NAT gives many nodes one address."""
    hasty, other = (service.fleet.issue("agent", name, ends_in=timedelta(days=80)) for name in ("hasty", "other"))
    answers = [service.ask("/v1/renew", {"csr": csr()}, hasty.cert)[0] for _ in range(REFUSALS + 1)]
    assert answers == [409] * REFUSALS + [429]
    assert service.ask("/v1/renew", {"csr": csr()}, other.cert)[0] == 409
    assert service.ask("/v1/enrol", {"node": NODE, "token": service.token(), "csr": csr()})[0] == 200
    guesses = [service.ask("/v1/enrol", {"node": NODE, "token": "x", "csr": csr()})[0] for _ in range(REFUSALS + 1)]
    assert guesses[-1] == 429
    assert service.ask("/v1/renew", {"csr": csr()}, other.cert)[0] == 409, "who has a certificate guesses nothing"


def test_who_is_revoked_or_ended_or_no_agent_does_not_renew(
    service: Service, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    serial = of_node(tmp_path / "tls", service, timedelta(days=10)).own.serial
    assert drover(["certs", "revoke", f"{serial:X}", "--dir", str(service.fleet.folder)]) == 0
    words = ["renew", "--server", service.address, "--dir", str(tmp_path / "tls")]
    assert "is revoked" in refused(capfd, *words)
    person = service.fleet.issue("operator", "alex", ends_in=timedelta(days=1))
    assert service.ask("/v1/renew", {"csr": csr()}, person.cert)[0] == 403
    assert service.ask("/v1/renew", {"csr": csr()})[0] == 403
    stranger = Fleet(tmp_path / "other").issue("agent", NODE, ends_in=timedelta(days=1))
    ended = service.fleet.issue("agent", NODE, ends_in=timedelta(days=-1))
    for files in (stranger, ended):
        with pytest.raises((ssl.SSLError, ConnectionError)):
            service.ask("/v1/renew", {"csr": csr()}, files.cert)
    assert service.issued() == []


def test_tokens_are_made_by_a_command(service: Service, capfd: pytest.CaptureFixture[str]) -> None:
    words = ["certs", "token", "--dir", str(service.fleet.folder)]
    assert drover([*words, NODE, "r01n02", "--json"]) == 0
    made = json.loads(capfd.readouterr().out)
    assert [each["node"] for each in made] == [NODE, "r01n02"]
    assert made[0]["ca_sha256"] == service.sha256
    assert service.ask("/v1/enrol", {"node": NODE, "token": made[0]["token"], "csr": csr()})[0] == 200
    assert drover([*words, NODE, "--hours", "10000"]) == 2
    assert drover([*words, "a/b"]) == 2


def test_a_service_without_its_own_certificate_says_which(service: Service, capfd: pytest.CaptureFixture[str]) -> None:
    words = ["certs", "serve", "--dir", str(service.fleet.folder), "--cert"]
    assert drover([*words, "none.pem"]) == 2
    assert "none.pem: No such file" in capfd.readouterr().err
    assert drover([*words, str(service.fleet.ca), "--listen", "127.0.0.1:1", "--days", "400"]) == 2
    assert "--days 400" in capfd.readouterr().err


def test_tokens_that_ended_long_ago_are_forgotten(service: Service) -> None:
    enrol_tokens.make(service.fleet.folder, NODE, 1, datetime.now(UTC) - timedelta(days=40))
    service.token()
    assert len(list((service.fleet.folder / "tokens").iterdir())) == 1


def test_without_openssl_it_says_so(
    service: Service,
    enrol: list[str],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "openssl is not installed" in refused(capfd, *enrol)
