"""Clusters by name, each with its own collector: the `[[clusters]]` of the console's settings and of the CLI's file.

A name stands for one collector and nothing else. So two names for one collector, or one name for two, is an error:
who drains a node reads the name and has to be able to trust it.
"""

from __future__ import annotations

import re
import stat
from dataclasses import dataclass, replace
from pathlib import Path

from drover_core import settings
from drover_core.grafana import BOARD, Grafana, wrong_address, wrong_board
from drover_core.settings import SettingsError, required, setting

ALL = "all"  # of the command line: every cluster; so no cluster has this name
MOST = 100
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,39}")


def _name(text: str) -> str | None:
    if text.casefold() == ALL:
        return f"{ALL!r} means every cluster: choose another name"
    return None if _NAME.fullmatch(text) else "must be 1 to 40 letters, digits, '.', '_' or '-', such as west-2"


def _address(text: str) -> str | None:
    host, _, port = text.rpartition(":")
    good = host and port.isascii() and port.isdigit() and 1 <= int(port) <= 65535
    return None if good else "must be HOST:PORT, such as collector.example:7302"


@dataclass(frozen=True)
class Cluster:
    """One cluster. `ca`, `cert`, `key`: all three or none."""

    name: str = required("how people call it, in links and on the command line", _name)
    collector: str = required("HOST:PORT of its collector's Fleet API", _address)
    ca: str = setting("", "the cluster's CA, PEM; for mutual TLS give ca, cert and key")
    cert: str = setting("", "certificate to show it")
    key: str = setting("", "and its key")
    grafana: str = setting("", "http(s):// address of its Grafana; the console's pages link to it", wrong_address)
    grafana_board: str = setting(BOARD, "uid of the board of its GPUs there", wrong_board)

    @property
    def linked(self) -> Grafana | None:
        """Its Grafana; None: it has none."""
        return Grafana(self.grafana, self.grafana_board) if self.grafana else None

    def tls(self) -> tuple[Path, Path, Path] | None:
        return (Path(self.ca), Path(self.cert), Path(self.key)) if self.ca else None


@dataclass(frozen=True)
class ClusterSettings:
    """What both files hold. `current` counts on the command line only."""

    current: str = setting("", "the cluster that `drover` asks where none is named; `drover config use NAME` writes it")
    clusters: tuple[Cluster, ...] = setting((), "one table for each cluster")

    def find(self, name: str) -> Cluster | None:
        return next((cluster for cluster in self.clusters if cluster.name == name), None)

    def names(self) -> list[str]:
        return [cluster.name for cluster in self.clusters]


def load(path: Path) -> ClusterSettings:
    """Read a file. Paths of certificates are taken from its folder; `~` is the home of who reads.

    Raises:
        SettingsError: it cannot be read, other users may read or change it, or what it says does not go together.
    """
    _check_rights(path)
    found = settings.load(ClusterSettings, path)
    found = replace(found, clusters=tuple(_placed(cluster, path.parent) for cluster in found.clusters))
    _check_unique(found, path)
    if len(found.clusters) > MOST:
        raise SettingsError(f"{path}: {len(found.clusters)} clusters; at most {MOST} are possible")
    if found.current and found.find(found.current) is None:
        raise SettingsError(f"{path}: current: no cluster {found.current!r}; known are {', '.join(found.names())}")
    return found


def _check_unique(found: ClusterSettings, path: Path) -> None:
    names: dict[str, str] = {}
    addresses: dict[str, str] = {}
    for number, cluster in enumerate(found.clusters):
        where = f"{path}: clusters[{number}]"
        if (other := names.get(cluster.name.casefold())) is not None:
            raise SettingsError(f"{where}.name: {cluster.name!r} and {other!r} read the same; rename one")
        if (other := addresses.get(cluster.collector.casefold())) is not None:
            raise SettingsError(
                f"{where}.collector: {cluster.collector} is that of {other!r} too; a cluster has a collector of its own"
            )
        if len({bool(cluster.ca), bool(cluster.cert), bool(cluster.key)}) > 1:
            raise SettingsError(f"{where}: ca, cert and key belong together: give all three or none")
        names[cluster.name.casefold()] = addresses[cluster.collector.casefold()] = cluster.name


def _placed(cluster: Cluster, folder: Path) -> Cluster:
    placed = {
        name: str(folder / Path(text).expanduser())
        for name in ("ca", "cert", "key")
        if (text := getattr(cluster, name))
    }
    return replace(cluster, **placed)


def _check_rights(path: Path) -> None:
    """Anyone who may write this file decides which cluster an act goes to."""
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
    except OSError as error:
        raise SettingsError(f"{path}: {error.strerror}; check the path") from None
    if mode & stat.S_IRWXO:
        raise SettingsError(f"{path} is open to every user of this machine; chmod o= {path}")
    if mode & stat.S_IWGRP:
        raise SettingsError(f"{path} can be written by its group, who could redirect your acts; chmod g-w {path}")
