"""The file that says which collector a cluster's name stands for."""

from __future__ import annotations

from pathlib import Path

import pytest

from drover_core import clusters
from drover_core.settings import SettingsError

TWO = '[[clusters]]\nname = "west"\ncollector = "w:7302"\n[[clusters]]\nname = "east"\ncollector = "e:7302"\n'


def written(folder: Path, text: str, mode: int = 0o640) -> Path:
    path = folder / "clusters.toml"
    path.write_text(text)
    path.chmod(mode)
    return path


def test_names_addresses_and_files_next_to_it(tmp_path: Path) -> None:
    tls = 'ca = "ca.pem"\ncert = "/abs/cert.pem"\nkey = "~/key.pem"\n'
    found = clusters.load(written(tmp_path, f'current = "east"\n{TWO}{tls}'))
    assert (found.current, found.names()) == ("east", ["west", "east"])
    west, east = found.clusters
    assert west.tls() is None
    assert east.tls() == (tmp_path / "ca.pem", Path("/abs/cert.pem"), Path("~/key.pem").expanduser())


@pytest.mark.parametrize("mode", [0o644, 0o604, 0o602, 0o660])
def test_a_file_that_others_read_or_write_is_refused(tmp_path: Path, mode: int) -> None:
    with pytest.raises(SettingsError, match=r"chmod (o=|g-w) "):
        clusters.load(written(tmp_path, TWO, mode))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (TWO.replace("east", "WEST"), "'WEST' and 'west' read the same"),
        (TWO.replace("e:7302", "W:7302"), "W:7302 is that of 'west' too"),
        (TWO.replace("east", "All"), "means every cluster"),
        (TWO.replace("east", "a b"), "must be 1 to 40 letters"),
        (TWO.replace("e:7302", "e"), "must be HOST:PORT"),
        (f'{TWO}ca = "ca.pem"\n', "ca, cert and key belong together"),
        (f'current = "north"\n{TWO}', "no cluster 'north'; known are west, east"),
        (f"{TWO}colector = 1\n", "unknown key"),
    ],
)
def test_what_could_lead_to_the_wrong_collector_is_refused(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(SettingsError) as error:
        clusters.load(written(tmp_path, text))
    assert said in str(error.value)


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="No such file"):
        clusters.load(tmp_path / "none.toml")
