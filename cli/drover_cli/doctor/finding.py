"""What a check finds, and how many are run so that one that hangs holds up none."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum


class FindingState(StrEnum):
    """`unknown` could not be looked at; it is neither well nor ill."""

    OK = "ok"
    WARN = "warn"
    BAD = "bad"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Finding:
    """`remedy` says what to do; it is empty only where nothing is to be done."""

    name: str
    state: FindingState
    text: str
    remedy: str = ""


Check = Callable[[], list[Finding]]


def ok(name: str, text: str) -> Finding:
    return Finding(name, FindingState.OK, text)


def warn(name: str, text: str, remedy: str) -> Finding:
    return Finding(name, FindingState.WARN, text, remedy)


def bad(name: str, text: str, remedy: str) -> Finding:
    return Finding(name, FindingState.BAD, text, remedy)


def unknown(name: str, text: str, remedy: str) -> Finding:
    return Finding(name, FindingState.UNKNOWN, text, remedy)


def run_all(checks: Mapping[str, Check], limit_s: float) -> list[Finding]:
    """The findings in the order of `checks`; one that does not return within the limit, or raises, is one itself."""
    done: queue.SimpleQueue[tuple[str, list[Finding]]] = queue.SimpleQueue()

    def run(name: str, check: Check) -> None:
        try:
            found = check()
        except Exception as error:  # noqa: BLE001  # whatever a check raises is its finding
            found = [unknown(name, f"the check itself failed: {type(error).__name__}: {error}", "report this")]
        done.put((name, found))

    for name, check in checks.items():
        threading.Thread(target=run, args=(name, check), name=f"doctor {name}", daemon=True).start()
    found: dict[str, list[Finding]] = {}
    deadline = time.monotonic() + limit_s
    while len(found) < len(checks):
        try:
            name, findings = done.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            break
        found[name] = findings
    hung = f"did not return within {limit_s:g} s"
    remedy = "look for a disk or a mount that hangs: ps -eo stat,comm | grep ^D"
    return [finding for name in checks for finding in found.get(name, [bad(name, hung, remedy)])]


def as_text(findings: Iterable[Finding]) -> str:
    listed = list(findings)
    width = max(len(finding.name) for finding in listed)
    lines = []
    for finding in listed:
        lines.append(f"{finding.state:<8} {finding.name:<{width}}  {finding.text}")
        if finding.remedy:
            lines.append(f"{'':<8} {'':<{width}}  -> {finding.remedy}")
    count = {state: sum(finding.state is state for finding in listed) for state in FindingState}
    return "\n".join([*lines, "", ", ".join(f"{number} {state}" for state, number in count.items() if number)])
