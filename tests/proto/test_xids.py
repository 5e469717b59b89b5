"""The XID tables: complete, consistent with themselves, and right about lines that drivers have printed."""

import re
from collections import Counter
from graphlib import TopologicalSorter

import pytest

from drover_proto import xids_nvlink5 as nvlink5
from drover_proto.events import Severity
from drover_proto.xids import (
    ADVICE,
    RECOVERY_SEVERITY,
    SYMPATHETIC,
    XIDS,
    RecoveryAction,
    Xid,
    XidAction,
    XidCategory,
    lookup,
    previous_xid_from_message,
    recovery_action_from_message,
    sxid_is_fatal,
)

INFO, WARNING, CRITICAL = Severity
FAMILIES = {"a100", "h100", "b100", "gb200"}
A = XidAction
ZEROS = " 0x00000000" * 4

every_xid = pytest.mark.parametrize("xid", XIDS.values(), ids=lambda xid: str(xid.code))


# --- the catalog ---------------------------------------------------------------------------------


def test_every_code_from_1_to_172_has_a_row() -> None:
    assert list(XIDS) == list(range(1, 173))
    assert all(lookup(code) is row and row.code == code for code, row in XIDS.items())
    assert lookup(0) is None
    assert lookup(173) is None


def test_no_two_codes_share_a_name_or_a_meaning() -> None:
    assert len({xid.mnemonic for xid in XIDS.values()}) == 172
    assert len({xid.meaning for xid in XIDS.values()}) == 172


@every_xid
def test_row_is_well_formed(xid: Xid) -> None:
    assert re.fullmatch(r"[A-Z0-9_]+( / [A-Z0-9_]+)?", xid.mnemonic)
    assert re.fullmatch(r"[A-Z][^.]*\.", xid.meaning), "one sentence"
    assert len(xid.meaning) <= 110
    assert xid.used_on <= FAMILIES
    assert xid.in_use == bool(xid.used_on)


@every_xid
def test_severity_follows_the_action(xid: Xid) -> None:
    if not xid.in_use:
        assert xid.severity is not CRITICAL
        assert xid.severity is INFO or xid.hardware is True or xid.category is XidCategory.FIRMWARE
    elif xid.action in {A.RESET_GPU, A.RESTART_NODE, A.RESTART_VM, A.WORKFLOW_XID_48, A.WORKFLOW_NVLINK}:
        assert xid.severity is CRITICAL
    elif xid.action is not A.UNKNOWN:
        assert xid.severity is not CRITICAL


@every_xid
def test_follow_up_tells_application_from_machine(xid: Xid) -> None:
    if xid.action is A.IGNORE and xid.followup is A.IGNORE:
        assert xid.severity is INFO
    if xid.action is A.RESTART_APP and xid.followup is A.CONTACT_SUPPORT:
        assert (xid.severity, xid.hardware, xid.category) == (WARNING, None, XidCategory.ENGINE)
    if xid.followup in {A.CHECK_APP, A.WORKFLOW_XID_13, A.WORKFLOW_XID_31, A.WORKFLOW_XID_137}:
        # 32 and 80 are corrupt transfers: the catalog blames the PCIe signal before the application
        expected = (WARNING, None) if xid.code in {32, 80} else (INFO, False)
        assert (xid.severity, xid.hardware) == expected
    if xid.category is XidCategory.APPLICATION and xid.in_use:
        assert (xid.severity, xid.hardware) == (INFO, False)
    if xid.hardware is False:
        # only a failed key change and a link that software took down disturb the GPU
        assert (xid.severity is CRITICAL) == (xid.code in {151, 155})


@every_xid
def test_action_is_unknown_only_where_the_catalog_leaves_it_open(xid: Xid) -> None:
    assert (xid.action is A.UNKNOWN) == (xid.code >= 162)
    assert xid.followup is not A.UNKNOWN or xid.code >= 162 or xid.code == 142 or not xid.in_use
    if not xid.in_use and xid.code not in {152, 153}:
        assert xid.action is A.CONTACT_SUPPORT
        assert xid.meaning.startswith("Not used on data-centre GPUs: ")


def test_numbered_engines_are_alike_and_say_their_number() -> None:
    said = {"CE": "Copy engine", "NVDEC": "Video decoder", "NVJPG": "JPEG decoder", "OFA": "Optical flow engine"}
    seen = Counter[str]()
    for xid in XIDS.values():
        engine = re.fullmatch(r"ROBUST_CHANNEL_(CE|NVDEC|NVJPG|OFA)(\d+)_ERROR", xid.mnemonic)
        if engine:
            seen[engine[1]] += 1
            assert xid.meaning.startswith(f"{said[engine[1]]} {engine[2]} ")
            assert (xid.action, xid.followup) == (A.RESTART_APP, A.CONTACT_SUPPORT)
    assert seen == {"CE": 20, "NVDEC": 8, "NVJPG": 8, "OFA": 2}


def test_counts_of_the_catalog() -> None:
    used = {family: sum(family in xid.used_on for xid in XIDS.values()) for family in FAMILIES}
    assert used == {"a100": 60, "h100": 78, "b100": 103, "gb200": 104}
    actions = Counter(xid.action for xid in XIDS.values() if xid.in_use)
    assert (actions[A.RESTART_APP], actions[A.IGNORE], actions[A.RESET_GPU], actions[A.RESTART_NODE]) == (48, 19, 14, 1)
    assert {xid.code for xid in XIDS.values() if xid.action is A.RESET_GPU} == {
        46, 62, 64, 95, 109, 110, 119, 120, 136, 140, 143, 155, 156, 158,
    }  # fmt: skip


def test_codes_without_an_action_are_rated_by_what_they_say() -> None:
    rated = {code: XIDS[code].severity for code in range(162, 173)}
    assert {code for code, severity in rated.items() if severity is CRITICAL} == {167, 169, 171, 172}
    assert {code for code, severity in rated.items() if severity is INFO} == {162}


def test_every_action_is_explained_and_used() -> None:
    assert set(ADVICE) == set(XidAction)
    of_codes = {xid.action for xid in XIDS.values()} | {xid.followup for xid in XIDS.values()}
    of_links = {action for unit in nvlink5.UNITS for row in unit.rows for action in (row.action, row.followup)}
    assert of_codes | of_links == set(XidAction)


EVERYWHERE = "a100 b100 gb200 h100"


@pytest.mark.parametrize(
    ("code", "category", "severity", "hardware", "action", "followup", "used_on"),
    [
        (13, "application", INFO, False, A.RESTART_APP, A.WORKFLOW_XID_13, EVERYWHERE),
        (31, "application", INFO, False, A.RESTART_APP, A.WORKFLOW_XID_31, EVERYWHERE),
        (43, "application", INFO, False, A.IGNORE, A.CONTACT_SUPPORT, EVERYWHERE),
        (45, "application", INFO, False, A.WORKFLOW_XID_45, A.WORKFLOW_XID_45, EVERYWHERE),
        (48, "memory", CRITICAL, True, A.WORKFLOW_XID_48, A.WORKFLOW_XID_48, EVERYWHERE),
        (54, "power_thermal", WARNING, True, A.CHECK_MECHANICALS, A.CONTACT_SUPPORT, "a100 b100 h100"),
        (61, "firmware", WARNING, None, A.CONTACT_SUPPORT, A.UNKNOWN, ""),
        (63, "memory", INFO, True, A.IGNORE, A.IGNORE, EVERYWHERE),
        (64, "memory", CRITICAL, True, A.RESET_GPU, A.CONTACT_SUPPORT, EVERYWHERE),
        (74, "nvlink", CRITICAL, True, A.WORKFLOW_NVLINK, A.CONTACT_SUPPORT, "a100 h100"),
        (79, "pcie", CRITICAL, True, A.RESTART_NODE, A.CONTACT_SUPPORT, EVERYWHERE),
        (92, "memory", WARNING, True, A.IGNORE, A.CONTACT_SUPPORT, EVERYWHERE),
        (94, "memory", WARNING, True, A.RESTART_APP, A.SYMPATHETIC, EVERYWHERE),
        (95, "memory", CRITICAL, True, A.RESET_GPU, A.SYMPATHETIC, EVERYWHERE),
        (109, "engine", CRITICAL, None, A.RESET_GPU, A.CONTACT_SUPPORT, EVERYWHERE),
        (119, "gsp", CRITICAL, None, A.RESET_GPU, A.INVESTIGATE_SOFTWARE, EVERYWHERE),
        (120, "gsp", CRITICAL, None, A.RESET_GPU, A.INVESTIGATE_SOFTWARE, EVERYWHERE),
        (121, "nvlink", INFO, True, A.IGNORE, A.CONTACT_SUPPORT, "gb200"),
        (136, "nvlink", CRITICAL, True, A.RESET_GPU, A.INVESTIGATE_SIGNAL, "h100"),
        (137, "application", INFO, False, A.IGNORE, A.WORKFLOW_XID_137, EVERYWHERE),
        (140, "memory", CRITICAL, True, A.RESET_GPU, A.CONTACT_SUPPORT, EVERYWHERE),
        *[
            (code, "nvlink", WARNING, None, A.WORKFLOW_NVLINK5, A.WORKFLOW_NVLINK5, "b100 gb200")
            for code in range(144, 151)
        ],
        (151, "security", CRITICAL, False, A.RESTART_VM, A.CONTACT_SUPPORT, "b100 gb200 h100"),
        (154, "informational", WARNING, None, A.FOLLOW_XID_154, A.INFORMATIONAL, EVERYWHERE),
        (159, "nvlink", WARNING, None, A.CHECK_UVM, A.REPORT_IF_ALONE, "b100 gb200"),
        (171, "memory", CRITICAL, True, A.UNKNOWN, A.UNKNOWN, EVERYWHERE),
    ],
)
def test_known_row(
    code: int,
    category: str,
    severity: Severity,
    hardware: bool | None,
    action: XidAction,
    followup: XidAction,
    used_on: str,
) -> None:
    xid = XIDS[code]
    assert (xid.category, xid.severity, xid.hardware) == (category, severity, hardware)
    assert (xid.action, xid.followup) == (action, followup)
    assert xid.used_on == set(used_on.split())


# --- what follows from what ----------------------------------------------------------------------


def test_causes_are_known_codes_without_circles() -> None:
    assert set(SYMPATHETIC) | frozenset[int]().union(*SYMPATHETIC.values()) <= set(XIDS)
    TopologicalSorter(SYMPATHETIC).prepare()  # raises on a circle


def test_a_torn_down_program_may_follow_every_serious_fault() -> None:
    serious = {xid.code for xid in XIDS.values() if xid.severity is CRITICAL}
    assert serious | {13, 31, 43, 94, 145, 149} <= SYMPATHETIC[45]
    assert SYMPATHETIC[45].isdisjoint({45, 106, 107, 154})


def test_known_pairs() -> None:
    assert all(48 in SYMPATHETIC[code] for code in (43, 63, 64, 94, 95, 171, 172))
    assert 122 in SYMPATHETIC[31]
    assert {48, 63, 64, 74, 79, 94, 95, 144, 150} <= SYMPATHETIC[154]
    assert SYMPATHETIC[154].isdisjoint({13, 31, 43, 45})
    assert 79 not in SYMPATHETIC, "a lost GPU is nobody's symptom"


def test_the_driver_names_the_cause() -> None:
    line = "NVRM: Xid (PCI:0000:dc:00): 45, pid=1818990, name=python3, Ch 00000001 caused by previous Xid 149"
    assert previous_xid_from_message(line) == 149
    assert previous_xid_from_message("NVRM: Xid (PCI:0000:dc:00): 45, pid=1818990, name=python3, Ch 00000001") is None


# --- XID 154 and SXid ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "action"),
    [
        ("0x0 (None) to 0x1 (GPU Reset Required)", "GPU Reset Required"),
        ("0x0 (None) to 0x1 (PF FLR)", "GPU Reset Required"),
        ("0x0 (None) to 0x2 (Node Reboot Required)", "Node Reboot Required"),
        ("0x0 (None) to 0x2 (OS Reboot)", "Node Reboot Required"),
        ("0x0 (None) to 0x3 (Drain P2P)", "Drain P2P"),
        ("0x4 (Drain and Reset) to 0x1 (GPU Reset Required)", "GPU Reset Required"),
        ("0x0 (None) to 0x4 (Drain and Reset)", "Drain and Reset"),
        ("0x1 (GPU Reset Required) to 0x0 (None)", "None"),
        ("0x0 (None) to 0x9 (Something New)", "Something New"),
        ("0x0 (None) to 0x1 (GPU Re", None),
        ("0x0 (None)", None),
    ],
)
def test_recovery_action(change: str, action: str | None) -> None:
    line = f"NVRM: Xid (PCI:0000:3b:00): 154, GPU recovery action changed from {change}"
    assert recovery_action_from_message(line) == action


def test_recovery_action_of_other_lines() -> None:
    assert recovery_action_from_message("") is None
    assert recovery_action_from_message("NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.") is None


def test_every_recovery_action_has_a_severity() -> None:
    assert set(RECOVERY_SEVERITY) == set(RecoveryAction)
    assert RECOVERY_SEVERITY["None"] is INFO
    assert RECOVERY_SEVERITY["GPU Reset Required"] is RECOVERY_SEVERITY["Node Reboot Required"] is CRITICAL


@pytest.mark.parametrize(
    ("line", "fatal"),
    [
        ("nvidia-nvswitch0: SXid (PCI:0000:c2:00.0): 20034, Fatal, Link 28 LTSSM Fault Up", True),
        ("nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 28006, Non-fatal, Link 46 MC TS crumbstore MCTO (First)", False),
        (
            "nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 28006, Severity 0 Engine instance 46 Sub-engine instance 00",
            None,
        ),
        ("nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 28006, Data {0x00140004, 0x00100000}", None),
        ("nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): garbled, Fatal", None),
        ("", None),
    ],
)
def test_sxid_is_fatal(line: str, fatal: bool | None) -> None:
    assert sxid_is_fatal(line) is fatal


# --- NVLink 5: the registers of 144-150 ----------------------------------------------------------


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
    found = nvlink5.matches(unit.code, info, row.status or 0)
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
    assert nvlink5.parse(line) is None
    assert nvlink5.decode(145, line) is None


def test_unknown_registers_are_not_decoded_but_still_read() -> None:
    line = _line(145, "RLW_RXPIPE", "Fatal", "13", 0x0409A0C2, 0x40)  # a status without a row
    assert nvlink5.decode(145, line) is None
    parsed = nvlink5.parse(line)
    assert parsed is not None
    assert (parsed.unit, parsed.fatal, parsed.link, parsed.error_status) == ("RLW_RXPIPE", True, 13, 0x40)
    assert nvlink5.decode(145, _line(145, "RLW_CTRL", "Fatal", "13", 0x00100003, 0x80000000)) is None  # reason not 0
    assert nvlink5.decode(149, _line(149, "NETIR_LINK_EVT", "Fatal", "13", 0x003001C6, 0)) is None  # reason 3


@pytest.mark.parametrize("code", [74, 143, 151, 154])
def test_other_codes_are_not_decoded(code: int) -> None:
    assert nvlink5.decode(code, _line(code, "SAW_MVB", "Fatal", "00", 1, 2)) is None
