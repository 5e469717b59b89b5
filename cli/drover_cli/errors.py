"""Errors that end a command with one line and an exit code.

CliError                bad input: exit code 2
└── UnreachableError    the collector does not answer: exit code 3
"""

from __future__ import annotations


class CliError(Exception):
    """What is wrong and what to do about it, in one line."""

    exit_code = 2


class UnreachableError(CliError):
    exit_code = 3
