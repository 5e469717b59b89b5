"""Links to Grafana's boards of the GPUs (docs/monitoring), with a node or job chosen and the time that is looked at.

`/d/UID` with `var-NAME`, `from` and `to`: grafana.com/docs/grafana/latest/dashboards/build-dashboards/
create-dashboard-url-variables/. Times are ms since the epoch, or `now-900s`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlencode, urlsplit

BOARD = "drover-gpus"  # uid of docs/monitoring/drover-gpus-grafana.json
MOST_VALUES = 50  # of a variable; more make an address that proxies refuse (8 kB)


def wrong_address(text: str) -> str | None:
    """Return what is wrong with the address of a Grafana; None: nothing. "" names none."""
    if not text:
        return None
    try:
        parts = urlsplit(text)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        good = False
    if not good or not text.isascii() or not text.isprintable() or any(c in text for c in ' \\"<>^`{|}'):
        return "must be an http:// or https:// address, such as https://grafana.example"
    if parts.username is not None or parts.password is not None:
        return "must have no user and no password: everyone who sees the console reads it"
    return "must have no ? and no #: the console adds the board itself" if "?" in text or "#" in text else None


def wrong_board(text: str) -> str | None:
    """Return what is wrong with a board's uid. Grafana allows 40 letters, digits, `-` and `_`."""
    return None if re.fullmatch(r"[A-Za-z0-9_-]{1,40}", text) else "must be a board's uid, such as drover-gpus"


@dataclass(frozen=True, slots=True)
class Grafana:
    """A Grafana and its board of the GPUs. Both are checked before."""

    address: str
    board: str = BOARD

    def link(self, from_: str, to: str, nodes: Sequence[str] = (), job: str = "") -> str:
        """Return the address of the board for a time, of these nodes (none, or too many: all) or of this job."""
        chosen = [("var-node", node) for node in nodes] if len(nodes) <= MOST_VALUES else []
        chosen += [("var-job_name", job)] if job else []
        query = urlencode([*chosen, ("from", from_), ("to", to)])
        return f"{self.address.rstrip('/')}/d/{self.board}?{query}"
