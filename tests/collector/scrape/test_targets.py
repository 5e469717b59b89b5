"""Targets of the settings and of file_sd files."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from drover_collector.scrape import targets as targets_module
from drover_collector.scrape.forgeable import ForgeablePages
from drover_collector.scrape.settings import (
    OtlpInConfig,
    ScrapeConfig,
    Target,
    WriteInConfig,
    parse_target,
    validate_scrape,
)
from drover_collector.scrape.targets import TargetList, parse_file_sd
from drover_core.settings import SettingsError


def test_a_target_names_its_node_or_is_named_by_its_host() -> None:
    assert parse_target("n01=10.0.0.1:9400") == Target("n01", "10.0.0.1", 9400)
    assert parse_target("n01.example.org:9400") == Target("n01.example.org", "n01.example.org", 9400)
    assert parse_target("n01.example.org:9400", short=True) == Target("n01", "n01.example.org", 9400)
    assert parse_target("10.0.0.1:9400", short=True) == Target("10.0.0.1", "10.0.0.1", 9400)
    assert parse_target("n02=[fd00::1]:9100") == Target("n02", "fd00::1", 9100)


@pytest.mark.parametrize("text", ["n01", "n01:0", "n01:99999", "http://n01:9400", "a/b=n01:9400", "n01:9400\r\nX: y"])
def test_another_form_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"must be HOST:PORT|cannot name"):
        parse_target(text)


def test_a_file_is_read_again_and_a_broken_one_leaves_its_targets(tmp_path: Path) -> None:
    path = tmp_path / "gpus.json"
    path.write_text(json.dumps([{"targets": ["10.0.0.1:9400"], "labels": {"node": "n01", "env": "x"}}]))
    targets = TargetList(ScrapeConfig("gpus", "dcgm", ("n09:9400",), (str(path),)))
    assert targets.current() == [Target("n09", "n09", 9400), Target("n01", "10.0.0.1", 9400)]
    path.write_text('[{"targets": ["n03:9400", "n04:9400"]}]')
    os.utime(path, ns=(1, 1))
    assert [target.node for target in targets.current()] == ["n09", "n03", "n04"]
    path.write_text("{")
    assert [target.node for target in targets.current()] == ["n09", "n03", "n04"]
    assert targets.troubles[str(path)].endswith("not valid JSON; its last targets stay")


@pytest.mark.parametrize("text", ["{}", '[{"targets": 1}]', '[{"targets": [1]}]', '["a"]', '[{"targets":["a"]}]', "["])
def test_another_form_of_a_file_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_file_sd(text)


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (ScrapeConfig("a", "dcgm"), "name targets"),
        (ScrapeConfig("a", "dcgm", ("n:1",), ("/nowhere.json",)), "no such file"),
        (ScrapeConfig("a", "dcgm", ("n:1",), token_file="/etc/hostname"), "in the clear"),
        (ScrapeConfig("a", "dcgm", ("n:1",), ca_file="/etc/hostname"), "without TLS"),
    ],
)
def test_settings_that_cannot_be_used_are_refused(config: ScrapeConfig, why: str) -> None:
    with pytest.raises(SettingsError, match=why):
        validate_scrape([config])


def test_names_are_unique() -> None:
    with pytest.raises(SettingsError, match="twice"):
        validate_scrape([ScrapeConfig("a", "dcgm", ("n:1",)), ScrapeConfig("a", "node", ("n:2",))])


def test_nodes_of_pages_without_tls_are_known_and_those_of_other_tables_are_not(tmp_path: Path) -> None:
    path = tmp_path / "gpus.json"
    path.write_text('[{"targets": ["n03:9400"]}]')
    tables = (
        ScrapeConfig("plain", "dcgm", ("n01:9400",), (str(path),)),
        ScrapeConfig("tls", "dcgm", ("n02:9400",), tls=True),
        ScrapeConfig("ours alone", "node", ("n04:9100",), ask_first=False),
    )
    forgeable = ForgeablePages(tables, WriteInConfig())
    assert [node for node in ("n01", "n02", "n03", "n04") if node in forgeable] == ["n01", "n03"]
    assert [node for node in ("n01", "n02", "n03", "n04", "n05") if forgeable.vouches(node)] == ["n02", "n04"]
    assert not ForgeablePages(tables, WriteInConfig(enabled=True)).vouches("n02"), "a writer may speak for it"
    assert not ForgeablePages((), WriteInConfig()).vouches("n02")
    assert ForgeablePages((), WriteInConfig(enabled=True, ask_first=False)).vouches("n02")
    assert "n01" not in ForgeablePages((), WriteInConfig())
    assert "n09" in ForgeablePages(tables, WriteInConfig(enabled=True)), "a writer may speak for any node"
    assert "n09" not in ForgeablePages(tables, WriteInConfig(enabled=True, ask_first=False))
    assert "n09" in ForgeablePages((), WriteInConfig(), OtlpInConfig(enabled=True))
    assert "n09" not in ForgeablePages((), WriteInConfig(), OtlpInConfig(enabled=True, ask_first=False))


def test_targets_above_the_limit_are_said_and_not_cut_off_silently(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets_module, "MAX_TARGETS", 3)
    targets = TargetList(ScrapeConfig("gpus", "dcgm", tuple(f"n{n}:9400" for n in range(5))))
    assert [target.node for target in targets.current()] == ["n0", "n1", "n2"]
    assert targets.troubles == {
        "gpus": "scrape gpus: 5 targets; the first 3 are read, the others are not monitored. Give them to"
        " another collector"
    }
    assert len(TargetList(ScrapeConfig("gpus", "dcgm", ("n0:9400",))).current(room=0)) == 0  # other tables have all
    monkeypatch.setattr(targets_module, "MAX_TARGETS", 5)
    assert len(targets.current()) == 5
    assert not targets.troubles


def test_a_file_that_is_suddenly_empty_leaves_its_targets(tmp_path: Path) -> None:
    """The program that writes it may have failed: a whole fleet would be no longer watched, without a word."""
    path = tmp_path / "gpus.json"
    path.write_text("[]")
    targets = TargetList(ScrapeConfig("gpus", "dcgm", (), (str(path),)))
    assert targets.current() == []
    assert not targets.troubles
    path.write_text('[{"targets": ["n03:9400"]}]')
    os.utime(path, ns=(1, 1))
    assert len(targets.current()) == 1
    path.write_text("[]")
    os.utime(path, ns=(2, 2))
    assert len(targets.current()) == 1
    assert "names no target any more" in targets.troubles[str(path)]
