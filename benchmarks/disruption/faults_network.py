"""Networks that are cut, slowed, frozen and torn; certificates that end, move and are denied; rivals."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

from disruption.place import CALL_S
from disruption.run import Run
from drover_proto import fleet_pb2 as pb
from testbed.certificates import Files
from testbed.certificates import Fleet as Authority

PATIENT_S = 90.0  # for what takes a second on a machine of its own
Steps = Iterator[Callable[[], object] | None]


def network_cut(run: Run) -> Steps:
    run["proxy"].weather.refuses = True
    run["proxy"].reset()
    run.hold(10)
    run.saw(f"{sum(run.place.pending().values())} records waited in the spools")
    run["proxy"].weather.refuses = False
    yield None


def network_slow(run: Run) -> Steps:
    run["proxy"].weather.delay_s, run["proxy"].weather.bytes_per_s = 0.4, 20_000
    run.hold(12)
    waits = max(run.place.pending().values())
    run.saw(f"0.4 s and 20 kB/s each way: {waits} records waited at most")
    run["proxy"].weather.delay_s = run["proxy"].weather.bytes_per_s = 0
    yield None


def network_lossy(run: Run) -> Steps:
    before = run["proxy"].torn
    run["proxy"].tear(20_000)
    run.hold(12)
    run["proxy"].tear(0)
    run.must(run["proxy"].torn > before, "connections were torn")
    run.saw(f"{run['proxy'].torn - before} connections reset, each within 20 kB")
    yield None


def reset_amid_a_message(run: Run) -> Steps:
    before = run["proxy"].torn
    run["proxy"].tear(300)
    run["proxy"].weather.tears = 0  # those that are open only
    run.until(lambda: run["proxy"].torn > before, 10, "a connection was reset amid a message")
    run.saw(f"{run['proxy'].torn - before} connections reset within 300 bytes")
    yield None


def half_open(run: Run) -> Steps:
    run["proxy"].freeze()
    run.hold(2)
    run.saw("both ends keep the connection; the agent gives it up when no Ack comes")
    yield None


def black_hole(run: Run) -> Steps:
    run["proxy"].weather.swallows = True
    run["proxy"].reset()
    run.hold(6)
    run["proxy"].weather.swallows = False
    run["proxy"].reset()
    yield None


def rival(run: Run) -> Steps:
    node = run["rival_node"]
    run.place.fleet.ask(do="rival", node=node)

    def reported() -> list[str]:
        found = run.place.stub().GetSystem(pb.SystemRequest(), timeout=CALL_S).agents.troubles
        return [line.text for line in found if line.kind == "rival" and line.node == node]

    run.until(reported, PATIENT_S, "the rival is reported")
    run.saw(f"reported: {reported()[0][:100]}" if reported() else "")
    run.place.fleet.ask(do="rival ends")
    yield None


# ---- certificates


def put(run: Run, who: str, files: Files) -> None:
    """A new pair into the files that `who` uses."""
    folder: Path = run["certificates"]
    Files(folder / "ca.pem", folder / f"{who}.pem", folder / f"{who}.key", files.issued).renew_from(files)
    run["issued"][who] = files


def role(who: str) -> str:
    return {"c1": "collector", "viewer": "viewer"}.get(who, "agent")


def certificate_ends(run: Run) -> Steps:
    authority, node = run["authority"], run["ending_node"]
    put(run, node, authority.issue("agent", node, ends_in=timedelta(seconds=7)))
    run.until(lambda: run.place.fleet.ask(do="connected")[node] is None, PATIENT_S, "its stream is ended")
    run.saw("its stream was ended with its certificate, and no other")
    others = [name for name, at in run.place.fleet.ask(do="connected").items() if at is None and name != node]
    run.must(not others, f"the others stay ({others})")
    put(run, node, authority.issue("agent", node))
    yield None


def certificates_rotate(run: Run) -> Steps:
    for who in list(run["issued"]):
        put(run, who, run["authority"].issue(role(who), who))
    run.place.forget_channels()
    run.hold(4)
    run.saw("collector, agents and viewer got new keys; nothing was restarted")
    yield None


def authority_replaced(run: Run) -> Steps:
    folder: Path = run["certificates"]
    old, newer = (folder / "ca.pem").read_bytes(), Authority(run.folder / "ca2", "chaos-ca-2")
    (folder / "ca.pem").write_bytes(old + newer.ca.read_bytes())
    run.hold(3)
    for who in list(run["issued"]):
        put(run, who, newer.issue(role(who), who))
    run.hold(4)
    (folder / "ca.pem").write_bytes(newer.ca.read_bytes())
    run.with_["authority"] = newer
    run.place.forget_channels()
    run.place.collectors["c1"].stop()  # ends streams that the old authority's certificates opened
    run.place.start_collector()
    run.saw("both in one file, all issued again, the old one taken out, the collector restarted")
    yield None


def denied(run: Run) -> Steps:
    node, file = run["denied_node"], run.folder / "denied.txt"
    rewrite(file, f"{run['issued'][node].serial:X}\n")
    run.until(lambda: run.place.fleet.ask(do="connected")[node] is None, PATIENT_S, "its stream is ended")
    run.saw("the open stream of the denied certificate was ended, and no other")
    rewrite(file, "")
    yield None


def denied_unreadable(run: Run) -> Steps:
    file = run.folder / "denied.txt"
    rewrite(file, "this is no serial number\n")

    def reported() -> list[str]:
        return [line for line in run.place.troubles() if "denied certificates" in line]

    run.until(reported, PATIENT_S, "the trouble is reported")
    run.saw("the list before stays in force, and status says so")
    rewrite(file, "")
    yield lambda: not reported()


def rewrite(file: Path, text: str) -> None:
    changed = file.with_suffix(".new")
    changed.write_text(text)
    changed.replace(file)
