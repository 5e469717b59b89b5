"""Policy: a TOML file of rules that says what is wanted for an incident. Pure but for the loading.

The first rule that matches decides; without one, what the detectors ask for stands.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

from drover_collector.guard import GuardLimits
from drover_proto import settings
from drover_proto.events import WANTED_ORDER, Incident, IncidentKind, Severity, Wanted
from drover_proto.settings import SettingsError, between, one_of, required, setting

PRESETS = ("nvidia", "strict", "cautious")
UNPROVEN_MOST = Wanted.PROBE  # a straggler that no probe has confirmed: never more, whatever a rule says
SCOPES = ("gpu", "node", "rack", "leaf", "job")


def _each_of(*choices: str) -> Any:
    def check(values: tuple[str, ...]) -> str | None:
        wrong = [value for value in values if value not in choices]
        return f"{wrong[0]!r} is none of {', '.join(choices)}" if wrong else None

    return check


@dataclass(frozen=True)
class Rule:
    """One rule; a key that is left out matches everything."""

    action: str = required(f"what is wanted: one of {', '.join(Wanted)}", one_of(*Wanted))
    name: str = setting("", "shown with each decision")
    kind: tuple[str, ...] = setting((), "incident kinds", _each_of(*IncidentKind))
    cause: tuple[str, ...] = setting((), "causes, such as power_cap, silent, remap_failed")
    xid: tuple[int, ...] = setting((), "XID codes that are the incident's cause")
    scope: tuple[str, ...] = setting(("gpu", "node"), "scopes", _each_of(*SCOPES))
    severity: tuple[str, ...] = setting((), "severities", _each_of(*Severity))
    min_confidence: float = setting(0.0, "at least this confidence", between(0, 1))

    def matches(self, incident: Incident) -> bool:
        code = xid_of(incident.cause)
        return (
            (not self.kind or incident.kind in self.kind)
            and (not self.cause or incident.cause in self.cause)
            and (not self.xid or code in self.xid)
            and incident.scope in self.scope
            and (not self.severity or incident.severity in self.severity)
            and incident.confidence >= self.min_confidence
        )


@dataclass(frozen=True)
class PolicyFile:
    """Form of a policy file."""

    name: str = setting("", "name of the policy, shown in the console")
    mode: str = setting("observe", "observe: say what it would do; nothing is done", one_of("observe"))
    guard: GuardLimits = field(default_factory=GuardLimits)
    rules: tuple[Rule, ...] = setting((), "rules; the first that matches decides")


@dataclass(frozen=True, slots=True)
class Policy:
    name: str
    mode: str
    guard: GuardLimits
    rules: tuple[Rule, ...]

    @staticmethod
    def load(path: Path | None = None, preset: str = "nvidia") -> Policy:
        """The policy in `path`, or a preset.

        Raises:
            SettingsError: no such preset, or a file that cannot be used: the message names file, rule and key.
        """
        if path is None:
            if preset not in PRESETS:
                raise SettingsError(
                    f"policy {preset!r}: no such preset; use {', '.join(PRESETS)} or the path of a file"
                )
            path = Path(str(resources.files("drover_collector") / "policies" / f"{preset}.toml"))
        file = settings.load(PolicyFile, path)
        return Policy(file.name or path.stem, file.mode, file.guard, file.rules)

    @staticmethod
    def named(text: str) -> Policy:
        """A preset's name or a file's path, as commands and configs take it; see `load`."""
        looks_like_a_file = "/" in text or text.endswith(".toml") or Path(text).exists()
        return Policy.load(Path(text)) if looks_like_a_file and text not in PRESETS else Policy.load(None, text)

    def wanted(self, incident: Incident, asked: Wanted) -> tuple[Wanted, str]:
        """What is wanted for `incident`, and the name of the rule that says so.

        Args:
            asked: what its detectors ask for.
        """
        action, name = asked, "detector"
        for number, rule in enumerate(self.rules, 1):
            if rule.matches(incident):
                action, name = Wanted(rule.action), rule.name or f"rule {number}"
                break
        if incident.kind is IncidentKind.STRAGGLER and _stronger_than(action, UNPROVEN_MOST):
            return UNPROVEN_MOST, f"{name}, not beyond {UNPROVEN_MOST.value} without a probe's proof"
        return action, name


def xid_of(cause: str) -> int | None:
    """79 of `xid_79` and of `xid_79_repeated`; None of other causes."""
    found = re.fullmatch(r"xid_(\d+)(_repeated)?", cause)
    return int(found[1]) if found else None


def _stronger_than(a: Wanted, b: Wanted) -> bool:
    return WANTED_ORDER.index(a) > WANTED_ORDER.index(b)
