"""Decode XID 144-150: what an NVLink 5 error (Blackwell) is, from the registers in its kernel-log line.

    NVRM: Xid (PCI:0018:01:00): 149, NETIR_LINK_EVT Fatal XC0 i0 Link 08 (0x004505c6 0x00000000 0x00000000 ...)
                                     unit           |     |   |  link     interrupt  error
                                                  fatal   |   injected    info       status
                                                      cross-contained

Source: NVIDIA XID catalog, sheets "XID 144-150 Decode" and "Fault Resolution Buckets"
(https://docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html). The interrupt info has two layouts:

    driver   bits 25:20      10 or 7   9:5    4:0      6:0
    < R575   reason (149)    10 fatal  unit   engine
    >= R575  reason (149)     7 fatal                  unit

The engine is the XID minus 143. Lines seen in the field from R570 and on factory testers have the first layout. No
value of one layout fits a row of the same XID in the other (a test proves it), so the driver's version is not needed.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, NamedTuple, TypeAlias

from drover_core.model.events import Severity
from drover_core.xid.actions import XidAction

Reach: TypeAlias = Literal["none", "link", "gpu"]
"""What a fatal error costs: nothing, one link (the GPU drains, then needs a reset), or the GPU."""

Origin: TypeAlias = Literal["hardware", "software", "firmware", "undecided"]


@dataclass(frozen=True, slots=True)
class RegisterLine:
    """The fields of a kernel-log line of XID 144-150."""

    unit: str
    fatal: bool
    cross_contained: bool
    injected: bool
    link: int | None
    intr_info: int
    error_status: int


@dataclass(frozen=True, slots=True)
class Nvlink5Error:
    """A decoded XID 144-150. `link` is None if the error does not belong to one link."""

    code: int
    unit: str
    link: int | None
    fatal: bool
    injected: bool
    reach: Reach
    severity: Severity
    origin: Origin
    action: XidAction
    followup: XidAction
    reason: str

    @property
    def hardware(self) -> bool | None:
        """As `Xid.hardware`: None if the source does not decide."""
        return {"hardware": True, "software": False}.get(self.origin)


class Row(NamedTuple):
    """One case. `status` and `promoted` are None if they do not matter."""

    reason: int
    status: int | None
    promoted: bool | None
    reach: Reach
    origin: Origin
    action: XidAction
    followup: XidAction


class Unit(NamedTuple):
    """A part of the NVLink hardware, with its name and number in each layout."""

    code: int
    old_name: str
    name: str
    old_bits: int
    bits: int
    rows: tuple[Row, ...]

    def old_low_bits(self) -> int:
        """Return bits 9:0 of the interrupt info before R575: unit and engine. MSE (150) leaves both at zero."""
        return 0 if self.code == 150 else self.old_bits << 5 | (self.code - 143)


_A = XidAction
_IGNORE_SUPPORT = (_A.IGNORE, _A.CONTACT_SUPPORT)
_RESET_SUPPORT = (_A.RESET_GPU, _A.CONTACT_SUPPORT)


def _minor(status: int) -> Row:
    return Row(0, status, None, "none", "hardware", _A.IGNORE, _A.IGNORE)


def _nonfatal(status: int) -> Row:
    return Row(0, status, None, "none", "hardware", *_IGNORE_SUPPORT)


def _gpu_fatal(status: int, origin: Origin = "hardware") -> Row:
    return Row(0, status, None, "gpu", origin, *_RESET_SUPPORT)


def _software(status: int, action: XidAction = _A.IGNORE, followup: XidAction = _A.CONTACT_SUPPORT) -> Row:
    return Row(0, status, None, "none", "software", action, followup)


def _promotable(status: int) -> tuple[Row, Row]:
    """Return the rows of an error that the driver may raise to fatal: the catalog's "action 2", by the fatal bit."""
    return (
        Row(0, status, False, "none", "software", *_IGNORE_SUPPORT),
        Row(0, status, True, "gpu", "software", *_RESET_SUPPORT),
    )


def _link_down(reason: int, origin: Origin, followup: XidAction, action: XidAction = _A.RESET_GPU) -> Row:
    return Row(reason, None, None, "link", origin, action, followup)


_TOP_BIT = 0x80000000  # the same software error in each unit
_TLW = (_minor(1), _nonfatal(2), _gpu_fatal(4), _software(_TOP_BIT))
_LOST_REQUEST = (_A.XID_154_OR_RESTART_APP, _A.CHECK_LINK_DOWN)

UNITS: tuple[Unit, ...] = (
    Unit(
        144,
        "SAW_MVB",
        "SAW_MVB",
        1,
        1,
        (_nonfatal(1), _gpu_fatal(2), _minor(4), _nonfatal(8), _gpu_fatal(0x10), _minor(0x20)),
    ),
    Unit(145, "RLW_CTRL", "RLW_CTRL", 3, 3, (_software(_TOP_BIT),)),
    Unit(
        145,
        "RLW_REMAP",
        "RLW_REMAP",
        4,
        4,
        (
            _software(1, _A.XID_154_OR_RESTART_APP),
            _software(2, _A.XID_154_OR_RESTART_APP),
            _software(4, *_LOST_REQUEST),
            _software(8, *_LOST_REQUEST),
            _software(0x10, *_LOST_REQUEST),
            _software(0x20, *_LOST_REQUEST),
            _gpu_fatal(0x40),
            _gpu_fatal(0x80),
            _minor(0x100),
            _minor(0x200),
            _software(_TOP_BIT),
        ),
    ),
    Unit(145, "RLW_RSPCOL", "RLW_RSPCOL", 5, 5, (_minor(1), _gpu_fatal(2), _software(_TOP_BIT))),
    Unit(
        145,
        "RLW_RXPIPE",
        "RLW_RXPIPE",
        6,
        6,
        (
            *_promotable(1),
            *_promotable(2),
            *_promotable(4),
            Row(0, 8, None, "none", "undecided", *_IGNORE_SUPPORT),
            _software(_TOP_BIT),
        ),
    ),
    Unit(
        145,
        "RLW_SRC_TRACK",
        "RLW_SRC_TRACK",
        7,
        7,
        (
            _gpu_fatal(1),
            _minor(2),
            Row(0, 4, None, "none", "undecided", _A.XID_154_OR_RESTART_APP, _A.IGNORE),
            Row(0, 8, None, "none", "undecided", _A.XID_154_OR_RESTART_APP, _A.IGNORE),
            _gpu_fatal(0x10),
            _gpu_fatal(0x20),
            _software(_TOP_BIT),
        ),
    ),
    Unit(
        145,
        "RLW_TAGSTATE",
        "RLW_TAGSTATE",
        8,
        8,
        (
            _minor(1),
            _gpu_fatal(2),
            _minor(0x10000),
            _gpu_fatal(0x20000),
            _gpu_fatal(0x100000),
            _software(_TOP_BIT),
        ),
    ),
    Unit(146, "TLW_CTRL", "TLW_CTRL", 9, 9, _TLW),
    Unit(146, "TLW_RX", "TLW_RX_PIPE0", 10, 10, _TLW),
    Unit(146, "TLW_RX", "TLW_RX_PIPE1", 10, 11, _TLW),
    Unit(146, "TLW_TX", "TLW_TX_PIPE0", 11, 12, _TLW),
    Unit(146, "TLW_TX", "TLW_TX_PIPE1", 11, 13, _TLW),
    Unit(147, "TREX", "TREX", 12, 14, (_software(1), _software(_TOP_BIT))),
    Unit(148, "NVLPW_CTRL", "NVLPW", 0, 15, (_software(_TOP_BIT),)),
    Unit(149, "NETIR", "NETIR_INT", 0, 24, (_link_down(0, "undecided", _A.REPORT_IF_ALONE),)),
    Unit(
        149,
        "NETIR_LINK_EVT",
        "NETIR_LINK_DOWN",
        14,
        17,
        (
            _link_down(0, "undecided", _A.REPORT_IF_ALONE),
            _link_down(1, "undecided", _A.REPORT_IF_REPEATED),
            _link_down(2, "undecided", _A.INVESTIGATE_SIGNAL),
            _link_down(4, "hardware", _A.INVESTIGATE_SIGNAL),
            _link_down(10, "hardware", _A.INVESTIGATE_SIGNAL),
            _link_down(15, "software", _A.INVESTIGATE_USER),
            _link_down(16, "software", _A.INVESTIGATE_USER_AND_SIGNAL),
            _link_down(17, "software", _A.INVESTIGATE_USER),
            _link_down(18, "software", _A.INVESTIGATE_USER_AND_SIGNAL),
            _link_down(21, "undecided", _A.INVESTIGATE_PEER),
            _link_down(22, "software", _A.INVESTIGATE_USER),
            _link_down(32, "undecided", _A.INVESTIGATE_PEER),
            _link_down(33, "undecided", _A.INVESTIGATE_PEER),
            _link_down(34, "undecided", _A.INVESTIGATE_PEER),
            _link_down(35, "hardware", _A.INVESTIGATE_PEER),
            _link_down(36, "undecided", _A.INVESTIGATE_PEER),
            _link_down(37, "undecided", _A.INVESTIGATE_PEER),
            _link_down(38, "undecided", _A.INVESTIGATE_USER, _A.IGNORE),
            Row(40, None, None, "gpu", "software", _A.IGNORE, _A.INVESTIGATE_HOST),
            _link_down(42, "hardware", _A.INVESTIGATE_SIGNAL_AND_CABLES),
            _link_down(43, "hardware", _A.INVESTIGATE_SIGNAL_AND_CABLES),
        ),
    ),
    Unit(
        149,
        "NETIR_BER_EVENT",
        "NETIR_BER_EVENT",
        17,
        19,
        tuple(
            Row(0, level, None, "none", "hardware", _A.IGNORE, _A.INVESTIGATE_SIGNAL_AND_CABLES) for level in range(4)
        ),
    ),
    Unit(
        149,
        "NETIR_MFDE_EVENT",
        "NETIR_MFDE_EVENT",
        18,
        20,
        (
            _gpu_fatal(1, "undecided"),
            Row(0, 3, None, "none", "undecided", _A.IGNORE, _A.IGNORE),
            _gpu_fatal(4, "undecided"),
            _gpu_fatal(5, "undecided"),
            _gpu_fatal(7, "undecided"),
        ),
    ),
    Unit(150, "MSE Degraded", "MSE Degraded", 0, 0, (_gpu_fatal(0, "firmware"), _gpu_fatal(0xFFFFFFFF, "firmware"))),
    Unit(150, "MSE_WATCHDOG", "MSE_WATCHDOG", 0, 0, (_gpu_fatal(0, "firmware"),)),
)

# Why a link went down: the port's reason codes, named by mstflint (mlxlink, "local reason opcode").
LINK_DOWN_REASONS: Mapping[int, str] = MappingProxyType(
    {
        0: "no reason given",
        1: "reason unknown",
        2: "too many bit errors",
        4: "the lanes lost their alignment",
        10: "a retransmission on the wire timed out",
        15: "taken down from outside the GPU while healthy",
        16: "taken down from outside the GPU, with too many bit errors",
        17: "taken down over the link while healthy",
        18: "taken down over the link, with too many bit errors",
        21: "the far end began to train the link again",
        22: "taken down by a management command",
        32: "the far end went to sleep",
        33: "the far end was disabled",
        34: "the far end was disabled and its port locked",
        35: "the far end overheated",
        36: "the far end was forced down",
        37: "the far end was reset",
        38: "reset without a power cycle",
        40: "forced down by hardware",
        42: "it did not wake from its low-power state",
        43: "too many recoveries from errors",
    }
)

_LINE = re.compile(
    r"(?P<unit>[A-Z][A-Za-z0-9_/ ]{0,40}?)\s{1,8}(?P<fatal>Nonfatal|Fatal)\s+XC(?P<contained>\d)\s+i(?P<injected>\d)"
    r"\s+Link\s+(?P<link>-?\d+)\s+\((?P<info>0x[0-9a-fA-F]{1,8})\s+(?P<status>0x[0-9a-fA-F]{1,8})\b"
)


def parse_line(message: str) -> RegisterLine | None:
    """Read the fields of a line of XID 144-150; None if it has another form or was cut before its registers."""
    found = _LINE.search(message)
    if found is None:
        return None
    link = int(found["link"])
    return RegisterLine(
        unit=found["unit"],
        fatal=found["fatal"] == "Fatal",
        cross_contained=found["contained"] != "0",
        injected=found["injected"] != "0",
        link=link if link >= 0 else None,
        intr_info=int(found["info"], 16),
        error_status=int(found["status"], 16),
    )


def _matches(row: Row, reason: int, status: int, promoted: bool) -> bool:
    return (
        row.reason == reason
        and (row.status is None or row.status == status)
        and (row.promoted is None or row.promoted == promoted)
    )


def matching_rows(code: int, intr_info: int, error_status: int) -> list[tuple[str, Row]]:
    """Return each (unit name, row) that fits the registers: in the layout since R575, else in the older one."""
    reason = intr_info >> 20 & 0x3F
    units = [unit for unit in UNITS if unit.code == code]
    found = [
        (unit.name, row)
        for unit in units
        if unit.bits == intr_info & 0x7F
        for row in unit.rows
        if _matches(row, reason, error_status, bool(intr_info >> 7 & 1))
    ]
    return found or [
        (unit.old_name, row)
        for unit in units
        if unit.old_low_bits() == intr_info & 0x3FF
        for row in unit.rows
        if _matches(row, reason, error_status, bool(intr_info >> 10 & 1))
    ]


def _severity(row: Row, fatal: bool) -> Severity:
    if row.action is XidAction.RESET_GPU:
        return Severity.CRITICAL
    if row.reach == "none" and fatal:
        return Severity.CRITICAL  # the driver says so, although the table calls the same bits harmless
    if row.action is XidAction.IGNORE and row.followup is XidAction.IGNORE:
        return Severity.INFO
    return Severity.WARNING


def decode(code: int, message: str) -> Nvlink5Error | None:
    """Return what an XID 144-150 is; None if the line cannot be read or no row has its registers.

    `parse_line` gives unit, link and the driver's word "Fatal" also for unknown registers.
    """
    line = parse_line(message)
    if line is None:
        return None
    found = matching_rows(code, line.intr_info, line.error_status)
    # The two rows of XID 150 have the same registers and differ only in the name that the driver prints.
    unit, row = next((hit for hit in found if hit[0] == line.unit), found[0] if found else (None, None))
    if unit is None or row is None:
        return None
    return Nvlink5Error(
        code=code,
        unit=unit,
        link=line.link,
        fatal=line.fatal,
        injected=line.injected,
        reach=row.reach,
        severity=_severity(row, line.fatal),
        origin=row.origin,
        action=row.action,
        followup=row.followup,
        reason=LINK_DOWN_REASONS[row.reason] if row.reach == "link" or row.reason else "",
    )
