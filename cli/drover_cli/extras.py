"""Subcommands need different extras; a missing one is a line that says which to install."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from drover_cli.errors import CliError


@contextmanager
def needs(extras: str) -> Iterator[None]:
    """Imports inside need these extras of the distribution.

    Raises:
        CliError: a package of theirs is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("drover_"):
            raise
        raise CliError(f"{error.name} is not installed; this needs: pip install 'drover[{extras}]'") from None
