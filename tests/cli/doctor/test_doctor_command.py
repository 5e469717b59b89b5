"""`drover doctor`: exit codes, JSON, and which collector is asked."""

from __future__ import annotations

import argparse
import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from drover_cli import client
from drover_cli.commands import doctor
from drover_cli.doctor import own
from drover_cli.errors import UnreachableError
from drover_cli.main import main
from drover_collector.config import CollectorConfig, load_config
from drover_proto import fleet_pb2 as pb
from testbed.doctor_system import well
from testbed.fleet_stand_in import FleetStandIn

FLEET = '[[nodes]]\nnames = "n[0-2]"\nrack = "r1"\ngpus = 8\n'


@pytest.fixture
def made(tmp_path: Path) -> Callable[..., CollectorConfig]:
    """Settings out of TOML; `fleet` is that of three nodes unless given."""

    def make(text: str = "", fleet: str = FLEET) -> CollectorConfig:
        (tmp_path / "fleet.toml").write_text(fleet)
        store = (
            "" if "[store]" in text else f'[store]\nurl = "chdb://{tmp_path}/store"\nbackup_folder = "{tmp_path}/b"\n'
        )
        path = tmp_path / "collector.toml"
        path.write_text(f'fleet = "{tmp_path}/fleet.toml"\n{store}{text}')
        return load_config(path)

    return make


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> Callable[[pb.System | None], list[str]]:
    """Who answers the command; gives the addresses that were asked."""
    asked: list[str] = []

    def set_up(system: pb.System | None) -> list[str]:
        class Stub(FleetStandIn):
            def GetStatus(self, request: pb.StatusRequest) -> pb.Status:  # gRPC's name
                return pb.Status()

            def GetSystem(self, request: pb.SystemRequest) -> pb.System:  # gRPC's name
                assert system is not None
                return system

        @contextlib.contextmanager
        def connect(args: argparse.Namespace) -> Iterator[Stub]:
            asked.append(args.collector)
            if system is None:
                raise UnreachableError("the collector does not answer")
            yield Stub()

        monkeypatch.setattr(client, "connect", connect)
        monkeypatch.setattr(doctor, "SETTINGS", Path("/nowhere/collector.toml"))
        return asked

    return set_up


def test_exit_codes_and_json(answers: Callable[..., list[str]], capsys: pytest.CaptureFixture[str]) -> None:
    asked = answers(well())
    assert main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["bad"] is False
    assert report["findings"][0]["name"] == "settings"
    assert report["findings"][0]["state"] == "unknown"
    assert {"name", "state", "text", "remedy"} == set(report["findings"][0])
    answers(None)
    assert main(["doctor"]) == 1
    assert "bad      collector  the collector does not answer" in capsys.readouterr().out
    assert set(asked) == {client.DEFAULT}


def test_with_settings_it_asks_the_address_that_they_name(
    answers: Callable[..., list[str]], made: Callable[..., CollectorConfig], tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    asked = answers(well())
    made('[api]\nlisten = "127.0.0.1:1"\n')
    path = str(tmp_path / "collector.toml")
    assert main(["doctor", "--config", path, "--json"]) == 1, "its port does not answer"
    names = {finding["name"] for finding in json.loads(capsys.readouterr().out)["findings"]}
    assert names >= {
        "settings",
        "fleet",
        "enforcement",
        "certificates",
        "secrets",
        "ports",
        "store",
        "backups",
        "clock",
    }
    assert asked == ["localhost:1"]
    Path(path).write_text("fleet = 7\n")
    assert main(["doctor", "--config", path]) == 1
    assert "bad      settings" in capsys.readouterr().out
    assert main(["doctor", "--config", "/nowhere.toml"]) == 2


@pytest.mark.parametrize(
    ("listen", "asked"),
    [
        ("0.0.0.0:7302", "localhost:7302"),
        ("[::]:7302", "localhost:7302"),
        ("127.0.0.1:7302", "localhost:7302"),
        ("10.0.0.5:7302", "10.0.0.5:7302"),
    ],
)
def test_a_collector_of_this_machine_is_asked_by_a_name_of_its_certificate(listen: str, asked: str) -> None:
    assert own.reachable(listen) == asked
