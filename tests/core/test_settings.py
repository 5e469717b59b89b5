"""Settings: what a file may say, what is refused and how, and that the sample is a file that loads."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest

from drover_core.settings import (
    SettingsError,
    between,
    example_toml,
    list_settings,
    load,
    one_of,
    required,
    setting,
)


@dataclass(frozen=True, slots=True)
class Receiver:
    name: str = required("name of the receiver")
    url: str = required("where to")
    level: str = setting("warning", "from which severity on", one_of("info", "warning"))


@dataclass(frozen=True, slots=True)
class Inner:
    wait_s: float = setting(5.0, "how long", between(1, 30))
    count: int = setting(3, "how many")
    on: bool = setting(True, "whether")
    roots: tuple[str, ...] = setting(("/sys", "/proc"), "where")


@dataclass(frozen=True, slots=True)
class Outer:
    fleet: str = setting("fleet.toml", "the fleet")
    label: str | None = setting(None, "an optional word")
    inner: Inner = field(default_factory=Inner)
    receivers: tuple[Receiver, ...] = setting((), "One table per receiver.")


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "config.toml"
    path.write_text(text)
    return path


def test_no_file_gives_the_defaults() -> None:
    assert load(Outer, None) == Outer()


def test_a_file_and_overrides(tmp_path: Path) -> None:
    path = write(tmp_path, 'fleet = "a.toml"\nlabel = "x"\n[inner]\nwait_s = 2\nroots = ["/a"]\n')
    config = load(Outer, path, {"inner.count": 9, "fleet": "b.toml"})
    assert config == Outer("b.toml", "x", Inner(2.0, 9, True, ("/a",)))
    assert isinstance(config.inner.wait_s, float)


def test_a_list_of_tables(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        '[[receivers]]\nname = "a"\nurl = "http://a"\n[[receivers]]\nname = "b"\nurl = "http://b"\nlevel = "info"\n',
    )
    assert load(Outer, path).receivers == (Receiver("a", "http://a"), Receiver("b", "http://b", "info"))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('flet = "a"', "flet: unknown key; did you mean fleet?"),
        ("zebra = 1", "zebra: unknown key; known here are fleet"),
        ("[inner]\nwait = 2", "inner.wait: unknown key; did you mean inner.wait_s?"),
        ("fleet = 3", "fleet: must be a string, found 3"),
        ("[inner]\ncount = true", "inner.count: must be a whole number, found True"),
        ('[inner]\non = "yes"', "inner.on: must be true or false, found 'yes'"),
        ("[inner]\nroots = [1]", "inner.roots: must be a string, found 1"),
        ("[inner]\nwait_s = 31", "inner.wait_s: must be from 1 to 30, found 31.0"),
        ("[inner]\nwait_s = nan", "inner.wait_s: must be from 1 to 30, found nan"),
        ("inner = 3", "inner: must be a table, [inner]"),
        ("receivers = 3", "receivers: must be a list of tables, [[receivers]]"),
        ("[receivers]\nname = 'a'", "receivers: must be a list of tables, [[receivers]]"),
        ("[[receivers]]\nname = 'a'", "receivers[0].url: missing; where to"),
        ("[[receivers]]\nname = 'a'\nurl = 'b'\nlevel = 'loud'", "receivers[0].level: must be one of info, warning"),
        (
            "[[receivers]]\nname = 'a'\nurl = 'b'\n[[receivers]]\nnam = 'a'",
            "receivers[1].nam: unknown key; did you mean receivers[1].name?",
        ),
        ("fleet =", "not valid TOML"),
    ],
)
def test_what_is_refused(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(SettingsError) as error:
        load(Outer, write(tmp_path, text))
    assert says in str(error.value)
    assert "config.toml" in str(error.value)
    assert "\n" not in str(error.value)


def test_a_missing_file() -> None:
    with pytest.raises(SettingsError, match=r"/nowhere/c.toml: No such file .*--config"):
        load(Outer, Path("/nowhere/c.toml"))


def test_an_override_into_a_scalar(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="inner: must be a table"):
        load(Outer, write(tmp_path, "inner = 3"), {"inner.count": 1})


def test_rows_name_every_setting() -> None:
    found = {row.key: row for row in list_settings(Outer)}
    assert list(found) == [
        "fleet", "label", "inner.wait_s", "inner.count", "inner.on", "inner.roots",
        "receivers", "receivers[].name", "receivers[].url", "receivers[].level",
    ]  # fmt: skip
    assert found["inner.roots"].type == "list of string"
    assert found["receivers"].type == "list of tables"
    assert found["receivers[].name"].default is None


def test_the_sample_loads_to_the_defaults(tmp_path: Path) -> None:
    assert load(Outer, write(tmp_path, example_toml(Outer))) == Outer()


def test_the_sample_shows_a_list_of_tables_that_works_when_uncommented(tmp_path: Path) -> None:
    text = example_toml(Outer)
    start = text.index("# [[receivers]]")
    entry = "\n".join(line.removeprefix("# ") for line in text[start:].splitlines())
    entry = entry.replace("name =", 'name = "a"').replace("url =", 'url = "b"')
    assert load(Outer, write(tmp_path, text[:start] + entry)).receivers == (Receiver("a", "b"),)
