"""A desk in a process of its own that kills itself with -9 at a step: `killed_desk.py STORE SLURM STEP`.

SLURM is a folder with a stand-in for scontrol: `state` holds the node's state, `effects` a line for each change.
STEP "" runs through. It ends when the action has an outcome.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from drover_collector.actions.desk import ActionDesk
from drover_collector.actions.scontrol import Scontrol
from drover_collector.actions.settings import ActConfig, SlurmConfig
from drover_collector.actions.slurm import SlurmActuator
from drover_collector.store import Store
from drover_proto.events import ActionState, Decision, Wanted
from testbed.waiting import wait_until

T0 = 1_800_000_000_000


def main() -> None:
    url, folder, at = sys.argv[1:]
    store = Store.open(url, wait_s=20)

    def step(name: str) -> None:
        if name == at:
            os.kill(os.getpid(), signal.SIGKILL)

    actuator = SlurmActuator(Scontrol(SlurmConfig(scontrol=str(Path(folder) / "scontrol"))), 10_000)
    desk = ActionDesk(
        store, ActConfig(mode="enforce"), [actuator], lambda _: actuator, now_ms=lambda: T0, look_s=3600, step=step
    )
    desk.start()
    decision = Decision("d1", "inc1", T0, "n1", Wanted.ISOLATE, "enforce", "act", "rule", "why")
    if at:
        store.write_decisions([decision])
        desk.take([decision])
    wait_until(lambda: any(a.state is not ActionState.INTENDED for a in store.actions()), "the action has an outcome")
    desk.stop()
    (action,) = store.actions()
    print(action.state, store.duties()["n1"].stage, flush=True)
    store.close()


if __name__ == "__main__":
    main()
