"""Lines of keys in TOML files, as errors name them."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest

from drover_core.settings import SettingsError, load, setting
from drover_core.toml_lines import line_of

TEXT = """\
name = "x"  # 1

[guard]
per_hour = 3
"quoted" = 1
[[rules]]
action = "drain"

[[rules]] # second
kind = ["xid"]
[rules.more]
deep = 1
"""


@pytest.mark.parametrize(
    ("key", "line"),
    [
        ("name", 1), ("guard.per_hour", 4), ("guard.quoted", 5), ("rules[0].action", 7), ("rules[1].kind", 10),
        ("rules[1].action", 9), ("rules[1].more.deep", 12), ("guard.missing", 3), ("nothing", None), ("", None),
    ],
)  # fmt: skip
def test_line_of_a_key_or_else_of_its_table(key: str, line: int | None) -> None:
    assert line_of(TEXT, key) == line


@dataclass(frozen=True)
class Inner:
    size: int = setting(1, "how large")


@dataclass(frozen=True)
class Outer:
    name: str = setting("", "a name")
    inner: Inner = field(default_factory=Inner)


def test_an_error_names_file_line_and_key(tmp_path: Path) -> None:
    path = tmp_path / "x.toml"
    path.write_text('name = "a"\n\n[inner]\nsice = 3\n')
    with pytest.raises(SettingsError, match=r"x\.toml:4: inner\.sice: unknown key; did you mean inner\.size\?"):
        load(Outer, path)
