"""`make lint` refuses the words of tools/words.toml, with what to write instead."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

import check_words
from check_words import Rule, WordList

WORDS = WordList.read()
RULES = [pytest.param(rule, id=rule.pattern[:20]) for rule in WORDS.rules]
ANY = "docs/page.md"


def found(text: str, path: str = ANY, words: WordList = WORDS) -> list[str]:
    return [hit.text.lower() for hit in words.hits(path, text)]


@pytest.mark.parametrize("rule", RULES)
def test_each_rule_refuses_its_bad_examples_and_passes_its_good_ones(rule: Rule) -> None:
    assert rule.bad and rule.good and rule.instead
    assert re.compile(rule.pattern).groups == 0, "a group of its own would be taken for a rule"
    for text in rule.bad:
        assert rule in {WORDS.rules[i] for i in _rules_of(text)}, text
    for text in rule.good:
        assert not _rules_of(text), text


def _rules_of(text: str) -> list[int]:
    patterns = [rule.pattern for rule in WORDS.rules]
    return [patterns.index(hit.rule) for hit in WORDS.hits(ANY, text)]


def test_a_hit_names_file_line_and_what_to_write() -> None:
    (hit,) = WORDS.hits("a/b.py", '"""Fine."""\n\n# it is likewise here\n')
    assert (hit.path, hit.line, hit.text) == ("a/b.py", 3, "likewise")
    assert str(hit) == "a/b.py:3: 'likewise': write also, the same way"


@pytest.mark.parametrize(
    "text",
    [
        "def told(self): ...",
        "x = self._told",
        "told_ms: int = 3",
        "class NodeTold: ...",
        "def test_a_node_is_told_once(): ...",
        '"""What was told."""',
        "x = 1  # told before",
        'raise ValueError("it was told")',
        'f"node {x} told"',
    ],
)
def test_names_docstrings_comments_and_messages_of_python_are_read(text: str) -> None:
    assert found(text, "a.py") == ["told"]


def test_literals_of_one_word_are_formats() -> None:
    assert not found("row['told'], row[\"told_ms\"], '/told'", "a.py")


def test_a_phrase_is_found_over_line_breaks() -> None:
    assert found("# five, of\n# which two", "a.py") == ["of # which"]
    assert found('"five, of "\n    f"which two"', "a.py")
    assert found("five, of\n> which two")
    assert not found("five, of. Which two")


def test_only_comments_of_proto_files_are_read() -> None:
    text = "message Told {\n  int64 told_ms = 1;  // likewise\n  // whoever asks\n}\n"
    assert found(text, "a.proto") == ["likewise", "whoever"]


def test_quotations_of_the_changelog_are_not_read() -> None:
    text = '> it was told\n- `told_ms` and "told" became `reported`; whoever reads\n'
    assert found(text, "CHANGELOG.md") == ["whoever"]
    assert len(found(text)) == 4


def test_an_allowed_text_needs_a_reason_and_is_not_read(tmp_path: Path) -> None:
    rule = 'skip = []\n[[rule]]\npattern = "told"\ninstead = "reported"\nbad = ["told"]\ngood = ["x"]\n'
    file = tmp_path / "words.toml"
    file.write_text(rule + '[[allowed]]\ntext = "told_ms"\nreason = "a column on disk"\n')
    assert found("SELECT told_ms, told FROM x", words=WordList.read(file)) == ["told"]
    file.write_text(rule + '[[allowed]]\ntext = "told_ms"\nreason = ""\n')
    with pytest.raises(ValueError, match="no reason"):
        WordList.read(file)


def test_the_list_generated_code_and_evidence_are_skipped() -> None:
    for name in ("tools/words.toml", "proto/drover_proto/fleet_pb2.pyi", "docs/evidence/2026/run.md"):
        assert WORDS.skips(name), name
    for name in ("tools/check_words.py", "docs/console.md", "proto/drover_proto/fleet.proto", "README.md"):
        assert not WORDS.skips(name), name


def test_files_that_git_tracks_or_would_add_are_read(tmp_path: Path) -> None:
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    (tmp_path / ".gitignore").write_text("build/\n")
    for name in ("a.py", "b/c.md", "build/d.md", "e.png", "Makefile"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("told\n")
    names = check_words.tracked_files(tmp_path)
    assert names == ["Makefile", "a.py", "b/c.md"]
    assert {name: len(each) for name, each in check_words.check(tmp_path, names, WORDS).items()} == dict.fromkeys(
        names, 1
    )


def test_the_command_prints_the_hits_of_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "page.md").write_text("told\n")
    monkeypatch.setattr(check_words, "ROOT", tmp_path)
    assert check_words.main([str(tmp_path / "a")]) == 1
    assert capsys.readouterr().out == (
        "a/page.md:1: 'told': write reported, sent, stored, notified, distinguished, logged (name the act)\n"
    )
    assert check_words.main([]) == 1
    assert len(capsys.readouterr().out.splitlines()) == 2
    for name in ("a", "b"):
        (tmp_path / name / "page.md").write_text("reported\n")
    assert check_words.main([]) == 0
