"""Two places of their own: a standby that takes over on a server, and a collector of an older release."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

from durability.content import toml

from disruption.place import ROOT, Place
from disruption.run import Row, Run, SkipError
from testbed.front import front
from testbed.system_processes import free_port

OLDER = "3ab3210db676"  # what the last but one submission was built from; a release has no history with it
LEASE_S = 4.0
NODES = 2
Steps = Iterator[Callable[[], object] | None]


def standby(folder: Path) -> tuple[Row, dict[str, object]]:
    """Two collectors on one server: the one that detects is killed."""

    def fault(run: Run) -> Steps:
        place = run.place
        place.collectors["a"].kill()
        run.until(lambda: is_active(place, "b"), 40, "the standby detects")
        run.saw(f"lease of {LEASE_S:g} s; agents went to the other collector")
        place.collectors.pop("a")
        yield lambda: is_active(place, "b")

    with ExitStack() as stack:
        (folder / "server").mkdir(parents=True)
        served = stack.enter_context(front(folder / "server"))
        place = plain(folder, {"a": served.url("chaos"), "b": served.url("chaos")}, f"lease_s = {LEASE_S}\n")
        stack.callback(place.close)
        place.start_collector("a")
        place.wait(lambda: is_active(place, "a"), 30)
        place.start_collector("b")
        place.start_agents()
        run = Run(place, folder)
        place.wait(lambda: not place.well("a"), 60)
        place.main = "b"  # the one that is left
        row = run.suffer("collector", "detecting collector killed, standby takes over", fault)
        place.finish()
        return row, place.check(served.url("chaos"))


def upgrade(folder: Path) -> tuple[Row, dict[str, object]]:
    """New agents stream to a collector of the older release, which is then replaced on the same store."""

    def fault(run: Run) -> Steps:
        place = run.place

        def takes() -> bool:
            status = place.status("c1")
            return status is not None and status.samples_stored > 0

        run.until(takes, 30, "the older collector takes what newer agents send")
        place.collectors["c1"].stop()
        place.code.clear()
        place.start_collector()
        run.saw(f"agents of now on a collector of {OLDER[:7]}, then the collector of now on its store")
        yield None

    with ExitStack() as stack:
        folder.mkdir(parents=True)
        place = plain(folder, {"c1": f"chdb://{folder}/store"})
        stack.callback(place.close)
        run = Run(place, folder)
        try:
            place.code["c1"] = older(folder / "older")
        except SkipError as error:
            row = Row("collector", "collector one version older, then upgraded", skipped=str(error))
            return row, {}
        place.start_collector()
        place.start_agents()
        place.wait(lambda: not place.well(), 60)
        row = run.suffer("collector", "collector one version older, then upgraded", fault)
        place.finish()
        return row, place.check(f"chdb://{folder}/store")


def older(folder: Path) -> Path:
    """The packages of the older release.

    Raises:
        SkipError: this checkout has no history.
    """
    folder.mkdir()
    made = subprocess.run(
        ["git", "-C", str(ROOT), "archive", OLDER, "proto", "collector", "agent", "cli"],
        capture_output=True,
        check=False,
    )
    if made.returncode:
        raise SkipError(f"needs the commit {OLDER} in this checkout's history")
    subprocess.run(["tar", "-x", "-C", str(folder)], input=made.stdout, check=True)
    return folder


def plain(folder: Path, stores: dict[str, str], detect: str = "", kept: str = "") -> Place:
    """Collectors on loopback without TLS."""
    agents = {which: f"127.0.0.1:{free_port()}" for which in stores}
    apis = {which: f"127.0.0.1:{free_port()}" for which in stores}
    (folder / "fleet.toml").write_text(toml(NODES))
    for which, store in stores.items():
        (folder / f"{which}.toml").write_text(
            f'fleet = "{folder}/fleet.toml"\n[store]\nurl = "{store}"\n{kept}[ingest]\nlisten = "{agents[which]}"\n'
            f'[api]\nlisten = "{apis[which]}"\n[detect]\nlag_s = 2.0\n{detect}'
        )
    return Place(folder, NODES, tuple(agents.values()), apis)


def is_active(place: Place, which: str) -> bool:
    status = place.status(which)
    return status is not None and status.role == "active"
