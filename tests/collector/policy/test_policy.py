"""Policy files and presets: what is wanted for an incident, and errors that say where."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from drover_collector.policy.policy import PRESETS, Policy, xid_of
from drover_core.model.events import (
    Incident,
    IncidentKind,
    RecommendedAction,
    Severity,
)
from drover_core.model.fleet import NodeSpec
from drover_core.settings import SettingsError


def incident(
    kind: str, cause: str, severity: str = "critical", confidence: float = 0.95, scope: str = "gpu"
) -> Incident:
    return Incident(
        "i", IncidentKind(kind), cause, scope, "n1", 0, (("n1", 0),), 0, 0, None, Severity(severity), confidence,
        RecommendedAction.NONE, "", "",
    )  # fmt: skip


@pytest.mark.parametrize("name", PRESETS)
def test_presets_load_and_only_observe(name: str) -> None:
    policy = Policy.load(None, name)
    assert policy.name == name
    assert policy.mode == "observe"
    assert policy.rules


@pytest.mark.parametrize(
    ("preset", "what", "asked", "wanted"),
    [
        ("nvidia", incident("xid", "xid_79"), "drain", "drain"),
        ("nvidia", incident("xid", "xid_31", "info"), "none", "none"),
        ("nvidia", incident("xid", "xid_31_repeated", "warning"), "probe", "probe"),
        ("nvidia", incident("liveness", "silent", "warning", scope="node"), "advise", "advise"),
        ("nvidia", incident("liveness", "silent", "critical", scope="node"), "drain", "drain"),
        ("nvidia", incident("liveness", "silent", "critical", scope="rack"), "advise", "advise"),
        ("nvidia", incident("memory", "remap_pending", "warning"), "drain", "drain"),
        ("strict", incident("xid", "xid_31", "info"), "none", "drain"),
        ("strict", incident("xid", "xid_61", "warning"), "watch", "drain"),
        ("strict", incident("xid", "xid_13", "info"), "none", "none"),
        ("strict", incident("xid", "job_crash", "info", scope="job"), "none", "none"),
        ("strict", incident("xid", "xid_79"), "drain", "isolate"),
        ("cautious", incident("xid", "xid_79"), "drain", "drain"),
        ("cautious", incident("xid", "xid_119"), "drain", "advise"),
        ("cautious", incident("liveness", "silent", scope="node"), "drain", "watch"),
        ("cautious", incident("thermal", "cooling", "warning"), "drain", "watch"),
        ("cautious", incident("xid", "xid_31", "info"), "none", "none"),
    ],
)
def test_presets(preset: str, what: Incident, asked: str, wanted: str) -> None:
    assert Policy.load(None, preset).wanted(what, RecommendedAction(asked))[0] == wanted


def test_the_first_rule_that_matches_decides_and_is_named(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(
        '[[rules]]\nname = "hot"\nkind = ["thermal"]\nmin_confidence = 0.9\naction = "isolate"\n'
        '[[rules]]\nkind = ["thermal"]\naction = "watch"\n'
    )
    policy = Policy.load(path)
    assert policy.name == "mine"
    assert policy.wanted(incident("thermal", "cooling"), RecommendedAction.NONE) == (RecommendedAction.ISOLATE, "hot")
    assert policy.wanted(incident("thermal", "cooling", confidence=0.5), RecommendedAction.NONE) == (
        RecommendedAction.WATCH,
        "rule 2",
    )
    assert policy.wanted(incident("xid", "xid_79"), RecommendedAction.DRAIN) == (RecommendedAction.DRAIN, "detector")


def test_no_rule_drains_an_unproven_straggler(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('[[rules]]\nkind = ["straggler"]\naction = "isolate"\n')
    wanted, why = Policy.load(path).wanted(incident("straggler", "clock"), RecommendedAction.PROBE)
    assert wanted is RecommendedAction.PROBE
    assert "probe" in why


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ('[[rules]]\nkind = ["xid"]\n', ["rules[0].action", "missing"]),
        ('[[rules]]\naction = "drain"\n[[rules]]\naction = "explode"\n', [":4: rules[1].action", "explode", "isolate"]),
        ('[[rules]]\naction = "drain"\nkind = ["xids"]\n', ["rules[0].kind", "xids", "straggler"]),
        ('[[rules]]\naction = "drain"\nkindd = ["xid"]\n', ["rules[0].kindd", "did you mean rules[0].kind"]),
        ('[[rules]]\naction = "drain"\nxid = ["79"]\n', ["rules[0].xid", "whole number"]),
        ('name = "x"\nmode = "enforced"\n', [":2: mode", "observe, approve, enforce"]),
        ('[[rules]]\naction = "drain"\nmode = "maybe"\n', [":3: rules[0].mode", "observe, approve, enforce"]),
        ('[[overrides]]\npools = ["a"]\n', [":2: overrides[0].pools", "did you mean overrides[0].pool"]),
        ("[guard]\nper_hours = 2\n", [":2: guard.per_hours", "did you mean guard.per_hour"]),
        ("[guard]\nfleet_ratio = 7\n", ["guard.fleet_ratio", "0 to 1"]),
        ("rules = 3\n", ["rules", "list of tables"]),
        ("[[rules\n", ["not valid TOML"]),
    ],
)
def test_a_bad_file_is_one_line_with_file_place_and_mend(tmp_path: Path, text: str, parts: list[str]) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(SettingsError) as caught:
        Policy.load(path)
    message = str(caught.value)
    assert "\n" not in message
    for part in [str(path), *parts]:
        assert part in message


def test_a_name_that_is_no_preset_and_a_file_that_is_missing(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="nvidia, strict, cautious"):
        Policy.load(None, "strickt")
    with pytest.raises(SettingsError, match="No such file"):
        Policy.load(tmp_path / "none.toml")


PLACE = NodeSpec("n1", pool="train", sku="H100")
FORM = """
mode = "approve"
[[overrides]]
pool = ["lab"]
mode = "enforce"
[[overrides]]
sku = ["H100"]
pool = ["shy"]
mode = "observe"
at_most = "probe"
[[rules]]
name = "trial"
mode = "observe"
cause = ["xid_31"]
action = "drain"
[[rules]]
name = "bold"
mode = "enforce"
pool = ["train", "shy", "lab"]
cause = ["xid_79"]
action = "isolate"
"""


@pytest.mark.parametrize(
    ("pool", "cause", "said"),
    [
        ("train", "xid_79", (RecommendedAction.ISOLATE, "bold", "enforce")),
        ("other", "xid_79", (RecommendedAction.DRAIN, "detector", "approve")),
        ("train", "xid_31", (RecommendedAction.DRAIN, "trial", "observe")),
        ("lab", "xid_31", (RecommendedAction.DRAIN, "trial", "observe")),  # an override makes no trial serious
        ("lab", "xid_48", (RecommendedAction.DRAIN, "detector", "enforce")),
        ("shy", "xid_79", (RecommendedAction.PROBE, "bold, at most probe there", "observe")),
    ],
)
def test_modes_and_what_is_otherwise_for_pools(tmp_path: Path, pool: str, cause: str, said: tuple[str, ...]) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(FORM)
    policy = Policy.load(path)
    verdict = policy.judge(incident("xid", cause), RecommendedAction.DRAIN, dataclasses.replace(PLACE, pool=pool))
    assert (verdict.wanted, verdict.rule, verdict.mode) == said
    assert policy.most_mode == "enforce"


def test_a_probes_proof_lets_a_straggler_go_further(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('[[rules]]\nkind = ["straggler"]\naction = "drain"\n')
    slow = incident("straggler", "clock")
    proven = dataclasses.replace(slow, detectors=("straggler", "probe"))
    assert [Policy.load(path).wanted(i, RecommendedAction.PROBE)[0] for i in (slow, proven)] == [
        RecommendedAction.PROBE,
        RecommendedAction.DRAIN,
    ]


def test_a_rule_that_never_decides_is_found(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(
        '[[rules]]\nkind = ["xid", "memory"]\naction = "drain"\n'
        '[[rules]]\nkind = ["xid"]\nxid = [79]\naction = "isolate"\n'
        '[[rules]]\nkind = ["xid"]\nscope = ["rack"]\naction = "watch"\n[[rules]]\naction = "none"\n'
    )
    assert Policy.load(path).never_decides() == [(1, 0)]
    assert all(Policy.load(None, preset).never_decides() == [] for preset in PRESETS)


def test_the_code_of_a_cause() -> None:
    assert [xid_of(c) for c in ("xid_79", "xid_31_repeated", "sxid_79", "silent")] == [79, 31, None, None]


def test_a_misspelt_preset_is_answered_with_the_presets() -> None:
    with pytest.raises(SettingsError, match="'nvida': no such preset; use nvidia, strict, cautious or the path"):
        Policy.named("nvida")


def test_no_rule_drains_for_a_job_that_is_slow_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('[[rules]]\nscope = ["job"]\naction = "drain"\n')
    hung, slow = (incident(kind, "slower", scope="job") for kind in ("hang", "slowdown"))
    assert Policy.load(path).wanted(hung, RecommendedAction.NONE)[0] is RecommendedAction.DRAIN
    assert Policy.load(path).wanted(slow, RecommendedAction.NONE)[0] is RecommendedAction.WATCH
