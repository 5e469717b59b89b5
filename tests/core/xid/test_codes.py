"""The XID tables: complete, consistent with themselves, and right about lines that drivers have printed."""

import re
from collections import Counter
from graphlib import TopologicalSorter

import pytest

from drover_core.model.events import Severity
from drover_core.xid import nvlink5
from drover_core.xid.codes import (
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
def test_follow_up_distinguishes_application_from_machine(xid: Xid) -> None:
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
