"""Who may speak for whom."""

from __future__ import annotations

from pathlib import Path

import pytest

from drover_collector.auth.identity import (
    Denied,
    DeniedError,
    Identity,
    IdentityError,
    Role,
    parse,
    peer,
    refusal,
)


def tls(*names: str) -> dict[str, list[bytes]]:
    return {"transport_security_type": [b"ssl"], "x509_subject_alternative_name": [n.encode() for n in names]}


def test_the_uri_name_says_who() -> None:
    assert parse("drover://agent/r01n01") == Identity(Role.AGENT, "r01n01")
    assert parse("drover://operator/jane%20doe") == Identity(Role.OPERATOR, "jane doe")
    assert str(Identity(Role.VIEWER, "wall")) == "drover://viewer/wall"


@pytest.mark.parametrize(
    "uri", ["drover://root/x", "drover://agent/", "drover://agent", "spiffe://agent/x", "drover://agent/a/b"]
)
def test_other_names_are_none(uri: str) -> None:
    with pytest.raises(IdentityError, match="is not drover://agent/NODE"):
        parse(uri)


def test_peers() -> None:
    assert peer({}) is None
    assert (
        peer({"transport_security_type": [b"insecure"], "x509_subject_alternative_name": [b"drover://agent/n0"]})
        is None
    )
    assert peer(tls("n0.example", "drover://agent/n0", "10.0.0.1")) == Identity(Role.AGENT, "n0")
    for names in ((), ("n0",), ("drover://agent/n0", "drover://agent/n1")):
        with pytest.raises(IdentityError, match="exactly one"):
            peer(tls(*names))


def test_an_agent_speaks_for_its_node_only() -> None:
    assert refusal(None, "n0") is None
    assert refusal(Identity(Role.AGENT, "n0"), "n0") is None
    assert refusal(Identity(Role.AGENT, "n1"), "n0") == (
        "the certificate is for drover://agent/n1; data of node 'n0' needs one for drover://agent/n0"
    )
    assert refusal(Identity(Role.OPERATOR, "n0"), "n0") is not None


@pytest.mark.parametrize(
    ("text", "says"),
    [("0A1B\nxyz\n", "line 2: 'xyz' is not a serial number"), (None, "No such file"), ("\u00e9", "is not plain text")],
)
def test_a_list_of_serials_that_cannot_be_used(tmp_path: Path, text: str | None, says: str) -> None:
    path = tmp_path / "denied"
    if text is not None:
        path.write_text(text, "utf-8")
    with pytest.raises(DeniedError, match=says):
        Denied(path)


def test_serials_as_openssl_prints_them_and_comments(tmp_path: Path) -> None:
    path = tmp_path / "denied"
    path.write_text("# gone\nserial=0A1B\n0a:1c # the other\n\n")
    assert Denied(path).serials() == {0x0A1B, 0x0A1C}
