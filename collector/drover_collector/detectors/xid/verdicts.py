"""Judge one XID or SXid line by the tables of drover_core.xid, without history or fleet."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from drover_core.model.events import (
    Event,
    EventKind,
    IncidentKind,
    RecommendedAction,
    Severity,
)
from drover_core.xid import nvlink5 as xids_nvlink5
from drover_core.xid.codes import (
    ADVICE,
    RECOVERY_SEVERITY,
    RecoveryAction,
    XidAction,
    XidCategory,
    lookup,
    recovery_action_from_message,
    sxid_is_fatal,
)

NVLINK5_CODES = range(144, 151)
RECOVERY_CODE = 154

_KINDS = {XidCategory.MEMORY: IncidentKind.MEMORY, XidCategory.NVLINK: IncidentKind.LINK}


# A fatal code asks for a drain, so its advice begins with one; the advice of NVIDIA's table is about the GPU alone.
_FATAL_ADVICE = {
    XidAction.RESET_GPU: "Drain the node, then reset the GPU. Run nothing else on it before.",
    XidAction.RESTART_NODE: "Drain the node, then reboot it. Power-cycle it if the GPU does not come back.",
    XidAction.RESTART_VM: "Drain the node, then restart the virtual machine that holds the GPU.",
    XidAction.WORKFLOW_XID_48: "Drain the node, then reset the GPU. Run diagnostics if the XID returns.",
    XidAction.WORKFLOW_NVLINK: "Drain the node, then reset the GPU. If the XID returns, check its seat and NVLinks.",
    XidAction.UNKNOWN: "Drain the node, then ask the hardware vendor: NVIDIA documents no action for this code.",
}


class Remedy(StrEnum):
    """The least that repairs a fault."""

    RESET = "reset"
    REBOOT = "reboot"


_REMEDIES: dict[str, Remedy] = {
    XidAction.RESET_GPU: Remedy.RESET,
    XidAction.WORKFLOW_XID_48: Remedy.RESET,
    XidAction.WORKFLOW_NVLINK: Remedy.RESET,
    XidAction.RESTART_NODE: Remedy.REBOOT,
    XidAction.RESTART_VM: Remedy.REBOOT,
    RecoveryAction.GPU_RESET: Remedy.RESET,
    RecoveryAction.DRAIN_AND_RESET: Remedy.RESET,
    RecoveryAction.NODE_REBOOT: Remedy.REBOOT,
}


def advice_for(severity: Severity, action: XidAction) -> str:
    """Return what to do, as the verdict's recommendation requires."""
    if severity is Severity.CRITICAL:
        return _FATAL_ADVICE.get(action, f"Drain the node. {ADVICE[action]}")
    if severity is Severity.WARNING and action is XidAction.IGNORE:
        return "Watch the GPU for further errors; this XID alone needs no action."
    if severity is Severity.WARNING and action is XidAction.UNKNOWN:
        return "NVIDIA documents no action for this code. Watch the GPU; ask the hardware vendor if the code returns."
    return ADVICE[action]


@dataclass(frozen=True, slots=True)
class Verdict:
    """The meaning of one line, judged alone.

    Attributes:
        app: the running program is the first suspect. recovered: the GPU is healthy again.
        remedy: the reset or reboot that the tables name; None: neither.
    """

    code: int
    kind: IncidentKind
    cause: str
    severity: Severity
    action: RecommendedAction
    confidence: float
    meaning: str
    advice: str
    app: bool = False
    recovered: bool = False
    known: bool = True
    remedy: Remedy | None = None


def judge(event: Event) -> Verdict | None:
    """Return the verdict on an XID or SXid event; None if its code is not a number."""
    if not event.code.isdigit():
        return None
    code = int(event.code)
    if event.kind is EventKind.SXID:
        return _sxid(code, event.message)
    row = lookup(code)
    if row is None:
        return Verdict(
            code, IncidentKind.XID, f"xid_{code}", Severity.WARNING, RecommendedAction.WATCH, 0.5,
            "This version of Drover does not know the code (newer drivers add some).",
            "Look up the code in NVIDIA's XID catalog, and watch the GPU.", known=False,
        )  # fmt: skip
    kind = _KINDS.get(row.category, IncidentKind.XID)
    severity, action, meaning = row.severity, row.action, row.meaning
    advice = advice_for(severity, action)
    if code in NVLINK5_CODES:
        decoded = xids_nvlink5.decode(code, event.message)
        if decoded is not None:
            if decoded.injected:
                return Verdict(
                    code, kind, f"xid_{code}", Severity.INFO, RecommendedAction.NONE, 0.95,
                    f"{meaning} A test injected it on purpose.", "Nothing to do.",
                )  # fmt: skip
            severity, action = decoded.severity, decoded.action
            advice = advice_for(severity, action)
            if decoded.followup not in (action, XidAction.IGNORE):
                advice += f" {ADVICE[decoded.followup]}"
            link = "" if decoded.link is None else f", link {decoded.link}"
            reason = f": {decoded.reason}" if decoded.reason else ""
            meaning = f"{meaning} {decoded.unit}{link}{reason}."
        elif (line := xids_nvlink5.parse_line(event.message)) is not None and line.fatal and not line.injected:
            severity, action = Severity.CRITICAL, XidAction.RESET_GPU
            advice = advice_for(severity, action)
            meaning = f"{meaning} The driver calls it fatal; NVIDIA's tables do not list its registers."
    if code == RECOVERY_CODE and (requested := recovery_action_from_message(event.message)) is not None:
        return _recovery(code, kind, meaning, requested)
    return Verdict(
        code, kind, f"xid_{code}", severity, _action(severity, action),
        0.97 if severity is Severity.CRITICAL else 0.8, meaning, advice,
        app=row.hardware is False and severity is Severity.INFO and row.category is not XidCategory.INFORMATIONAL,
        remedy=_remedy(severity, action),
    )  # fmt: skip


def _recovery(code: int, kind: IncidentKind, meaning: str, requested: str) -> Verdict:
    """Return the verdict on an XID 154, by which the driver requests a recovery action."""
    severity = RECOVERY_SEVERITY.get(requested, Severity.WARNING)
    advice = f"Do what the driver asks for: {requested}."
    if requested == RecoveryAction.NONE:
        advice = "Nothing to do."
    elif severity is Severity.CRITICAL:
        advice = f"Drain the node, then do what the driver asks for: {requested}."
    return Verdict(
        code, kind, f"xid_{code}", severity, _action(severity, XidAction.FOLLOW_XID_154), 0.95,
        f"{meaning} It now asks for: {requested}.", advice, recovered=requested == RecoveryAction.NONE,
        remedy=_remedy(severity, requested),
    )  # fmt: skip


def _remedy(severity: Severity, action: XidAction | str) -> Remedy | None:
    """Return the remedy of a fatal code. `action`: the table's, or the text of an XID 154."""
    return _REMEDIES.get(action) if severity is Severity.CRITICAL else None


def _action(severity: Severity, action: XidAction) -> RecommendedAction:
    """Return what to recommend. A fatal code needs a reset or reboot, and so a drained node."""
    if severity is Severity.CRITICAL:
        return RecommendedAction.DRAIN
    if severity is Severity.INFO or action in (XidAction.IGNORE, XidAction.INFORMATIONAL):
        return RecommendedAction.NONE if severity is Severity.INFO else RecommendedAction.WATCH
    return RecommendedAction.WATCH


def _sxid(code: int, message: str) -> Verdict:
    fatal = sxid_is_fatal(message)
    if fatal:
        return Verdict(
            code, IncidentKind.LINK, f"sxid_{code}", Severity.CRITICAL, RecommendedAction.DRAIN, 0.9,
            f"NVSwitch error {code}, which the driver calls fatal: GPUs behind that switch lose their NVLinks.",
            "Drain the node, then reset all its GPUs and switches, or reboot it. Replace the tray if it returns.",
            remedy=Remedy.RESET,
        )  # fmt: skip
    label = "not fatal" if fatal is False else "neither fatal nor not fatal"
    return Verdict(
        code, IncidentKind.LINK, f"sxid_{code}", Severity.INFO, RecommendedAction.NONE, 0.6,
        f"NVSwitch error {code}, reported as {label}.", "Nothing to do now. Watch the node for a fatal one.",
    )  # fmt: skip
