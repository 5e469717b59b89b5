"""How people are known, and whether they may act: by a reverse proxy's header, by OpenID Connect, or nobody is asked.

A header is believed only of the proxy's own address: `door.py` answers nobody else. OpenID Connect is Streamlit's
(`st.login`). Who is neither named as an operator nor in an operators' group may look.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Network = ipaddress.IPv4Network | ipaddress.IPv6Network

NAME_CHARS = 80
OIDC_NAMES = ("email", "preferred_username", "name", "sub")  # the first by which nobody else can pose is shown


@dataclass(frozen=True, slots=True)
class Person:
    """`name` "": nobody was asked, the person says it with each act."""

    name: str
    may_act: bool


@dataclass(frozen=True, slots=True)
class SignIn:
    """How people are known. Without header and `oidc` nobody signs in: anyone who reaches the console may do all."""

    header: str = ""
    groups_header: str = ""
    proxies: tuple[Network, ...] = ()
    oidc: bool = False
    groups_claim: str = "groups"
    operators: frozenset[str] = frozenset()  # in lower case
    operator_groups: frozenset[str] = frozenset()

    @property
    def asks(self) -> bool:
        return self.oidc or bool(self.header)

    @property
    def words(self) -> list[bytes]:
        """The headers that the proxy sets, as they travel."""
        return [name.lower().encode() for name in (self.header, self.groups_header) if name]

    def trusts(self, address: str) -> bool:
        """Whether a peer is the proxy."""
        try:
            found = ipaddress.ip_address(address)
        except ValueError:
            return False
        if isinstance(found, ipaddress.IPv6Address) and found.ipv4_mapped is not None:
            found = found.ipv4_mapped
        return any(found in network for network in self.proxies)

    def of_headers(self, headers: Mapping[str, str]) -> Person | None:
        """The person that the proxy names; None: nobody. Only headers that `door.py` has let through."""
        name = _clean(headers.get(self.header, ""))
        groups = (
            [group.strip() for group in headers.get(self.groups_header, "").split(",")] if self.groups_header else []
        )
        return self._person([name], groups) if name else None

    def of_claims(self, claims: Mapping[str, Any]) -> Person | None:
        """The person whom the provider vouches for; None: nobody is signed in."""
        if not claims.get("is_logged_in"):
            return None
        named = {key: _clean(str(claims[key])) for key in OIDC_NAMES if claims.get(key)}
        if str(claims.get("email_verified", True)).lower() != "true":  # anybody may have typed it; some send "false"
            named.pop("email", None)
            if "@" in named.get("preferred_username", ""):  # the same address, where people register with it
                del named["preferred_username"]
        groups = claims.get(self.groups_claim)
        listed = [groups] if isinstance(groups, str) else [str(g) for g in groups] if isinstance(groups, list) else []
        # A display name may be anybody's choice: it is shown, and nobody is an operator by it.
        sure = [named[key] for key in ("email", "preferred_username", "sub") if key in named]
        shown = next((name for name in (*sure, *named.values()) if name), "")  # it is kept with what they do
        person = self._person(sure, listed) if shown else None
        return Person(shown, person.may_act) if person else None

    def _person(self, names: Sequence[str], groups: Sequence[str]) -> Person:
        named = any(name.casefold() in self.operators for name in names if name)
        return Person(names[0] if names else "", named or any(group in self.operator_groups for group in groups))


def _clean(name: str) -> str:
    return "".join(c if c.isprintable() else " " for c in name).strip()[:NAME_CHARS]


_shared = SignIn()


def share(chosen: SignIn) -> None:
    """Make `chosen` the way in which people are known in this process."""
    global _shared
    _shared = chosen


def chosen() -> SignIn:
    return _shared
