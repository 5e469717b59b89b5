"""One-time tokens by which a new node gets its first certificate.

    DIR/tokens/ID.json     a token that may be used: its node, its end, the SHA-256 of its secret; never the secret
    DIR/tokens/ID.used     the same, taken

A token is `ID.SECRET`; the secret has 256 random bits, so a plain hash of it reveals nothing (what is guessed from
dictionaries are passwords). Taking it is one rename: of two that come with it at once, one has it.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from drover_cli.errors import CliError

KEY_MODE = 0o600
ID_BYTES, SECRET_BYTES = 8, 32
KEPT = timedelta(days=30)  # after its end, for who asks what became of it
MOST_LETTERS = 200


class TokenError(Exception):
    """Why a token is refused; for our own log, never for who brought it."""


@dataclass(frozen=True, slots=True)
class Token:
    """Times are ISO 8601 UTC."""

    node: str
    ends: str
    sha256: str


def make(folder: Path, node: str, hours: int, now: datetime | None = None) -> str:
    """A new token for one node, which is nowhere else from now on.

    Raises:
        CliError: the folder cannot be written.
    """
    from drover_cli.pki.authority import write_whole

    moment = now or datetime.now(UTC)
    secret, name = secrets.token_urlsafe(SECRET_BYTES), secrets.token_hex(ID_BYTES)
    token = Token(node, (moment + timedelta(hours=hours)).isoformat(timespec="seconds"), _hash(secret))
    try:
        (folder / "tokens").mkdir(mode=0o700, exist_ok=True)
        _clear(folder / "tokens", moment)
        write_whole(folder / "tokens" / f"{name}.json", json.dumps(asdict(token)).encode(), KEY_MODE)
    except OSError as error:
        raise CliError(f"{error.filename}: {error.strerror}; check the path, its permissions and the disk") from None
    return f"{name}.{secret}"


def take(folder: Path, text: str, node: str, now: datetime | None = None) -> None:
    """Use a token up for this node.

    Raises:
        TokenError: it is none, or was used, has ended, or is of another node; one of another node stays unchanged.
        OSError: the folder cannot be written; the token stays unchanged.
    """
    name, dot, secret = text.partition(".")
    if not dot or len(text) > MOST_LETTERS or len(name) != 2 * ID_BYTES or not set(name) <= set("0123456789abcdef"):
        raise TokenError("not a token")
    path = folder / "tokens" / f"{name}.json"
    try:
        token = Token(**json.loads(path.read_text("utf-8")))
    except FileNotFoundError:
        used = path.with_suffix(".used").exists()
        raise TokenError(f"token {name} was used already" if used else f"token {name} is unknown") from None
    except (ValueError, TypeError):
        raise TokenError(f"{path} is damaged; make another token") from None
    if not hmac.compare_digest(_hash(secret), token.sha256):
        raise TokenError(f"token {name} with another secret")
    if token.node != node:
        raise TokenError(f"token {name} is of {token.node}, and {node} came with it")
    if datetime.fromisoformat(token.ends) <= (now or datetime.now(UTC)):
        raise TokenError(f"token {name} of {token.node} ended at {token.ends}")
    try:
        path.rename(path.with_suffix(".used"))
    except FileNotFoundError:
        raise TokenError(f"token {name} was used already") from None


def _clear(folder: Path, now: datetime) -> None:
    """Forget those that ended long ago."""
    for path in folder.iterdir():
        with suppress(OSError, ValueError, TypeError):
            if datetime.fromisoformat(Token(**json.loads(path.read_text("utf-8"))).ends) < now - KEPT:
                path.unlink()


def _hash(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()
