"""How many files and connections this process may open: each agent's stream takes one."""

from __future__ import annotations

import logging
import resource

log = logging.getLogger(__name__)

OTHERS = 2_000  # files that the store has open at most, as ClickHouse keeps them; people's connections, logs

PEOPLE, LEAST = 256, 16  # connections to the Fleet API: consoles, commands; fewer where few files may be open


def raise_limit() -> None:
    """The soft limit up to the hard one, which only the system's owner may raise."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        except (OSError, ValueError) as error:
            log.warning("open files: the limit stays at %d: %s", soft, error)


def agents_that_fit() -> int | None:
    """How many streams may be open at once; None: any number."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if soft == resource.RLIM_INFINITY else max(0, soft - OTHERS)


def connections() -> int | None:
    """How many the agents' server may have at once, so that the store can still open its files; None: any number."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if soft == resource.RLIM_INFINITY else max(soft - OTHERS, soft // 2)


def people() -> int:
    """Connections to the Fleet API at once. Each takes up to three files: its own, and both ends of its way to gRPC."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return PEOPLE if soft == resource.RLIM_INFINITY else max(LEAST, min(PEOPLE, soft // 16))


def scrapers() -> int:
    """Connections to the metrics page at once, a file and a thread each."""
    return people() // 4


def troubles(nodes: int) -> list[str]:
    """Whether the agents of a fleet of so many nodes fit, as a sentence when they don't."""
    fit = agents_that_fit()
    if fit is None or nodes <= fit:
        return []
    return [
        f"Only {fit:,} of {nodes:,} agents fit: this process may open {fit + OTHERS:,} files;"
        f" set LimitNOFILE={max(65_536, 2 * nodes)} in its systemd unit, or `ulimit -n` before it."
    ]
