"""Errors that end a command with one line and an exit code.

CliError                bad input: exit code 2
├── RefusedError        the collector refuses: the guard, the mode or the role does not allow it: exit code 1
├── NotFoundError       nothing has this name: exit code 4
└── UnreachableError    the collector does not answer, or cannot now: exit code 3
"""

from __future__ import annotations


def visible(text: str) -> str:
    """Return a text whose control characters are written out (`\\x1b`): a file's name must not steer a terminal."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


class CliError(Exception):
    """What is wrong and what to do about it, in one line."""

    exit_code = 2


class RefusedError(CliError):
    exit_code = 1


class NotFoundError(CliError):
    exit_code = 4


class UnreachableError(CliError):
    exit_code = 3
