"""Commands that pages ask people to type at 3 a.m. are there, with the options that the pages give them."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from drover_agent.main import COMMANDS as AGENT
from drover_cli.main import build_parser
from drover_collector.main import _parser as collector_parser

ROOT = Path(__file__).resolve().parents[1]
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]
PARSERS = {"drover": build_parser(), "drover-collector": collector_parser()}
COMMAND = re.compile(r"(?:/opt/drover/bin/)?(drover(?:-collector|-agent)?) ([a-z].*)", re.DOTALL)


def commands_of(page: Path) -> list[tuple[str, str]]:
    """(program, words after it) of what stands in backticks or in a block of code, each once."""
    text = page.read_text("utf-8")
    blocks = re.findall(r"^```\w*\n(.*?)^```|((?:^ {4}.*\n)+)", text, re.DOTALL | re.MULTILINE)
    lines = "\n".join(fenced or indented for fenced, indented in blocks).replace("\\\n", " ").splitlines()
    parts = [part for line in lines for part in re.split(r"[;&|#<>]+", line)]
    parts += re.findall(r"`([^`|\n]+)`", text)
    found = (COMMAND.fullmatch(part.strip()) for part in parts)
    return list(dict.fromkeys((each[1], each[2]) for each in found if each))


COMMANDS_OF = {
    page: commands_of(page) for page in sorted(PAGES) if page.name != "commands.md"
}  # which is made out of the parsers


def test_pages_name_many_commands() -> None:
    assert {program for listed in COMMANDS_OF.values() for program, _ in listed} == {*PARSERS, "drover-agent"}
    assert all(
        COMMANDS_OF[ROOT / name]
        for name in ("README.md", "docs/how-to/troubleshoot.md", "docs/runbooks/DroverBlind.md")
    )


@pytest.mark.parametrize("page", [page for page in COMMANDS_OF if COMMANDS_OF[page]], ids=lambda page: page.name)
def test_commands_of_a_page_are_there(page: Path) -> None:
    for program, text in COMMANDS_OF[page]:
        words = shlex.split(text.replace("[--", "--").replace("]", "") if "[--" in text else text)
        if program == "drover-agent":
            assert words[0] in {*AGENT, "config", "gate", "probe", "fleet", "enrol", "renew"}, text
            continue
        *_, parser = _parsers(PARSERS[program], words)
        options = {option for action in parser._actions for option in action.option_strings}
        used = {word.partition("=")[0] for word in words if word.startswith("--")}
        assert used <= options, f"{program} {text}: no such option: {', '.join(sorted(used - options))}"


def _parsers(parser: argparse.ArgumentParser, words: list[str]) -> Iterator[argparse.ArgumentParser]:
    """Of the subcommands that the first words name, the outer one first."""
    yield parser
    for word in words:
        inner = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
        if not inner:
            return
        assert word in inner[0].choices, f"there is no {word!r} of {' '.join(words)!r}"
        parser = inner[0].choices[word]
        yield parser
