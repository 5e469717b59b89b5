"""How many examples Hypothesis tries for each property: the profiles `ci` and `nightly`.

`ci` is what runs unless `--hypothesis-profile=nightly` asks for more (`make test ARGS=--hypothesis-profile=nightly`).
"""

from __future__ import annotations

from hypothesis import HealthCheck, settings

CI = 25
NIGHTLY = 150


def register() -> None:
    """Register both profiles and load `ci`."""
    for name, count in (("ci", CI), ("nightly", NIGHTLY)):
        # A slow machine, or one with other work to do, is no failure of the code under test.
        settings.register_profile(
            name, max_examples=count, deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
        )
    settings.load_profile("ci")


def examples(in_ci: int) -> int:
    """Return how many examples a test tries that tries `in_ci` in the profile `ci`; `nightly` has six times as many."""
    return in_ci * settings().max_examples // CI
