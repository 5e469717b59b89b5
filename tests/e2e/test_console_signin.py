"""Sign-in by OpenID Connect in a real browser, at our own provider: nothing of the fleet before, a role after."""

from __future__ import annotations

from pathlib import Path

import pytest

from testbed import openid
from testbed.browser import CHROMIUM, FLAGS
from testbed.browsing import PAGE_MS
from testbed.system_processes import free_port, reachable, running
from testbed.waiting import wait_until

pytestmark = pytest.mark.system

SECRETS = """[auth]
redirect_uri = "{url}/oauth2callback"
cookie_secret = "0123456789abcdef0123456789abcdef"
client_id = "{client}"
client_secret = "{secret}"
server_metadata_url = "{provider}/.well-known/openid-configuration"
"""


def test_people_sign_in_and_have_their_role(tmp_path: Path) -> None:
    from playwright.sync_api import sync_playwright

    port, nobody = free_port(), free_port()
    url = f"http://127.0.0.1:{port}"
    secrets = tmp_path / "secrets.toml"
    with openid.serving() as provider:
        provider.redirect = f"{url}/oauth2callback"
        secrets.write_text(SECRETS.format(url=url, client=openid.CLIENT, secret=openid.SECRET, provider=provider.url))
        secrets.chmod(0o600)
        with (
            running(
                tmp_path, "drover_dashboard.main", "--collector", f"127.0.0.1:{nobody}", "--port", str(port),
                "--secrets", str(secrets), "--operator-group", "sre",
            ) as log,
            sync_playwright() as play,
        ):  # fmt: skip
            wait_until(lambda: reachable("127.0.0.1", port), "the console listens")
            chromium = play.chromium.launch(executable_path=CHROMIUM, headless=True, args=FLAGS)
            for claims, role in (
                ({"sub": "1", "email": "kim@example.com", "groups": ["dev"]}, "kim@example.com (viewer: may look)"),
                ({"sub": "2", "email": "alex@example.com", "groups": ["sre"]}, "alex@example.com (operator: may act)"),
            ):
                provider.claims = claims
                page = chromium.new_context().new_page()
                page.set_default_timeout(PAGE_MS)
                page.goto(f"{url}/policy")
                page.get_by_role("button", name="Sign in").wait_for()
                assert page.get_by_text("Fleet", exact=True).count() == 0, "no page before"
                assert page.request.get(f"{url}/drover/picture").status == 403
                page.get_by_role("button", name="Sign in").click()
                page.get_by_text(f"Signed in as {role}").wait_for()
                page.get_by_text("has not answered since").first.wait_for()  # no collector runs: the page is there
                assert page.request.get(f"{url}/drover/picture").status == 503
                page.get_by_role("button", name="Sign out").click()
                page.get_by_role("button", name="Sign in").wait_for()
                page.context.close()
            chromium.close()
        said = log.read_text()
        assert "Traceback" not in said
        assert openid.SECRET not in said
