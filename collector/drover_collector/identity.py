"""Who is at the other end of a connection, by its certificate: a URI name `drover://ROLE/NAME`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from urllib.parse import unquote

SCHEME = "drover://"


class Role(StrEnum):
    AGENT = "agent"
    OPERATOR = "operator"
    VIEWER = "viewer"


@dataclass(frozen=True, slots=True)
class Identity:
    role: Role
    name: str

    def __str__(self) -> str:
        return f"{SCHEME}{self.role}/{self.name}"


class IdentityError(Exception):
    """A certificate that names nobody, or several; the message says what it should name."""


def parse(uri: str) -> Identity:
    """`drover://agent/r01n01`.

    Raises:
        IdentityError: another form.
    """
    role, slash, name = uri.removeprefix(SCHEME).partition("/")
    if not uri.startswith(SCHEME) or role not in tuple(Role) or not slash or not name or "/" in name:
        raise IdentityError(f"{uri!r} is not drover://agent/NODE, drover://operator/NAME or drover://viewer/NAME")
    return Identity(Role(role), unquote(name))


def peer(auth_context: Mapping[str, Sequence[bytes]]) -> Identity | None:
    """The identity of a gRPC peer; None on a connection without TLS (loopback only, as the settings see to).

    Args:
        auth_context: what `ServicerContext.auth_context()` gives.

    Raises:
        IdentityError: TLS, but not exactly one name of ours.
    """
    if not any(kind in (b"ssl", b"tls") for kind in auth_context.get("transport_security_type", ())):
        return None
    names = [name.decode("utf-8", "replace") for name in auth_context.get("x509_subject_alternative_name", ())]
    ours = [name for name in names if name.startswith(SCHEME)]
    if len(ours) != 1:
        found = f"{len(ours)} URI names" if ours else "no URI name"
        raise IdentityError(f"the certificate has {found} {SCHEME}ROLE/NAME; it needs exactly one")
    return parse(ours[0])


def refusal(identity: Identity | None, node: str) -> str | None:
    """Why this peer may not speak for `node`, or None when it may."""
    if identity is None or (identity.role is Role.AGENT and identity.name == node):
        return None
    return f"the certificate is for {identity}; data of node {node!r} needs one for {SCHEME}agent/{node}"
