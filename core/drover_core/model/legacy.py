"""Reads what releases before 0.2 stored: they kept some state in the sentences that they showed to people.

`jsonform.from_dict` calls the function of a kind of record before it reads one. A record of today has the fields
already, and is returned unchanged. To be removed in the release after 0.2, with the sentences in it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Data = dict[str, Any]

_NOT_VALIDATED, _WITHHELD = "not validated: ", "resume withheld: "
_INCIDENT = re.compile(r"\(incident ([0-9a-f]{16})\)")
_PART_OF = "part of incident "
_CRASH = re.compile(r"failed with XID (\d+) on")
_HANG = ", which "
_OWN_PAST = re.compile(r"GPU (\d+) had [\d.]+ degC/W in its own past")
_DRIFT = re.compile(r"(.+?) is (.+?), while \d+ of \d+ ")
_FIRMWARE_OF = "firmware of "
_ATTRIBUTES: Mapping[str, tuple[str, str]] = {  # words of an attribute -> its key and unit
    "ECC mode": ("ecc_mode", ""),
    "power limit": ("power_limit_set_w", " W"),
    "highest SM clock": ("sm_clock_max_mhz", " MHz"),
    "highest memory clock": ("memory_clock_max_mhz", " MHz"),
    "MIG mode": ("mig_mode", ""),
    "driver": ("driver", ""),
    "VBIOS": ("vbios", ""),
    "GSP firmware": ("gsp_firmware", ""),
    "InfoROM": ("inforom_image", ""),
    "kernel": ("kernel", ""),
    "BIOS": ("bios", ""),
}
_USUAL = {
    "clock": "before, its clock was ",
    "duty": "before, its duty was ",
    "dram": "before, its HBM traffic was ",
    "late": "before, its node was without a kernel for ",
}
_PORT = re.compile(r"port (\S+?):? ")
_RESET = re.compile(r"went down together for moments,")
_SHIFT = re.compile(r"Slower since its driver: (.+?, driver \S+:) ")
_LEAF = re.compile(r"at leaf (.+?)(?: are down)?, on \d+ nodes")


def duty(data: Data) -> Data:
    if "withheld" in data:
        return data
    reason, withheld = data.get("reason", ""), ""
    passed = reason.startswith(_WITHHELD)
    if not data.get("waits_for") and data.get("stage") in ("draining", "drained"):
        withheld = "review" if reason.startswith(_NOT_VALIDATED) else "quiet" if passed else ""
    named = [found for found in _INCIDENT.findall(reason) if found != data.get("incident_id")]
    return {**data, "withheld": withheld, "passed_before": passed, "incidents": list(dict.fromkeys(named))}


def action(data: Data) -> Data:
    if "running" in data:
        return data
    detail = data.get("detail", "")
    return {**data, "running": detail == "its command runs", "foreign": detail.endswith("left as it is")}


def decision(data: Data) -> Data:
    if "cause" in data:
        return data
    reason, cause = data.get("reason", ""), ""
    if data.get("outcome") == "expired" and reason.startswith("nobody answered"):
        cause = "unanswered"
    elif data.get("outcome") == "held":
        cause = "guard"
        if reason.startswith("maintenance window"):
            cause = "maintenance"
        elif reason.startswith("the scheduler has not answered yet"):
            cause = "unknown"
        elif " answers again since " in reason:
            cause = "recovered"
    return {**data, "cause": cause}


def incident(data: Data) -> Data:
    if "snapshots" in data:
        return data
    detectors: Sequence[str] = data.get("detectors", ())
    evidence = [_fact(fact) for fact in data.get("evidence", ())]
    return {
        **data,
        "timeline": [_note(line, detectors) for line in data.get("timeline", ())],
        "evidence": evidence,
        "worsened": " Before that: " in data.get("summary", ""),
        "snapshots": {name: kept for name in detectors if (kept := _snapshot(name, data, evidence))},
    }


def verdict(data: Data) -> Data:
    if "shifted" in data:
        return data
    measured = sorted(data.get("measured", ()), key=len, reverse=True)
    shifted = [next((m for m in measured if shift.startswith(m)), "") for shift in data.get("shifts", ())]
    return {**data, "shifted": shifted}


def order(data: Data) -> Data:
    if "job" in data:
        return data
    word, _, job = data.get("protection", "").partition(" ")
    return {**data, "protection": word, "job": job}


def note(text: str, detectors: Sequence[str] = ()) -> Data:
    """The fields of a line of a timeline that was only a sentence."""
    head, colon, rest = text.partition(": ")
    if text.startswith(_PART_OF):
        return {"kind": "absorbed", "incident": text.removeprefix(_PART_OF), "why": text}
    if text.startswith("cleared by a probe"):
        return {"kind": "refuted", "why": text}
    if text == "closed: none of its nodes is to leave service":
        return {"kind": "no_longer_wanted", "why": rest}
    if head == "closed":
        return {"kind": "closed", "why": rest}
    if head in ("opened", "again"):
        return {"kind": head}
    if text.startswith("came back"):
        return {"kind": "came_back"}
    if colon and head in detectors:
        return {"kind": "ended" if rest == "over" else "joined", "detector": head}
    return {}


def _note(data: Data, detectors: Sequence[str]) -> Data:
    return data if "kind" in data else {**data, **note(data.get("text", ""), detectors)}


def _fact(data: Data) -> Data:
    if "port" in data:
        return data
    text = data.get("text", "")
    port, past = _PORT.match(text), _OWN_PAST.match(text)
    usual = next((name for name, head in _USUAL.items() if text.startswith(head)), "")
    key = f"own past of GPU {past[1]}" if past else f"usual {usual}" if usual else ""
    return {**data, "port": port[1] if port else "", "key": key}


def _snapshot(detector: str, data: Data, evidence: Sequence[Data]) -> Data:
    """What a detector keeps of its findings: the forms stand in the detectors."""
    if detector == "xid":
        found = _CRASH.search(data.get("summary", "")) if data.get("cause") == "job_crash" else None
        return {"code": int(found[1])} if found else {}
    if detector == "hang":
        why = data.get("summary", "").partition(_HANG)[2].removesuffix(".")
        return {"why": why} if why else {}
    if detector == "thermal":
        past = {
            m[1]: e["expected"] for e in evidence if (m := _OWN_PAST.match(e.get("text", ""))) and e.get("expected")
        }
        return {"past": past} if past else {}
    if detector == "drift":
        differs = dict(pair for e in evidence if (pair := _differs(e.get("text", ""))) is not None)
        return {"differs": differs} if differs else {}
    if detector == "straggler":
        usual = {
            name: e["value"]
            for name, head in _USUAL.items()
            for e in evidence
            if e.get("text", "").startswith(head) and e.get("value") is not None
        }
        return {"usual": usual} if usual else {}
    if detector == "links":
        leaf = _LEAF.search(data.get("summary", ""))
        resets = [
            [leaf[1] if leaf else "", int(e["value"]), e["from_ms"], e["to_ms"]]
            for e in evidence
            if _RESET.search(e.get("text", "")) and e.get("value") and e.get("from_ms") is not None and e.get("to_ms")
        ]
        if data.get("scope") != "leaf":
            return {}
        return ({"leafs": {leaf[1]: True}} if leaf else {}) | ({"resets": resets} if resets else {})
    if detector == "probe_drift":
        found = _SHIFT.match(data.get("summary", ""))
        return {"figures": {found[1]: True}} if found else {}
    if detector == "guard":
        return {"about": evidence[0].get("text", "")} if evidence else {}
    return {}


def _differs(text: str) -> tuple[str, str] | None:
    """Attribute and value."""
    said = _DRIFT.match(text)
    if said is None:
        return None
    if said[1].startswith(_FIRMWARE_OF):
        return f"nic.{said[1].removeprefix(_FIRMWARE_OF)}", said[2]
    known = _ATTRIBUTES.get(said[1])
    return None if known is None else (known[0], said[2].removesuffix(known[1]))


READERS: Mapping[str, Callable[[Data], Data]] = {
    "NodeOutage": duty,
    "Action": action,
    "Decision": decision,
    "Incident": incident,
    "ProbeVerdict": verdict,
    "ProbeOrder": order,
}
