"""Settings of the agent: what is wrong is one line that names the file, the key and the mend."""

from __future__ import annotations

import socket
import tomllib
from pathlib import Path

import pytest

from drover_agent.config import AgentConfig, load_config
from drover_core.settings import (
    SettingsError,
    example_toml,
    list_settings,
    load,
)


def test_defaults() -> None:
    config = AgentConfig()
    assert config.node_name == socket.gethostname()
    assert (config.interval_s, config.batch_s, config.hardware) == (1.0, 5.0, "auto")
    assert not config.kmsg_accept_user_facility


def test_the_sample_is_a_valid_file_with_every_setting(tmp_path: Path) -> None:
    path = tmp_path / "agent.toml"
    path.write_text(example_toml(AgentConfig))
    assert load_config(str(path)) == AgentConfig()
    text = path.read_text()
    for row in list_settings(AgentConfig):
        assert row.help in text
        assert f"{row.key.rpartition('.')[2]} =" in text


def test_a_file_and_overrides(tmp_path: Path) -> None:
    path = tmp_path / "agent.toml"
    path.write_text('node = "r01n01"\ncollectors = ["c1:7301", "c2:7301"]\n[spool]\ndir = "/data/spool"\n')
    config = load_config(str(path), ["interval_s=2", "spool.max_bytes=2000000", "hardware=none", "node=r01n02"])
    assert (config.node_name, config.collectors) == ("r01n02", ("c1:7301", "c2:7301"))
    assert (config.interval_s, config.hardware) == (2.0, "none")
    assert (config.spool.dir, config.spool.max_bytes) == ("/data/spool", 2_000_000)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("interva_s = 2", "interva_s: unknown key; did you mean interval_s?"),
        ("[spool]\nfolder = 1", "spool.folder: unknown key"),
        ('interval_s = "fast"', "interval_s: must be a number"),
        ("batch_s = 60", "batch_s: must be from 1 to 30"),
        ('hardware = "gpu"', "hardware: must be one of auto, nvml, none, simulated"),
        ('collectors = ["c1"]', "collectors: must be addresses with a port, as in collector1:7301"),
        ("collectors = []", "collectors: must name at least one collector"),
        ('tls = "on"', "tls: must be a table"),
        ('[tls]\nca = "/etc/ca.pem"', "tls.cert: missing; give all of tls.ca, tls.cert, tls.key or none"),
        ('[tls]\nca = "/no/a"\ncert = "/no/b"\nkey = "/no/c"', "tls.ca: cannot read /no/a"),
        ("node = [", "not valid TOML"),
    ],
)
def test_what_is_wrong_is_reported_in_one_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "agent.toml"
    path.write_text(text)
    with pytest.raises(SettingsError) as caught:
        load_config(str(path))
    assert message in str(caught.value)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_file_and_a_bad_override() -> None:
    with pytest.raises(SettingsError, match="check the path given with --config"):
        load_config("/no/such/agent.toml")
    with pytest.raises(SettingsError, match="--set interval_s: must be key=value"):
        load_config(None, ["interval_s"])


def test_settings_can_be_loaded_without_a_file() -> None:
    assert load(AgentConfig, None, tomllib.loads("interval_s = 5")).interval_s == 5


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ("cert", "tls.cert: {} holds no CERTIFICATE in PEM form; check which file it is"),
        ("key", "tls.key: {} holds no PRIVATE KEY in PEM form; check which file it is"),
    ],
)
def test_a_file_that_is_no_certificate_or_key_is_named(tmp_path: Path, broken: str, message: str) -> None:
    """Most often the two are swapped; gRPC would say only that no handshake could be created."""
    for name, holds in (("ca", "CERTIFICATE"), ("cert", "CERTIFICATE"), ("key", "EC PRIVATE KEY")):
        found = {"cert": "EC PRIVATE KEY", "key": "CERTIFICATE"}[name] if name == broken else holds
        (tmp_path / name).write_text(f"-----BEGIN {found}-----\nAA==\n-----END {found}-----\n")
    overrides = [f"tls.{name}={tmp_path / name}" for name in ("ca", "cert", "key")]
    with pytest.raises(SettingsError) as caught:
        load_config(None, overrides)
    assert str(caught.value) == f"settings: {message.format(tmp_path / broken)}"
    (tmp_path / broken).unlink()
    (tmp_path / broken).mkdir()
    with pytest.raises(SettingsError, match=f"tls.{broken}: cannot read .*: Is a directory; check the path"):
        load_config(None, overrides)
