"""The registers of XID 144 to 150, of NVLink 5: what is decoded, what is not."""

import pytest

from drover_core.model.events import Severity
from drover_core.xid import nvlink5
from drover_core.xid.codes import XidAction

INFO, WARNING, CRITICAL = Severity


A = XidAction
ZEROS = " 0x00000000" * 4


def _line(code: int, unit: str, word: str, link: str, info: int, status: int) -> str:
    return f"NVRM: Xid (PCI:0018:01:00): {code}, {unit} {word} XC0 i0 Link {link} (0x{info:08x} 0x{status:08x}{ZEROS})"


@pytest.mark.parametrize(
    ("code", "text", "unit", "link", "fatal", "reach", "severity", "action", "followup"),
    [
        # lines of the field, layout before R575
        (149, "NETIR_LINK_EVT Fatal XC0 i0 Link 08 (0x004505c6 0x00000000",
         "NETIR_LINK_EVT", 8, True, "link", CRITICAL, A.RESET_GPU, A.INVESTIGATE_SIGNAL),
        (149, "NETIR_LINK_EVT  Fatal   XC0 i0 Link 01 (0x021425c6 0x00000000",
         "NETIR_LINK_EVT", 1, True, "link", CRITICAL, A.RESET_GPU, A.INVESTIGATE_PEER),
        (149, "NETIR_LINK_EVT Fatal XC0 i0 Link 00 (0x026001c6 0x00000000",
         "NETIR_LINK_EVT", 0, True, "link", WARNING, A.IGNORE, A.INVESTIGATE_USER),
        (149, "NETIR Fatal XC0 i0 Link -1 (0x000fe406 0x00000000",
         "NETIR", None, True, "link", CRITICAL, A.RESET_GPU, A.REPORT_IF_ALONE),
        (149, "NETIR_BER_EVENT Nonfatal XC0 i0 Link 03 (0x00086226 0x00000001",
         "NETIR_BER_EVENT", 3, False, "none", WARNING, A.IGNORE, A.INVESTIGATE_SIGNAL_AND_CABLES),
        (145, "pid=876767, name=ray::WorkerDict, RLW_RXPIPE Nonfatal XC0 i0 Link 13 (0x0409a0c2 0x00000008",
         "RLW_RXPIPE", 13, False, "none", WARNING, A.IGNORE, A.CONTACT_SUPPORT),
        (145, "pid=11436, name=cache_mgr_main, RLW_SRC_TRACK Nonfatal XC1 i0 Link 03 (0x040868e2 0x00000008",
         "RLW_SRC_TRACK", 3, False, "none", WARNING, A.XID_154_OR_RESTART_APP, A.IGNORE),
        (150, "MSE Degraded Fatal XC0 i0 Link -1 (0x00000000 0x00000000",
         "MSE Degraded", None, True, "gpu", CRITICAL, A.RESET_GPU, A.CONTACT_SUPPORT),
        (150, "MSE_WATCHDOG Fatal XC0 i0 Link -1 (0x00000000 0x00000000",
         "MSE_WATCHDOG", None, True, "gpu", CRITICAL, A.RESET_GPU, A.CONTACT_SUPPORT),
        # layout from R575 on
        (144, "SAW_MVB Nonfatal XC0 i0 Link 02 (0x00000001 0x00000004",
         "SAW_MVB", 2, False, "none", INFO, A.IGNORE, A.IGNORE),
        (144, "SAW_MVB Fatal XC0 i0 Link 02 (0x00000081 0x00000002",
         "SAW_MVB", 2, True, "gpu", CRITICAL, A.RESET_GPU, A.CONTACT_SUPPORT),
        (145, "RLW_REMAP Nonfatal XC1 i0 Link 05 (0x00000104 0x00000010",
         "RLW_REMAP", 5, False, "none", WARNING, A.XID_154_OR_RESTART_APP, A.CHECK_LINK_DOWN),
        (146, "TLW_RX_PIPE1 Fatal XC0 i0 Link 17 (0x0000008b 0x00000004",
         "TLW_RX_PIPE1", 17, True, "gpu", CRITICAL, A.RESET_GPU, A.CONTACT_SUPPORT),
        (147, "TREX Nonfatal XC0 i0 Link 00 (0x0000000e 0x80000000",
         "TREX", 0, False, "none", WARNING, A.IGNORE, A.CONTACT_SUPPORT),
        (148, "NVLPW Nonfatal XC0 i0 Link 00 (0x0000000f 0x80000000",
         "NVLPW", 0, False, "none", WARNING, A.IGNORE, A.CONTACT_SUPPORT),
        (149, "NETIR_LINK_DOWN Fatal XC0 i0 Link 04 (0x02800091 0x00000000",
         "NETIR_LINK_DOWN", 4, True, "gpu", WARNING, A.IGNORE, A.INVESTIGATE_HOST),
        (149, "NETIR_MFDE_EVENT Nonfatal XC0 i0 Link 04 (0x00000014 0x00000003",
         "NETIR_MFDE_EVENT", 4, False, "none", INFO, A.IGNORE, A.IGNORE),
    ],
)  # fmt: skip
def test_decode(
    code: int,
    text: str,
    unit: str,
    link: int | None,
    fatal: bool,
    reach: str,
    severity: Severity,
    action: XidAction,
    followup: XidAction,
) -> None:
    decoded = nvlink5.decode(code, f"[171167.620236] NVRM: Xid (PCI:0009:01:00): {code}, {text}{ZEROS})")
    assert decoded is not None
    assert (decoded.code, decoded.unit, decoded.link, decoded.fatal) == (code, unit, link, fatal)
    assert (decoded.reach, decoded.severity) == (reach, severity)
    assert (decoded.action, decoded.followup) == (action, followup)


@pytest.mark.parametrize(("info", "fatal_bit"), [(0xC2, 0x400), (0x06, 0x80)], ids=["before R575", "R575"])
@pytest.mark.parametrize("status", [1, 2, 4])
def test_the_fatal_bit_promotes_a_receive_error(info: int, fatal_bit: int, status: int) -> None:
    mild = nvlink5.decode(145, _line(145, "RLW_RXPIPE", "Nonfatal", "07", info, status))
    hard = nvlink5.decode(145, _line(145, "RLW_RXPIPE", "Fatal", "07", info | fatal_bit, status))
    assert mild is not None
    assert hard is not None
    assert (mild.reach, mild.severity, mild.action) == ("none", WARNING, A.IGNORE)
    assert (hard.reach, hard.severity, hard.action) == ("gpu", CRITICAL, A.RESET_GPU)


def test_the_drivers_fatal_outranks_a_harmless_row() -> None:
    decoded = nvlink5.decode(145, _line(145, "RLW_TAGSTATE", "Fatal", "07", 8, 1))
    assert decoded is not None
    assert (decoded.reach, decoded.fatal, decoded.severity) == ("none", True, CRITICAL)


def test_an_injected_error_says_so() -> None:
    line = _line(149, "NETIR_LINK_EVT", "Fatal", "00", 0x016415C6, 0).replace(" i0 ", " i1 ")
    decoded = nvlink5.decode(149, line)
    assert decoded is not None
    assert decoded.injected
    assert decoded.reason == "taken down by a management command"


def test_hardware_only_where_the_source_decides() -> None:
    seen = {}
    for reason in (4, 15, 21):
        decoded = nvlink5.decode(149, _line(149, "NETIR_LINK_DOWN", "Fatal", "00", reason << 20 | 17, 0))
        assert decoded is not None
        seen[reason] = decoded.hardware
    assert seen == {4: True, 15: False, 21: None}


CASES = [
    pytest.param(unit, row, layout, id=f"{unit.code}-{unit.name}-{row.reason}-{row.status}-{row.promoted}-{layout}")
    for unit in nvlink5.UNITS
    for row in unit.rows
    for layout in ("old", "new")
]


@pytest.mark.parametrize(("unit", "row", "layout"), CASES)
@pytest.mark.parametrize("noise", [0, 0xFC0FE000], ids=["clear", "noise"])
def test_every_row_is_reached_in_both_layouts_and_in_no_other(
    unit: nvlink5.Unit, row: nvlink5.Row, layout: str, noise: int
) -> None:
    """The bits that no pattern fixes may be anything, and a word of one layout never fits the other's patterns."""
    low, fatal_bit, name = (
        (unit.old_low_bits(), 10, unit.old_name) if layout == "old" else (unit.bits, 7, unit.name)
    )  # fmt: skip
    info = row.reason << 20 | bool(row.promoted) << fatal_bit | low | noise
    found = nvlink5.matching_rows(unit.code, info, row.status or 0)
    assert (name, row) in found
    # the two pipes of a TLW share their old name and their rows; the two MSE rows differ by the printed name alone
    assert len({row for _, row in found}) == 1
    assert len({name for name, _ in found}) == 1 or unit.code == 150


def test_link_down_rows_have_a_reason_in_words() -> None:
    reasons = {row.reason for unit in nvlink5.UNITS if unit.code == 149 for row in unit.rows}
    assert reasons == set(nvlink5.LINK_DOWN_REASONS)


def test_nvlink5_rows_are_consistent() -> None:
    assert {unit.code for unit in nvlink5.UNITS} == set(range(144, 151))
    rows = [row for unit in nvlink5.UNITS for row in unit.rows]
    assert len(rows) == 99  # 95 of the catalog, one with two statuses, three promoted receive errors
    for row in rows:
        assert (row.action is A.RESET_GPU) == (row.reach != "none" and row.reason not in {38, 40})
        assert row.reach != "link" or row.status is None
        assert row.reason == 0 or row.reach != "none"


@pytest.mark.parametrize(
    "line",
    [
        "",
        "NVRM: Xid (PCI:0018:01:00): 145",
        "NVRM: Xid (PCI:0018:01:00): 145, pid=1, name=x, Ch 00000001",
        "NVRM: Xid (PCI:0018:01:00): 145, RLW_RXPIPE Nonfatal XC0 i0 Link 13 (0x0409a0c2",
        "NVRM: Xid (PCI:0018:01:00): 145, RLW_RXPIPE Nonfatal XC0 i0 Link 13 (...)",
        "NVRM: Xid (PCI:0018:01:00): 145, RLW_RXPIPE Maybe XC0 i0 Link 13 (0x0409a0c2 0x00000008)",
        "NVRM: Xid (PCI:0018:01:00): 145, RLW_RXPIPE Nonfatal XC0 i0 Link 13 (0xzz 0x00000008)",
        "NVRM: Xid (PCI:0018:01:00): 145, RLW_RXPIPE Nonfatal XC0 i0 Link 13 (0x10409a0c2ff 0x00000008)",
        "A" * 100_000,
        "A " * 20_000 + "Fatal",
    ],
    ids=range(10),
)
def test_junk_is_not_decoded(line: str) -> None:
    assert nvlink5.parse_line(line) is None
    assert nvlink5.decode(145, line) is None


def test_unknown_registers_are_not_decoded_but_still_read() -> None:
    line = _line(145, "RLW_RXPIPE", "Fatal", "13", 0x0409A0C2, 0x40)  # a status without a row
    assert nvlink5.decode(145, line) is None
    parsed = nvlink5.parse_line(line)
    assert parsed is not None
    assert (parsed.unit, parsed.fatal, parsed.link, parsed.error_status) == ("RLW_RXPIPE", True, 13, 0x40)
    assert nvlink5.decode(145, _line(145, "RLW_CTRL", "Fatal", "13", 0x00100003, 0x80000000)) is None  # reason not 0
    assert nvlink5.decode(149, _line(149, "NETIR_LINK_EVT", "Fatal", "13", 0x003001C6, 0)) is None  # reason 3


@pytest.mark.parametrize("code", [74, 143, 151, 154])
def test_other_codes_are_not_decoded(code: int) -> None:
    assert nvlink5.decode(code, _line(code, "SAW_MVB", "Fatal", "00", 1, 2)) is None
