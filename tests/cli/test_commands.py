"""Every subcommand alike: `--json`, exit codes that scripts can use, one line where something is wrong, completion."""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from drover_cli.client import tls_files
from drover_cli.commands import NAMES
from drover_cli.commands.completion import SHELLS
from drover_cli.main import build_parser, main
from testbed.system_processes import free_port


def leaves(parser: argparse.ArgumentParser, words: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], list[str]]]:
    """(words of a subcommand, its arguments with something plausible for each that it needs)."""
    inner = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
    if not inner:
        either = [group._group_actions[0] for group in parser._mutually_exclusive_groups if group.required]
        first = [
            word for action in either for word in (action.option_strings[0], *([] if action.nargs == 0 else ["1"]))
        ]
        yield words, [*(word for action in parser._actions for word in needed(action)), *first]
    for action in inner:
        for name, sub in action.choices.items():
            yield from leaves(sub, (*words, name))


def needed(action: argparse.Action) -> list[str]:
    usual = {"since": "1d", "policy": "nvidia"}.get(action.dest, "1")
    value = str(next(iter(action.choices))) if action.choices else usual
    if not action.option_strings:
        return [value] if action.nargs in (None, "+", 1) else []
    return [action.option_strings[0], value] if action.required else []


PARSER = build_parser()  # once: it takes 0.1 s of CPU, and every worker collects this file


def options(words: tuple[str, ...]) -> set[str]:
    parser = PARSER
    for word in words:
        (inner,) = (a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
        parser = inner.choices[word]
    return {option for action in parser._actions for option in action.option_strings}


COMMANDS = list(leaves(PARSER))
ASKING = [(words, more) for words, more in COMMANDS if "--collector" in options(words)]
# A collector that is not there is what the doctor finds, among other things: an answer, not the end.
NEEDING = [(words, more) for words, more in ASKING if words != ("doctor",)]


def ident(value: object) -> str:
    return "-".join(value) if isinstance(value, tuple) else ""


def test_every_name_has_a_command() -> None:
    assert {words[0] for words, _ in COMMANDS} == set(NAMES)


@pytest.mark.parametrize(("words", "_"), COMMANDS, ids=ident)
def test_every_command_speaks_json(words: tuple[str, ...], _: list[str]) -> None:
    assert "--json" in options(words)


@pytest.mark.parametrize(("words", "more"), NEEDING, ids=ident)
def test_a_collector_that_is_not_there_is_3_and_one_line(
    words: tuple[str, ...], more: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    if words == ("node",):
        more = ["n1"]
    elif "node" in words or words[0] == "probe":
        more = ["n1", *more]
    if words[0] == "silence":
        more = ["--node", "n1", "--why", "x", "--for", "1h"]
    code = main([*words, *more, "--json", "--collector", f"127.0.0.1:{free_port()}"])
    said = capsys.readouterr()
    assert (code, said.out) == (3, ""), said.err
    assert said.err.startswith("drover: the collector at 127.0.0.1:")
    assert said.err.count("\n") == 1


@pytest.mark.parametrize(("words", "more"), ASKING, ids=ident)
def test_half_of_the_certificates_is_2(
    words: tuple[str, ...], more: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    if words[0] == "probe":
        more = ["n1", *more]
    if words[0] == "silence":
        more = ["--node", "n1", "--why", "x", "--for", "1h"]
    if words[0] == "top":
        more = ["--once"]
    assert main([*words, *more, "--ca", "ca.pem"]) == 2
    assert "--ca, --cert and --key belong together" in capsys.readouterr().err


@pytest.mark.parametrize(("words", "more"), ASKING, ids=ident)
def test_who_asks_whom_may_be_said_once_in_the_environment(
    words: tuple[str, ...], more: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if words[0] in ("probe", "silence"):
        more = [*more, *(["n1"] if words[0] == "probe" else ["--node", "n1", "--why", "x", "--for", "1h"])]
    files = {"DROVER_CA": "ca.pem", "DROVER_CERT": "me.pem", "DROVER_KEY": "me.key"}
    for name, value in {"DROVER_COLLECTOR": "c1:7302", **files}.items():
        monkeypatch.setenv(name, value)
    parser = build_parser()
    args = parser.parse_args([*words, *more])
    assert (args.collector, *map(str, tls_files(args))) == ("c1:7302", *files.values())
    args = parser.parse_args([*words, *more, "--collector", "c2:1", "--key", "other.key"])
    assert (args.collector, str(args.key)) == ("c2:1", "other.key")


@pytest.mark.parametrize(
    "words", [["--nothing"], ["status", "--collector"], ["nodes", "--limit", "0"], ["top", "--interval"]]
)
def test_a_slip_is_2(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert capsys.readouterr().out == ""


# ---- completion


def script(shell: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["completion", shell, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["shell"] == shell
    return str(answer["script"])


@pytest.mark.parametrize("shell", list(SHELLS))
def test_completion_knows_every_command(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = script(shell, capsys)
    assert [name for name in NAMES if name not in text] == []
    if shutil.which(shell):
        subprocess.run([shell, "-n"], input=text, text=True, check=True, timeout=120)


@pytest.mark.parametrize(("typed", "found"), [(["inc"], {"incidents"}), (["incidents", "--sta"], {"--state"})])
def test_bash_completes(typed: list[str], found: set[str], capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "drover.bash").write_text(script("bash", capsys))
    words = " ".join(["drover", *typed])
    lines = (
        f"source {tmp_path}/drover.bash; COMP_WORDS=({words}); COMP_CWORD={len(typed)}; COMP_LINE='{words}';"
        " COMP_POINT=${#COMP_LINE}; _shtab_drover; printf '%s\\n' \"${COMPREPLY[@]}\""
    )
    done = subprocess.run(["bash", "-c", lines], capture_output=True, text=True, timeout=120, check=True)
    assert set(done.stdout.split()) == found
