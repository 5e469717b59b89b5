"""Limits of open files and connections: each agent's stream takes one file."""

from __future__ import annotations

import logging
import resource

log = logging.getLogger(__name__)

OTHERS = 2_000  # files for the store (ClickHouse's limit), people's connections and logs

PEOPLE, LEAST = 256, 16  # connections to the Fleet API: consoles, commands; fewer where few files may be open


def raise_limit() -> None:
    """Raise the soft limit to the hard one, which only root may raise."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        except (OSError, ValueError) as error:
            log.warning("open files: the limit stays at %d: %s", soft, error)


def agents_that_fit() -> int | None:
    """Return how many streams may be open at once; None: any number."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if soft == resource.RLIM_INFINITY else max(0, soft - OTHERS)


def connections() -> int | None:
    """Return how many connections the agents' server may have, so that the store can still open files; None: any."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if soft == resource.RLIM_INFINITY else max(soft - OTHERS, soft // 2)


def people() -> int:
    """Return the limit of connections to the Fleet API. Each takes up to three files: its own and two to gRPC."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return PEOPLE if soft == resource.RLIM_INFINITY else max(LEAST, min(PEOPLE, soft // 16))


def scrapers() -> int:
    """Return the limit of connections to the metrics page, each a file and a thread."""
    return people() // 4


def troubles(nodes: int) -> list[str]:
    """Return a sentence if the agents of `nodes` nodes do not fit."""
    fit = agents_that_fit()
    if fit is None or nodes <= fit:
        return []
    return [
        f"Only {fit:,} of {nodes:,} agents fit: this process may open {fit + OTHERS:,} files;"
        f" set LimitNOFILE={max(65_536, 2 * nodes)} in its systemd unit, or `ulimit -n` before it."
    ]
