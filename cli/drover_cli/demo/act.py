"""`drover demo --act`: settings by which the demo acts through a stand-in scheduler, and what a new user types next."""

from __future__ import annotations

import importlib.resources
import json
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from drover_cli.client import FleetClient
from drover_cli.output import plain
from drover_core.model.events import (
    Decision,
    Health,
    NodeOutage,
    RecommendedAction,
    WaitsFor,
    from_json,
)
from drover_core.model.fleet import FleetSpec
from drover_proto import fleet_methods as methods
from drover_proto import fleet_pb2 as pb

SCHEDULER = "demo scheduler: a stand-in, no real nodes"
SOCKET = "scheduler.sock"
CALL_S = 10.0
DEFAULT_API = "127.0.0.1:7302"
NO_BOOT = "No boot ends this fault: on a real fleet a technician replaces the part. Leave the node out."


def settings(folder: Path) -> str:
    """The collector's settings, TOML: it asks a person, and acts through the stand-in of the simulated fleet."""
    program = json.dumps([sys.executable, "-m", "drover_cli.demo.scheduler", f"{folder}/{SOCKET}"])
    return (
        f'[act]\nmode = "approve"\nvalidate_level = "deep"\nreset_command = {program}\nreboot_command = {program}\n'
        f'[act.command]\nprogram = {program}\n[policy]\npath = "{folder}/policy.toml"\n'
    )


def policy() -> str:
    """The default policy in approve mode; its name, which the console shows, says what it acts through."""
    text = (importlib.resources.files("drover_collector.policy") / "presets/nvidia.toml").read_text("utf-8")
    for before, after in (('name = "nvidia"', f'name = "nvidia ({SCHEDULER})"'), ('"observe"', '"approve"')):
        if before not in text:
            raise ValueError(f"presets/nvidia.toml has no {before}")
        text = text.replace(before, after, 1)
    return text


class Guide:
    """Says what waits for a person, how far each node is that is out, and the command that goes on.

    Args:
        say: prints one line. spec: the demo's fleet. api: address of the Fleet API.
    """

    def __init__(self, say: Callable[[str], None], spec: FleetSpec, api: str) -> None:
        self._say, self._spec = say, spec
        self._at = "" if api == DEFAULT_API else f" --collector {api}"
        self._asked: set[str] = set()
        self._held: set[str] = set()
        self._stages: dict[str, tuple[Health, str]] = {}
        self._to_boot: set[str] = set()  # nodes whose reboot was suggested
        self._suggested = False

    def begin(self, console: str) -> None:
        buttons = (
            f". The Policy and Node pages of {console} have buttons to approve, drain and resume" if console else ""
        )
        for line in (
            f"{SCHEDULER.capitalize()}. Drover asks before each act, and what it does reaches simulated nodes only.",
            f"Type the commands that follow in a second terminal{buttons}.",
        ):
            self._say(line)
        folder = Path(sys.executable).parent
        if shutil.which("drover") is None and (folder / "drover").exists():
            self._say(f"There, make `drover` known first: export PATH={folder}:$PATH")

    def look(self, fleet: FleetClient, labels: Sequence[Mapping[str, object]], summaries: Mapping[str, str]) -> None:
        """Say what is new.

        Args:
            labels: the faults that were injected. summaries: incident -> what is wrong.
        Raises:
            grpc.RpcError: the collector does not answer.
        """
        state = fleet.call(methods.GET_POLICY, pb.PolicyRequest(), CALL_S)
        for text in state.pending_json:
            self._ask(from_json(Decision, text), summaries)
        for text in state.held_json:
            self._hold(from_json(Decision, text))
        out = {
            duty.node: duty
            for text in state.duties_json
            if (duty := from_json(NodeOutage, text)).stage != Health.HEALTHY
        }
        for node in [node for node in self._stages if node not in out]:
            del self._stages[node]
            self._to_boot.discard(node)
            self._say(f"{node} is back in service.")
            self._suggest(labels, out)
        for node, duty in out.items():
            if self._stages.get(node) != (duty.stage, duty.reason):
                self._stages[node] = (duty.stage, duty.reason)
                self._show(duty, labels)

    def _type(self, command: str) -> None:
        self._say(f"    type: drover {command}{self._at}")

    def _ask(self, decision: Decision, summaries: Mapping[str, str]) -> None:
        if decision.id in self._asked or (decision.incident_id and decision.incident_id not in summaries):
            return  # said before, or its incident has just opened: the next look knows it
        self._asked.add(decision.id)
        why = summaries.get(decision.incident_id, decision.reason)
        self._say(f"Drover asks: {_asked(decision)}? {plain(why)}")
        self._type(f'approve {decision.id} --why "I looked at it"')

    def _hold(self, decision: Decision) -> None:
        """Say what the guard holds back; else an approval without an effect looks like a fault of the demo."""
        if decision.id in self._held or decision.wanted not in (RecommendedAction.DRAIN, RecommendedAction.ISOLATE):
            return
        self._held.add(decision.id)
        self._say(f"The guard holds back: {_asked(decision)}. {plain(decision.reason)}")
        self._say("    It is done, or asked for, when that is over. A person may go past the guard:")
        self._type(f'{decision.wanted} {decision.node} --force --why "I looked at it"')

    def _show(self, duty: NodeOutage, labels: Sequence[Mapping[str, object]]) -> None:
        node = duty.node
        if duty.stage is Health.DRAINING:
            self._say(f"{node} gets no new jobs. Those that run there leave it within 20 s.")
        elif duty.stage is Health.VALIDATING:
            self._say(f"{node} is empty. Its GPUs are probed.")
        elif duty.by != "drover":
            self._say(f"{node} is empty. It was drained by hand, so it stays out until you want it back.")
            self._by_hand(node, labels)
        elif duty.stage is Health.DRAINED and not duty.waits_for and not duty.withheld:
            self._say(f"{node} is empty.")
        else:
            word = "failed its probes" if duty.stage is Health.REPAIR else "stays out"
            self._say(f"{node} {word}: {plain(duty.reason)}")
            self._remedy(duty, labels)

    def _by_hand(self, node: str, labels: Sequence[Mapping[str, object]]) -> None:
        cures = _cures(node, labels)
        if "" in cures:
            self._say(f"    {NO_BOOT}")
            return
        if cures:
            self._type(f'reboot {node} --why "a boot ends this fault"')
            self._say("    It is up after 20 s. Then:")
        self._type(f'resume {node} --why "the work is done"')

    def _remedy(self, duty: NodeOutage, labels: Sequence[Mapping[str, object]]) -> None:
        node = duty.node
        cures = _cures(node, labels)
        if duty.waits_for is WaitsFor.RESET:
            self._type(f'reset {node} --why "its GPU asks for a reset"')
            self._say("    It is probed by itself when that is done.")
        elif "" in cures and duty.waits_for is not WaitsFor.REBOOT:
            self._say(f"    {NO_BOOT}")
        elif duty.waits_for in (WaitsFor.TELEMETRY, WaitsFor.FINDING) and node in self._to_boot:  # it has booted
            of = "all its GPUs report" if duty.waits_for is WaitsFor.TELEMETRY else "the finding is over"
            self._say(f"    Nothing to type: it goes on when {of}.")
        elif duty.waits_for is WaitsFor.REBOOT or cures:
            self._to_boot.add(node)
            self._type(f'reboot {node} --why "a boot ends this fault"')
            self._say("    It is up after 20 s, and probed by itself when all its GPUs report.")
        elif not duty.waits_for:
            self._type(f'resume {node} --why "I looked at it"')

    def _suggest(self, labels: Sequence[Mapping[str, object]], out: Mapping[str, NodeOutage]) -> None:
        """A healthy node to drain by hand, once; in a rack without faults where there is one."""
        faulty = {str(label["node"]) for label in labels} | set(out)
        racks = {node.rack for node in self._spec.nodes if node.name in faulty}
        free = [node for node in self._spec.nodes if node.name not in faulty]
        if self._suggested or not free:
            return
        self._suggested = True
        chosen = next((node for node in free if node.rack not in racks), free[0])
        self._say("You can also take out a healthy node by hand, for work on it:")
        self._type(f'drain {chosen.name} --why "a fan is replaced"')


def _cures(node: str, labels: Sequence[Mapping[str, object]]) -> set[str]:
    """What ends the faults that were injected into the node; "": nothing does."""
    from drover_simulator.kinds import KINDS

    return {KINDS[str(x["kind"]), str(x["cause"])].cured_by for x in labels if x["node"] == node}


def _asked(decision: Decision) -> str:
    """What a yes does, in words."""
    if not decision.node:
        return "go on, although many nodes fail at once"
    words = {RecommendedAction.NONE: "put {} back", RecommendedAction.ADVISE: "have new jobs avoid {}"}
    return words.get(decision.wanted, f"{decision.wanted} {{}}").format(decision.node)
