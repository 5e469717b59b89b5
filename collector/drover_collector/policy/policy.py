"""Policy: a TOML file of rules that says what is wanted for an incident. Pure but for the loading.

The first rule that matches decides; without one, what the detectors ask for stands.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

from drover_collector.policy.guard import GuardLimits
from drover_core import settings
from drover_core.model.conditions import is_foreign
from drover_core.model.events import (
    WANTED_ORDER,
    GpuRef,
    Incident,
    IncidentKind,
    RecommendedAction,
    Severity,
)
from drover_core.model.fleet import NodeSpec
from drover_core.settings import (
    SettingsError,
    between,
    one_of,
    required,
    setting,
)

PRESETS = ("nvidia", "strict", "cautious")
MODES = ("observe", "approve", "enforce")  # the more is done, the later
SLOWDOWN_MOST = RecommendedAction.WATCH  # a job that is slow as a whole proves nothing against a node
FOREIGN_MOST = RecommendedAction.ADVISE  # a Kubernetes node's condition that others wrote, whatever a rule says
UNPROVEN_MOST = RecommendedAction.PROBE  # a straggler that no probe has confirmed: never more, whatever a rule says
PROOF = "probe"  # the detector among an incident's that is a probe's proof
SCOPES = ("gpu", "node", "rack", "leaf", "job")
DETECTOR = "detector"  # named as the rule where none matched


def _each_of(*choices: str) -> Any:
    def check(values: tuple[str, ...]) -> str | None:
        wrong = [value for value in values if value not in choices]
        return f"{wrong[0]!r} is none of {', '.join(choices)}" if wrong else None

    return check


@dataclass(frozen=True)
class Rule:
    """One rule; a key that is left out matches everything."""

    action: str = required(f"what is wanted: one of {', '.join(RecommendedAction)}", one_of(*RecommendedAction))
    name: str = setting("", "shown with each decision")
    mode: str = setting("", f"instead of the policy's: one of {', '.join(MODES)}", one_of("", *MODES))
    kind: tuple[str, ...] = setting((), "incident kinds", _each_of(*IncidentKind))
    cause: tuple[str, ...] = setting((), "causes, such as power_cap, silent, remap_failed")
    xid: tuple[int, ...] = setting((), "XID codes that are the incident's cause")
    scope: tuple[str, ...] = setting(("gpu", "node"), "scopes", _each_of(*SCOPES))
    severity: tuple[str, ...] = setting((), "severities", _each_of(*Severity))
    pool: tuple[str, ...] = setting((), "pools of the fleet file")
    sku: tuple[str, ...] = setting((), "SKUs of the fleet file")
    min_confidence: float = setting(0.0, "at least this confidence", between(0, 1))
    save_s: float = setting(
        0.0,
        "of drain and isolate: the node's jobs are asked to save themselves first, and have this long; 0: not asked",
        between(0, 86_400),
    )
    take_out: str = setting(
        "node",
        "of drain: what goes out of service, the node, or the GPU of the incident alone where its scheduler can;"
        " gpu or node",
        one_of("node", "gpu"),
    )

    def matches(self, incident: Incident, place: NodeSpec | None) -> bool:
        return (
            (not self.kind or incident.kind in self.kind)
            and (not self.cause or incident.cause in self.cause)
            and (not self.xid or xid_of(incident.cause) in self.xid)
            and incident.scope in self.scope
            and (not self.severity or incident.severity in self.severity)
            and (not self.pool or (place is not None and place.pool in self.pool))
            and (not self.sku or (place is not None and place.sku in self.sku))
            and incident.confidence >= self.min_confidence
        )

    def covers(self, other: Rule) -> bool:
        """Whether whatever `other` matches, this matches too: after this one, `other` never decides."""
        keys = ("kind", "cause", "xid", "severity", "pool", "sku")
        wide = all(not getattr(self, k) or set(getattr(other, k) or ("",)) <= set(getattr(self, k)) for k in keys)
        return wide and set(other.scope) <= set(self.scope) and self.min_confidence <= other.min_confidence


@dataclass(frozen=True)
class Override:
    """What is otherwise for some pools or SKUs. The first that matches a node counts."""

    pool: tuple[str, ...] = setting((), "pools of the fleet file; left out: all")
    sku: tuple[str, ...] = setting((), "SKUs of the fleet file; left out: all")
    mode: str = setting("", "instead of the policy's; a rule's mode counts only where it does less", one_of("", *MODES))
    at_most: str = setting("isolate", "never more than this is wanted there", one_of(*RecommendedAction))

    def matches(self, place: NodeSpec) -> bool:
        return (not self.pool or place.pool in self.pool) and (not self.sku or place.sku in self.sku)


@dataclass(frozen=True)
class PolicyFile:
    """Form of a policy file."""

    name: str = setting("", "name of the policy, shown in the console")
    mode: str = setting(
        "observe", "observe: say what it would do; approve: ask a person; enforce: do it", one_of(*MODES)
    )
    approval_expires_s: float = setting(
        3600.0, "a decision that nobody answers expires after this long", between(60, 7 * 86_400)
    )
    approval_again_s: float = setting(
        14_400.0, "and is asked again after this long, while the incident is open", between(60, 30 * 86_400)
    )
    guard: GuardLimits = field(default_factory=GuardLimits)
    overrides: tuple[Override, ...] = setting((), "what is otherwise for some pools or SKUs")
    rules: tuple[Rule, ...] = setting((), "rules; the first that matches decides")


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the policy says of one incident."""

    wanted: RecommendedAction
    rule: str
    mode: str
    save_s: float = 0.0
    one_gpu: bool = False  # the incident's GPU alone is to go, where that can be
    gpu: GpuRef | None = None  # and it can: only this GPU goes; None: the node
    forgeable: bool = False  # a user of the node could have written what it rests on, so a person is asked


@dataclass(frozen=True, slots=True)
class Policy:
    name: str
    mode: str
    guard: GuardLimits
    rules: tuple[Rule, ...]
    overrides: tuple[Override, ...] = ()
    approval_expires_s: float = 3600.0
    approval_again_s: float = 14_400.0

    @staticmethod
    def load(path: Path | None = None, preset: str = "nvidia") -> Policy:
        """The policy in `path`, or a preset.

        Raises:
            SettingsError: no such preset, or a file that cannot be used: the message names file, line, rule and key.
        """
        if path is None:
            if preset not in PRESETS:
                raise SettingsError(
                    f"policy {preset!r}: no such preset; use {', '.join(PRESETS)} or the path of a file"
                )
            path = Path(str(resources.files("drover_collector.policy") / "presets" / f"{preset}.toml"))
        file = settings.load(PolicyFile, path)
        _check_take_out(file, path)
        if not path.read_text("utf-8").strip():
            raise SettingsError(f"{path}: is empty; a full disk or a copy that broke off leaves such files")
        return Policy(
            file.name or path.stem, file.mode, file.guard, file.rules, file.overrides, file.approval_expires_s,
            file.approval_again_s,
        )  # fmt: skip

    @staticmethod
    def named(text: str) -> Policy:
        """A preset's name or a file's path, as commands and configs take it; see `load`."""
        looks_like_a_file = "/" in text or text.endswith(".toml") or Path(text).exists()
        return Policy.load(Path(text)) if looks_like_a_file and text not in PRESETS else Policy.load(None, text)

    def wanted(
        self, incident: Incident, asked: RecommendedAction, place: NodeSpec | None = None
    ) -> tuple[RecommendedAction, str]:
        """What is wanted for `incident`, and the name of the rule that says so; see `judge`."""
        verdict = self.judge(incident, asked, place)
        return verdict.wanted, verdict.rule

    def judge(self, incident: Incident, asked: RecommendedAction, place: NodeSpec | None = None) -> Verdict:
        """What is wanted for `incident`, which rule says so, and in which mode.

        Args:
            asked: what its detectors ask for.
            place: the node it is on, for what holds of some pools and SKUs only.
        """
        wanted, name, mode, save_s, one_gpu = asked, DETECTOR, "", 0.0, False
        for number, rule in enumerate(self.rules, 1):
            if rule.matches(incident, place):
                wanted, name, mode = RecommendedAction(rule.action), rule.name or f"rule {number}", rule.mode
                save_s, one_gpu = rule.save_s, rule.take_out == "gpu"
                break
        override = next((o for o in self.overrides if place is not None and o.matches(place)), None)
        if override is not None and _stronger_than(wanted, RecommendedAction(override.at_most)):
            wanted, name = RecommendedAction(override.at_most), f"{name}, at most {override.at_most} there"
        unproven = incident.kind is IncidentKind.STRAGGLER and PROOF not in incident.detectors
        if unproven and _stronger_than(wanted, UNPROVEN_MOST):
            wanted, name = UNPROVEN_MOST, f"{name}, not beyond {UNPROVEN_MOST.value} without a probe's proof"
        if incident.kind is IncidentKind.SLOWDOWN and _stronger_than(wanted, SLOWDOWN_MOST):
            wanted, name = SLOWDOWN_MOST, f"{name}, not beyond {SLOWDOWN_MOST.value} for a job that is slow as a whole"
        if is_foreign(incident.cause) and _stronger_than(wanted, FOREIGN_MOST):
            wanted, name = FOREIGN_MOST, f"{name}, not beyond {FOREIGN_MOST.value} for what others wrote on the node"
        there = override.mode if override is not None else ""
        mode = least_mode(mode, there) if mode and there else mode or there or self.mode
        return Verdict(wanted, name, mode, save_s, one_gpu and wanted is RecommendedAction.DRAIN)

    @property
    def most_mode(self) -> str:
        """The mode in which the most is done that any part of this policy names."""
        parts = (self.mode, *(r.mode for r in self.rules), *(o.mode for o in self.overrides))
        return max((mode for mode in parts if mode), key=MODES.index)

    @property
    def isolates(self) -> bool:
        """Whether any rule takes out a GPU alone."""
        return any(rule.take_out == "gpu" for rule in self.rules)

    def never_decides(self) -> list[tuple[int, int]]:
        """(rule, the rule before it that leaves it nothing), counted from 0."""
        found = []
        for later, rule in enumerate(self.rules):
            for earlier in range(later):
                if self.rules[earlier].covers(rule):
                    found.append((later, earlier))
                    break
        return found


def _check_take_out(file: PolicyFile, path: Path) -> None:
    """Raises SettingsError: a rule takes out a GPU alone by something else than a drain, or asks jobs to save too."""
    for number, rule in enumerate(file.rules):
        if rule.take_out != "gpu":
            continue
        if rule.action != RecommendedAction.DRAIN:
            raise SettingsError(
                f'{path}: rules[{number}]: take_out = "gpu" needs action = "drain": the job on the GPU runs to its end'
            )
        if rule.save_s:
            raise SettingsError(
                f'{path}: rules[{number}]: take_out = "gpu" asks no job to save itself; leave save_s out'
            )


def least_mode(*modes: str) -> str:
    """Of these modes the one in which the least is done."""
    return min(modes, key=MODES.index)


def xid_of(cause: str) -> int | None:
    """79 of `xid_79` and of `xid_79_repeated`; None of other causes."""
    found = re.fullmatch(r"xid_(\d+)(_repeated)?", cause)
    return int(found[1]) if found else None


def _stronger_than(a: RecommendedAction, b: RecommendedAction) -> bool:
    return WANTED_ORDER.index(a) > WANTED_ORDER.index(b)
