"""Which cluster a command asks: contexts as in kubeconfig, and what is shown before an act.

The first of these that is given counts: --collector, --cluster, DROVER_CLUSTER, DROVER_COLLECTOR, the file's `current`,
the file's only cluster, the usual address. The file is ~/.config/drover/clusters.toml, or DROVER_CLUSTERS names it.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from drover_cli.errors import CliError
from drover_core.clusters import ALL, Cluster, ClusterSettings, load
from drover_core.settings import SettingsError

T = TypeVar("T")

EACH_S = 5.0  # for an answer, where all clusters are asked: one that hangs must not hold up the others for long
FILE, CLUSTER = "DROVER_CLUSTERS", "DROVER_CLUSTER"
FILES = ("ca", "cert", "key")
_CURRENT = re.compile(r"^[ \t]*current\s*=.*$", re.MULTILINE)
_TABLE = re.compile(r"^[ \t]*\[", re.MULTILINE)  # behind it a key is the table's; a comment may have brackets too


def path() -> Path:
    """Return where the file is, or would be."""
    if named := os.environ.get(FILE):
        return Path(named)
    home = os.environ.get("XDG_CONFIG_HOME") or "~/.config"
    return Path(home).expanduser() / "drover" / "clusters.toml"


def known() -> ClusterSettings:
    """Return what the file says; no clusters where there is no file and none was named.

    Raises:
        CliError: it cannot be used.
    """
    file = path()
    if not file.exists() and not os.environ.get(FILE):
        return ClusterSettings()
    try:
        return load(file)
    except SettingsError as error:
        raise CliError(str(error)) from None


class Named(argparse.Action):
    """An option that remembers that it was given."""

    def __call__(self, _parser: Any, namespace: argparse.Namespace, values: Any, _option: Any = None) -> None:
        setattr(namespace, self.dest, values)
        setattr(namespace, f"{self.dest}_given", True)


def resolve(args: argparse.Namespace) -> None:
    """Set the collector, its files and `cluster` ("": none has a name) of a command that asks a collector.

    Raises:
        CliError: it is not clear which is meant.
    """
    found = known()
    args.several = len(found.clusters) > 1
    asked = getattr(args, "cluster", None)
    explicit = getattr(args, "collector_given", False)
    if asked and explicit:
        raise CliError("--cluster and --collector both say whom to ask: give one of them")
    args.named = bool(asked or explicit or os.environ.get(CLUSTER))
    name = asked or (None if explicit else os.environ.get(CLUSTER))
    if name is None and (explicit or args.collector_env):
        args.cluster = ""
        return
    if name is None and getattr(args, "all_usual", False) and found.clusters:
        name = ALL
    if name == ALL:
        if not getattr(args, "takes_all", False):
            raise CliError(f"`drover {args.command}` asks one cluster; clusters, incidents, nodes and find take all")
        if not found.clusters:
            raise CliError(f"no cluster is known: {path()} has none")
        args.cluster = ALL
        return
    cluster = _cluster(found, name)
    args.cluster = cluster.name if cluster is not None else ""
    if cluster is not None:
        take(args, cluster)


def _cluster(found: ClusterSettings, name: str | None) -> Cluster | None:
    if name is not None:
        cluster = found.find(name)
        if cluster is None:
            raise CliError(f"no cluster {name!r} in {path()}; known are {', '.join(found.names()) or 'none'}")
        return cluster
    if found.current:
        return found.find(found.current)
    if len(found.clusters) > 1:
        raise CliError(f"which cluster? --cluster NAME, or `drover config use NAME`: {', '.join(found.names())}")
    return found.clusters[0] if found.clusters else None


def take(args: argparse.Namespace, cluster: Cluster) -> None:
    """Let `args` ask this cluster, with its own certificates or none: never with those of another."""
    args.cluster, args.collector = cluster.name, cluster.collector
    given = [name for name in FILES if getattr(args, f"{name}_given", False)]
    own = (None, None, None) if given else cluster.tls() or (None, None, None)
    for name, file in zip(FILES, own, strict=True):
        if name not in given:  # what the environment names may be another cluster's
            setattr(args, name, file)


def before_act(args: argparse.Namespace, what: str) -> None:
    """Say on stderr which cluster an act goes to. Where there are several and the command does not name one, a person
    is asked, and a script is refused.

    Raises:
        CliError: nobody confirmed it.
    """
    if not getattr(args, "several", False) and not getattr(args, "cluster", ""):
        return
    where = f"cluster {args.cluster} ({args.collector})" if args.cluster else f"collector {args.collector}"
    print(f"{where}: {what}", file=sys.stderr, flush=True)
    if args.named or not args.several or getattr(args, "confirmed", False):
        return
    name, option = (args.cluster, "--cluster") if args.cluster else (args.collector, "--collector")
    if not sys.stdin.isatty():
        raise CliError(f"not done: there are several clusters and nobody to ask; add {option} {name} if it is meant")
    print(f"Do it in {option[2:]} {name}? Type its name: ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip() != name:
        raise CliError(f"not done: the answer was not {name}")
    args.confirmed = True  # once for a command, which may act on several nodes


def in_cluster(args: argparse.Namespace) -> str:
    """Return ` in cluster west` for a line about what was done."""
    return f" in cluster {args.cluster}" if getattr(args, "cluster", "") else ""


def ask_each(args: argparse.Namespace, question: Callable[[argparse.Namespace], T]) -> dict[str, T | CliError]:
    """Put a question to all clusters at once; the error of each that did not answer."""

    def one(cluster: Cluster) -> T | CliError:
        of = argparse.Namespace(**vars(args), deadline_s=EACH_S)
        take(of, cluster)
        try:
            return question(of)
        except CliError as error:
            return error

    clusters = known().clusters
    with ThreadPoolExecutor(len(clusters)) as pool:
        return dict(zip((c.name for c in clusters), pool.map(one, clusters), strict=True))


def answered(found: dict[str, T | CliError]) -> dict[str, T]:
    """Return the answers, and say on stderr who gave none."""
    for name, answer in found.items():
        if isinstance(answer, CliError):
            print(f"drover: cluster {name} is not in this: {answer}", file=sys.stderr)
    return {name: answer for name, answer in found.items() if not isinstance(answer, CliError)}


def use(name: str) -> None:
    """Write `current` into the file; all else in it stays as people wrote it.

    Raises:
        CliError: there is no such cluster, or the file cannot be written.
    """
    found, file = known(), path()
    if found.find(name) is None:
        raise CliError(f"no cluster {name!r} in {file}; known are {', '.join(found.names()) or 'none'}")
    file = file.resolve()  # a link, as people keep their settings elsewhere, stays one
    text = file.read_text("utf-8")
    table = _TABLE.search(text)
    at = len(text) if table is None else table.start()
    head, rest = text[:at], text[at:]
    line = f'current = "{name}"'
    head = _CURRENT.sub(line, head, count=1) if _CURRENT.search(head) else f"{line}\n{head}"
    temporary = file.with_name(f".{file.name}.new")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as new:
            new.write(head + rest)
            os.fchmod(new.fileno(), file.stat().st_mode & 0o7777)
        load(temporary)  # what replaces the file can be read, and says this
        temporary.replace(file)
    except (OSError, SettingsError) as error:
        temporary.unlink(missing_ok=True)
        raise CliError(f"{file}: {getattr(error, 'strerror', '') or error}; nothing was changed") from None


def rows_of(found: ClusterSettings) -> Sequence[tuple[str, str, str, str]]:
    """Mark, name, collector and certificate of each cluster."""
    return [
        ("*" if cluster.name == found.current else "", cluster.name, cluster.collector, cluster.cert or "-")
        for cluster in found.clusters
    ]
