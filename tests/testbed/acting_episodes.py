"""Stretches that random histories consist of: each with nodes and times of its own, and other things in between."""

from __future__ import annotations

import random
from collections.abc import Callable

Step = tuple[str, int, int]
Episode = Callable[[random.Random], list[Step]]


def node(rng: random.Random) -> int:
    return rng.randrange(12)


def ends(rng: random.Random, n: int) -> list[Step]:
    """How a fault's node may come back, or seem to."""
    how: list[list[Step]] = [
        [("reboot", n, 0), ("wait", 0, 60), ("pass", n, 0)],
        [("pass", n, 0), ("wait", 0, 40), ("pass", n, 0)],
        [("resume", n, 0), ("pass", n, 0), ("drover reboot", n, 0), ("wait", 0, 60), ("pass", n, 0)],
        [("repair", n, 0), ("fail", n, 0), ("resume", n, 0), ("pass", n, 0)],
        [("no verdict", n, 0), ("resume", n, 0), ("pass", n, 0)],
        [("resume force", n, 0)],
        [("drover reset", n, 0), ("wait", 0, 60), ("resume", n, 0), ("pass", n, 0)],
    ]
    return rng.choice(how)


def fault(rng: random.Random) -> list[Step]:
    n = node(rng)
    what = rng.choice(["xid79", "xid119", "remap", "gone"])
    begins: list[Step] = [("job", n, 0), (what, n, rng.randrange(2)), ("wait", 0, 60), ("approve", 0, 0)]
    after: list[Step] = rng.choice([ends(rng, n), [("pass", n, 0), *ends(rng, n)]])
    return [*begins, ("job ends", n, 0), *after, ("wait", 0, rng.choice([60, 200]))]


def late(rng: random.Random) -> list[Step]:
    """It waits in a spool while its node is mended, or for hours."""
    n, what = node(rng), rng.choice(["xid79", "xid119"])
    mends: Step = (rng.choice(["reboot", "reset"]) if what == "xid119" else "reboot", n, 0)
    down: list[Step] = rng.choice([[("stop", 0, 0)], [("crash", 0, 0)]])
    return rng.choice([
        [("link lost", n, 0), (what, n, 0), *down, ("later", 0, 5000), mends, ("later", 0, rng.choice([60, 3000])),
         ("start", 0, 0), ("wait", 0, 40), ("link back", n, 0), ("wait", 0, 60)],
        [*down, (what, n, 0), ("later", 0, rng.choice([600, 9000])), mends, ("later", 0, 100), ("start", 0, 0),
         ("wait", 0, 100)],
        [(what, n, 0), ("stored", 0, 0), ("later", 0, rng.choice([30, 100, 900, 9000])), mends,
         ("later", 0, rng.choice([30, 100, 900])), ("start", 0, 0), ("wait", 0, 160)],
    ])  # fmt: skip


def unheard(rng: random.Random) -> list[Step]:
    """A restart while a scheduler is away, or slow to say whom others have closed."""
    n, other = rng.randrange(6), node(rng)
    return [("bob closes", 6 + rng.randrange(6), 0), ("bob closes", (n + 1) % 6, 0), ("wait", 0, 100),
            rng.choice([("stop", 0, 0), ("crash", 0, 0)]), ("away", rng.randrange(2), 0), ("xid79", n, 0),
            ("start", 0, 0), ("wait", 0, 60), ("xid79", other, 0), ("wait", 0, 40), ("back", 0, 0), ("back", 1, 0),
            ("wait", 0, 60)]  # fmt: skip


def meanwhile(rng: random.Random) -> list[Step]:
    """Others close nodes of a rack while Drover waits for their scheduler."""
    rack = rng.randrange(4)
    which = rack // 2
    return [("wait", 0, 60), ("away", which, 0), (rng.choice(["xid79", "drain"]), rack * 3, 0), ("wait", 0, 20),
            ("bob closes", rack * 3 + 1, 0), ("bob closes", rack * 3 + 2, 0), ("wait", 0, rng.choice([20, 60])),
            ("back", which, 0), ("wait", 0, 60)]  # fmt: skip


def silent(rng: random.Random) -> list[Step]:
    n = node(rng)
    return [(rng.choice(["agent stops", "agent stops", "link lost", "die"]), n, 0), ("wait", 0, 420),
            ("agent starts", n, 0), ("link back", n, 0)]  # fmt: skip


def trial(rng: random.Random) -> list[Step]:
    """Several faults that observe mode would act on, and people who act."""
    rack = rng.randrange(4)
    return [("xid79", rack * 3, 0), ("xid79", rack * 3 + 1, 0), ("xid79", (rack * 3 + 4) % 12, 0), ("wait", 0, 40),
            ("drain", rack * 3 + 2, 0), ("drain", rack * 3, 0), ("drain", node(rng), 0)]  # fmt: skip


def job(rng: random.Random) -> list[Step]:
    """Somebody puts a node back while another wants it rebooted."""
    n = node(rng)
    out: Step = rng.choice([("drain force", n, 0), ("xid119", n, 0)])
    return [out, ("wait", 0, 60), ("bob opens", n, 0), ("job", n, 0),
            (rng.choice(["drover reboot", "drover reset"]), n, 0), ("wait", 0, 40), ("job ends", n, 0)]  # fmt: skip


def lost(rng: random.Random) -> list[Step]:
    """The store is lost, and its scheduler away, while a person keeps a node out."""
    n = node(rng)
    return [("drain force", n, 0), ("wait", 0, 40), ("lost", 0, 0), ("away", n // 6, 0), ("start", 0, 0),
            (rng.choice(["xid79", "remap"]), n, 0), ("wait", 0, 40), ("back", n // 6, 0), ("wait", 0, 60),
            ("repair", n, 0), ("wait", 0, 60), ("pass", n, 0), ("wait", 0, 60)]  # fmt: skip


def pace(rng: random.Random) -> list[Step]:
    """More than may go in an hour, and a clock that is set."""
    n = rng.randrange(4)
    return [("xid79", n, 0), ("wait", 0, 20), ("xid119", n + 4, 0), ("wait", 0, 20), ("xid79", n + 8, 0),
            ("wait", 0, 40), ("clock", 0, rng.randrange(3)), ("wait", 0, 40), ("remap", n + 1, 0), ("wait", 0, 60),
            ("xid119", n + 5, 0), ("wait", 0, 20), ("xid119", n + 2, 0), ("wait", 0, 40)]  # fmt: skip


def mass(rng: random.Random) -> list[Step]:
    n = node(rng)
    return [("mass", n, rng.randrange(8)), ("wait", 0, 60), (rng.choice(["approve", "reject", "wait"]), 0, 60),
            ("clock", 0, rng.randrange(3)), ("mass", n + 3, rng.randrange(4)), ("wait", 0, 60)]  # fmt: skip


def hand(rng: random.Random) -> list[Step]:
    """People drain what Drover has drained, change its reason, and faults come on what they keep."""
    n = node(rng)
    first, then = rng.sample([("drain", n, 0), ("xid79", n, 1), ("bob closes", n, 0), ("remap", n, 0)], 2)
    return [first, ("wait", 0, 60), then, ("wait", 0, 60), ("reboot", n, 0), ("wait", 0, 60), ("pass", n, 0),
            ("wait", 0, 40), ("repair", n, 0), ("wait", 0, 60), ("pass", n, 0), ("wait", 0, 40),
            (rng.choice(["resume", "bob opens", "wait"]), n, 20), ("pass", n, 0), ("wait", 0, 40)]  # fmt: skip


EPISODES: dict[str, Episode] = {
    made.__name__: made for made in (fault, late, unheard, meanwhile, silent, trial, job, lost, pace, mass, hand)
}

ANY: tuple[str, ...] = (
    "xid79", "xid119", "remap", "gone", "reboot", "repair", "drain", "resume", "bob closes", "bob opens", "job",
    "job ends", "approve", "reject", "pass", "fail", "no verdict", "away", "back", "crash soon", "failover",
    "link lost", "link back", "agent stops", "agent starts", "die", "start", "wait", "wait",
)  # fmt: skip


def noise(rng: random.Random) -> Step:
    return rng.choice(ANY), node(rng), rng.choice([0, 1, 20, 60])
