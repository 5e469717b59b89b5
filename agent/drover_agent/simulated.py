"""Load simulated hardware from the simulator, a package that nodes do not have."""

from __future__ import annotations

from typing import Any

from drover_core.settings import SettingsError

GROUP = "drover_agent.simulated"  # entry points of pyproject.toml


def load(name: str) -> Any:
    """Return what the simulator offers under `name`: `node`, a source, or `fleet`, a command.

    Raises:
        SettingsError: the simulator is not installed.
    """
    from importlib.metadata import entry_points  # imported here: it takes 1 MB, and a real node never needs it

    for point in entry_points(group=GROUP, name=name):
        return point.load()
    raise SettingsError("simulated hardware is not part of this installation: pip install 'drover[simulation]'")
