"""Follow a page of docs/how-to to the letter, in a copy of the checkout.

    scratch = copy_of_checkout(tmp_path)
    follow(page, scratch)               # raises RecipeError: the page and the line, what went wrong

Of a page's fenced blocks these are followed, in their order; all other blocks are only for people to read:

    ```python title="PATH"      a new file (in any language but diff)
    ```diff title="PATH"        changes of a file. Lines that begin with a space or "-" stand there one after another,
                                exactly once; those with "+" take the place of those with "-". A line "@@" parts one
                                change from the next.
    ```sh                       commands, from the top of the copy, with bash; the first that fails ends it
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 240.0  # on a busy machine; a few seconds on a quiet one
NOT_COPIED = (".git", ".venv", ".hypothesis", ".*_cache", "test-artifacts", "*.egg-info")  # bytecode saves seconds
_FENCE = re.compile(r'^```(\w+)(?: title="([^"]+)")?$')


class RecipeError(AssertionError):
    """The page cannot be followed: its line, and why."""


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block: `line` is that of its first line of text, `title` the path that it is about."""

    language: str
    title: str
    text: str
    line: int


def blocks(page: str) -> Iterator[Block]:
    """Yield the blocks of a page that are to be followed.

    Raises:
        RecipeError: a block has no end.
    """
    lines = page.splitlines()
    at = 0
    while at < len(lines):
        opened = lines[at]
        at += 1
        if not opened.startswith("```"):
            continue
        begin = at
        while at < len(lines) and lines[at] != "```":
            at += 1
        if at == len(lines):
            raise RecipeError(f"line {begin}: the block has no end")
        found = _FENCE.match(opened)
        if found and (found[2] or found[1] == "sh"):
            yield Block(found[1], found[2] or "", "".join(f"{line}\n" for line in lines[begin:at]), begin + 1)
        at += 1


def changed(text: str, diff: str) -> str:
    """Return a file's text with the changes of a diff block.

    Raises:
        RecipeError: the lines to change are not there, or stand there more than once.
    """
    for change in re.split(r"^@@.*\n", diff, flags=re.MULTILINE):
        lines = change.splitlines(keepends=True)
        before = "".join(line[1:] or "\n" for line in lines if line[0] in " -\n")
        after = "".join(line[1:] or "\n" for line in lines if line[0] in " +\n")
        if strange := [line for line in lines if line[0] not in " +-\n"]:
            raise RecipeError(f"a line of a diff begins with a space, + or -: {strange[0]!r}")
        if not change:
            continue
        count = f"\n{text}".count(f"\n{before}") if before else 0
        if count != 1:
            raise RecipeError(
                f"these lines stand there {count} times, not once. If the file has changed, change the page:\n{before}"
            )
        text = f"\n{text}".replace(f"\n{before}", f"\n{after}")[1:]
    return text


def copy_of_checkout(folder: Path) -> Path:
    """Return a copy without history and caches of tools; its `.venv` is the one in use."""
    scratch = folder / "drover"
    shutil.copytree(ROOT, scratch, ignore=shutil.ignore_patterns(*NOT_COPIED))
    (scratch / ".venv").symlink_to(sys.prefix)
    return scratch


def environment(scratch: Path) -> dict[str, str]:
    """Return an environment in which Python finds the packages of the copy, and no trace of this run of pytest."""
    packages = sorted({str(package.parent) for package in scratch.glob("*/drover_*")})
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "DROVER_"))}
    return {**kept, "PYTHONPATH": os.pathsep.join(packages)}


def follow(page: Path, scratch: Path, commands: bool = True) -> None:
    """Do what a page says; without its commands if `commands` is False.

    Raises:
        RecipeError: a file is there already or is missing, lines are not found, a command fails.
    """
    for block in blocks(page.read_text("utf-8")):
        place = f"{page.name}, line {block.line}"
        path = scratch / block.title
        try:
            if not block.title:
                if commands:
                    _run(block.text, scratch)
            elif block.language == "diff":
                path.write_text(changed(path.read_text("utf-8"), block.text), "utf-8")
            elif path.exists():
                raise RecipeError("it is there already")
            else:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(block.text, "utf-8")
        except (RecipeError, OSError) as error:
            raise RecipeError(f"{place}: {block.title or 'commands'}: {error}") from None


def _run(commands: str, scratch: Path) -> None:
    child = subprocess.Popen(
        ["bash", "-euxc", commands], cwd=scratch, env=environment(scratch), text=True, start_new_session=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        said, _ = child.communicate(timeout=LIMIT_S)
    finally:
        if child.poll() is None:
            os.killpg(child.pid, 9)
            child.wait()
    if child.returncode:
        raise RecipeError(f"ended with {child.returncode}:\n{said}")
