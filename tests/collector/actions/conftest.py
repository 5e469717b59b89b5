"""A store in memory for tests of the desk of actions, which asks its store a hundred times a second.

Of the desk alone test_action_desk_troubles.py has a real store, and of all that judges and acts test_action_caps.py.
That both kinds answer alike is in test_kept_store.py.
"""

from __future__ import annotations

import pytest

from drover_collector.store import Store
from testbed.kept_store import in_memory


@pytest.fixture
def kept() -> Store:
    """An empty one."""
    return in_memory()
