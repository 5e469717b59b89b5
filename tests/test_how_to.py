"""The recipes of docs/how-to lead where they say: each is followed to the letter in a copy of the checkout."""

from __future__ import annotations

from pathlib import Path

import pytest

from testbed.recipes import ROOT, RecipeError, blocks, changed, copy_of_checkout, follow

PAGES = sorted((ROOT / "docs/how-to").glob("add-*.md"))
OTHERS = {"add-a-detector": {"full_spool": "spare_disk"}}  # the page's name, and one with which it was followed before


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What mypy has found of a file, for the next page: it goes by the file's content."""
    return tmp_path_factory.mktemp("mypy_cache")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_is_followed_to_the_letter(page: Path, tmp_path: Path, cache: Path) -> None:
    scratch = copy_of_checkout(tmp_path)
    (scratch / ".mypy_cache").symlink_to(cache)
    for name, other in OTHERS.get(page.stem, {}).items():  # its changes must still find their place
        followed = tmp_path / page.name
        followed.write_text(page.read_text("utf-8").replace(name, other), "utf-8")
        follow(followed, scratch, commands=False)
    follow(page, scratch)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_lints_and_tests_what_it_adds(page: Path) -> None:
    found = list(blocks(page.read_text("utf-8")))
    commands = "".join(block.text for block in found if not block.title)
    assert {"ruff check", "ruff format", "mypy", "pytest"} <= {
        tool for tool in ("ruff check", "ruff format", "mypy", "pytest") if tool in commands
    }
    for block in found:
        if block.language == "python" and not block.title.startswith("tests/"):
            assert block.title in commands, f"{block.title} is checked by no command"


TEXT = "one\ntwo\n\nthree\ntwo\n"


def test_a_change_takes_the_place_of_its_lines() -> None:
    assert changed(TEXT, "-one\n+1\n@@\n \n-three\n+3\n two\n") == "1\ntwo\n\n3\ntwo\n"
    assert changed(TEXT, " one\n+and a half\n two\n") == "one\nand a half\ntwo\n\nthree\ntwo\n"


@pytest.mark.parametrize("diff", [" two\n+more\n", " four\n+more\n", " ne\n+more\n", "+more\n", "more\n"])
def test_a_change_whose_place_is_not_clear_is_refused(diff: str) -> None:
    with pytest.raises(RecipeError):
        changed(TEXT, diff)


PAGE = """A page.

```python title="made/new.py"
x = 1
```

```diff title="there.txt"
 one
+two
```

```text
only to read
```

```sh
cat made/new.py there.txt
COMMAND
```
"""


def _page(tmp_path: Path, command: str) -> Path:
    (tmp_path / "there.txt").write_text("one\n")
    page = tmp_path / "page.md"
    page.write_text(PAGE.replace("COMMAND", command))
    return page


def test_files_are_made_and_changed_and_commands_run(tmp_path: Path) -> None:
    follow(_page(tmp_path, "echo done > result"), tmp_path)
    assert (tmp_path / "made/new.py").read_text() == "x = 1\n"
    assert (tmp_path / "there.txt").read_text() == "one\ntwo\n"
    assert (tmp_path / "result").read_text() == "done\n"


def test_a_command_that_fails_names_the_page_its_line_and_what_it_said(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"(?s)page\.md, line 17: commands: ended with 3:.*one.*two"):
        follow(_page(tmp_path, "exit 3"), tmp_path)


def test_a_new_file_that_is_there_already_is_refused(tmp_path: Path) -> None:
    page = _page(tmp_path, "true")
    follow(page, tmp_path)
    with pytest.raises(RecipeError, match=r"line 4: made/new\.py: it is there already"):
        follow(page, tmp_path)
