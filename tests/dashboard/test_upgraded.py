"""The console's files are replaced while it runs."""

from __future__ import annotations

from pathlib import Path

import pytest
from streamlit.navigation.page import StreamlitPage
from streamlit.testing.v1 import AppTest

from drover_dashboard.server import code_reload as upgraded

SCRIPT = upgraded.PACKAGE / "script" / "console.py"


def test_a_file_that_is_another_one_is_seen(tmp_path: Path) -> None:
    (tmp_path / "pages").mkdir()
    page, module = tmp_path / "pages" / "node.py", tmp_path / "view.py"
    page.write_text("one")
    module.write_text("one")
    began = upgraded.stamps(tmp_path)
    assert upgraded.stamps(tmp_path) == began
    fresh = tmp_path / "pages" / "node.new"
    fresh.write_text("one")
    fresh.replace(page)  # as pip does
    assert {name for name, *_ in upgraded.stamps(tmp_path) ^ began} == {"pages/node.py"}
    module.unlink()
    assert {name for name, *_ in upgraded.stamps(tmp_path) ^ began} == {"pages/node.py", "view.py"}


@pytest.mark.parametrize("changed", [True, False])
def test_a_page_that_no_longer_fits_leaves_a_word_about_the_restart(
    changed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_self: object) -> None:
        raise ImportError("cannot import name 'of_tomorrow'")

    monkeypatch.setattr(upgraded, "replaced", lambda: changed)
    monkeypatch.setattr(StreamlitPage, "run", broken)
    app = AppTest.from_file(str(SCRIPT), default_timeout=120).run()
    assert [text.value for text in app.text] == [upgraded.TEXT] * changed
    assert len(app.exception) == (not changed)
