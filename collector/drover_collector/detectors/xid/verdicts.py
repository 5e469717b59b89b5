"""What one XID or SXid line means and asks for, by the tables of `drover_proto`: no history, no fleet."""

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


# A fatal code asks for a drain, hence its advice begins with that; the tables' words speak of the GPU alone.
_FATAL_ADVICE = {
    XidAction.RESET_GPU: "Drain the node, then reset the GPU; let nothing else run on it before.",
    XidAction.RESTART_NODE: "Drain the node, then reboot it; cut its power when the GPU stays away.",
    XidAction.RESTART_VM: "Drain the node, then restart the virtual machine that holds the GPU.",
    XidAction.WORKFLOW_XID_48: "Drain the node, then reset the GPU; run diagnostics when it comes again.",
    XidAction.WORKFLOW_NVLINK: "Drain the node, then reset the GPU; if it comes again, check its seat and its links.",
    XidAction.UNKNOWN: "Drain the node, then ask the hardware vendor: NVIDIA names no action for this code.",
}


class Remedy(StrEnum):
    """What mends a fault, and nothing less."""

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
    """What to do first, in words that fit what the verdict asks for."""
    if severity is Severity.CRITICAL:
        return _FATAL_ADVICE.get(action, f"Drain the node. {ADVICE[action]}")
    if severity is Severity.WARNING and action is XidAction.IGNORE:
        return "It needs nothing by itself; see whether other errors follow on this GPU."
    if severity is Severity.WARNING and action is XidAction.UNKNOWN:
        return "NVIDIA names no action for this code: watch the GPU, and ask the hardware vendor when it comes again."
    return ADVICE[action]


@dataclass(frozen=True, slots=True)
class Verdict:
    """One line, judged alone. `app`: the program that ran is the first suspect; `recovered`: the GPU is well again;
    `remedy`: the reset or reboot that the tables name, None where they name neither."""

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
    """The verdict on an XID or SXid event; None when its code is no number."""
    if not event.code.isdigit():
        return None
    code = int(event.code)
    if event.kind is EventKind.SXID:
        return _sxid(code, event.message)
    row = lookup(code)
    if row is None:
        return Verdict(
            code, IncidentKind.XID, f"xid_{code}", Severity.WARNING, RecommendedAction.WATCH, 0.5,
            "A code that this version of Drover does not know (newer drivers add some).",
            "Look the code up in NVIDIA's XID catalog, and watch the GPU until then.", known=False,
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
                    f"{meaning} It was injected on purpose, by a test.", "Nothing to do.",
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
            meaning = f"{meaning} The driver calls it fatal; its registers stand in no table."
    if code == RECOVERY_CODE:
        wanted = recovery_action_from_message(event.message)
        if wanted is not None:
            severity = RECOVERY_SEVERITY.get(wanted, Severity.WARNING)
            advice = f"Do what the driver asks for: {wanted}."
            if wanted == RecoveryAction.NONE:
                advice = "Nothing to do."
            elif severity is Severity.CRITICAL:
                advice = f"Drain the node, then do what the driver asks for: {wanted}."
            meaning = f"{meaning} It now asks for: {wanted}."
            return Verdict(
                code, kind, f"xid_{code}", severity, _action(severity, XidAction.FOLLOW_XID_154), 0.95, meaning, advice,
                recovered=wanted == RecoveryAction.NONE, remedy=_remedy(severity, wanted),
            )  # fmt: skip
    return Verdict(
        code, kind, f"xid_{code}", severity, _action(severity, action),
        0.97 if severity is Severity.CRITICAL else 0.8, meaning, advice,
        app=row.hardware is False and severity is Severity.INFO and row.category is not XidCategory.INFORMATIONAL,
        remedy=_remedy(severity, action),
    )  # fmt: skip


def _remedy(severity: Severity, action: XidAction | str) -> Remedy | None:
    """Of a fatal code. `action`: the table's, or what an XID 154 asks for, which may be words of a newer driver."""
    return _REMEDIES.get(action) if severity is Severity.CRITICAL else None


def _action(severity: Severity, action: XidAction) -> RecommendedAction:
    """A reset or reboot needs the node free of work first, hence drain; what a restarted program mends needs none."""
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
            f"NVSwitch error {code}, which the driver calls fatal: GPUs behind that switch lose their links.",
            "Drain the node, then reset all its GPUs and switches (or reboot it); replace the tray if it comes back.",
            remedy=Remedy.RESET,
        )  # fmt: skip
    word = "not fatal" if fatal is False else "without saying whether it is fatal"
    return Verdict(
        code, IncidentKind.LINK, f"sxid_{code}", Severity.INFO, RecommendedAction.NONE, 0.6,
        f"NVSwitch error {code}, reported as {word}.", "Nothing to do now; watch for a fatal one on the same node.",
    )  # fmt: skip
