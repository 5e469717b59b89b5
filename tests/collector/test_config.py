"""The collector's settings: what fits together, what does not, and that secrets stay secret."""

from __future__ import annotations

import base64
from pathlib import Path

import pytest

from drover_collector.config import CollectorConfig, is_loopback, load_config, split_address
from drover_collector.notify.settings import webhook_secret
from drover_core.settings import SettingsError, example_toml

KEY = bytes(range(32))
SECRET = "whsec_" + base64.b64encode(KEY).decode()


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "collector.toml"
    path.write_text(text)
    return path


def webhook(secret: str, extra: str = "") -> str:
    return f'[[webhooks]]\nname = "ops"\nurl = "https://example.org/hook"\n{secret}\n{extra}'


def test_the_sample_is_a_file_that_loads_to_the_defaults(tmp_path: Path) -> None:
    assert load_config(write(tmp_path, example_toml(CollectorConfig))) == CollectorConfig()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('flet = "x"', "did you mean fleet?"),
        ('[policy]\nmode = "enforce"', "policy.mode: unknown key"),
        ('[act]\nmode = "enforced"', ":2: act.mode"),
        ('[policy]\npath = "/nowhere.toml"', "policy.path: /nowhere.toml: no such file"),
        ('[ingest]\nlisten = "7301"', "ingest.listen: must be HOST:PORT"),
        ('[api]\nlisten = "::1:7302"', "IPv6 address in brackets"),
        ('[ingest]\nlisten = "0.0.0.0:7301"', "ingest.listen: 0.0.0.0:7301 can be reached from other machines"),
        ('[api]\nlisten = "[::]:7302"', "set tls.ca, tls.cert and tls.key"),
        ('[metrics]\nlisten = "head1:9100"', "metrics.listen: head1:9100 can be reached"),
        ('[tls]\nca = "/x"', "tls.cert: missing; give ca, cert and key, or none"),
        ('[tls]\nca = "/x"\ncert = "/x"\nkey = "/x"', "tls.ca: /x: no such file"),
        (webhook(""), "give either secret_file or secret_env"),
        (webhook('secret_env = "NOT_SET_ANYWHERE"'), "environment variable NOT_SET_ANYWHERE is not set"),
        (webhook('secret_file = "/nowhere"'), "/nowhere: No such file"),
        (webhook('secret_env = "S"', 'min_severity = "loud"'), "must be one of info, warning, critical"),
        (webhook('secret_env = "S"') + webhook('secret_env = "S"'), "'ops' is there twice"),
        ('[[webhooks]]\nname = "a.b"\nurl = "http://x"\nsecret_env = "S"', "must be a word of letters"),
        ('[tls]\ndenied_serials_file = "/etc/hostname"', "there are no certificates to refuse"),
        ("[store]\nmax_bytes = -1", "store.max_bytes: must be 0 or at least 1000000000 (bytes)"),
        ("[store]\nmax_bytes = 500", "store.max_bytes: must be 0 or at least 1000000000 (bytes)"),
        ("[store]\nkeep_free_bytes = -1", "store.keep_free_bytes: must be from 0 to"),
        ('[[webhooks]]\nname = "a"\nurl = "ftp://x"\nsecret_env = "S"', "must be an http:// or https:// address"),
    ],
)
def test_what_is_refused(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(SettingsError) as error:
        load_config(write(tmp_path, text), {"S": SECRET})
    assert says in str(error.value)
    assert "\n" not in str(error.value)


def test_tls_opens_other_addresses(tmp_path: Path) -> None:
    pem = tmp_path / "x.pem"
    pem.touch()
    text = f'[ingest]\nlisten = "0.0.0.0:7301"\n[tls]\nca = "{pem}"\ncert = "{pem}"\nkey = "{pem}"'
    assert load_config(write(tmp_path, text)).ingest.listen == "0.0.0.0:7301"


def test_addresses() -> None:
    assert split_address("[::1]:80") == ("::1", 80)
    assert [is_loopback(a) for a in ("127.0.0.2:1", "localhost:1", "[::1]:1", "10.0.0.1:1", "head1:1")] == [
        True, True, True, False, False,
    ]  # fmt: skip


def test_a_secret_from_a_file_or_the_environment(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text(SECRET + "\n")
    secret.chmod(0o600)
    (from_file,) = load_config(write(tmp_path, webhook(f'secret_file = "{secret}"'))).webhooks
    assert webhook_secret(from_file, {}) == KEY
    (from_env,) = load_config(write(tmp_path, webhook('secret_env = "S"')), {"S": SECRET}).webhooks
    assert webhook_secret(from_env, {"S": SECRET}) == KEY


def test_a_secret_that_everyone_can_read_is_refused(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text(SECRET)
    secret.chmod(0o644)
    with pytest.raises(SettingsError, match="open to every user; chmod o="):
        load_config(write(tmp_path, webhook(f'secret_file = "{secret}"')))


@pytest.mark.parametrize("bad", ["hunter2", "whsec_%%%%", "whsec_aHVudGVyMg==", SECRET.removeprefix("whsec_")])
def test_a_malformed_secret_is_refused_and_not_shown(tmp_path: Path, bad: str) -> None:
    with pytest.raises(SettingsError, match="does not hold whsec_") as error:
        load_config(write(tmp_path, webhook('secret_env = "S"')), {"S": bad})
    assert bad not in str(error.value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('[act]\nmode = "enforce"', 'act.mode: "enforce" needs an actuator'),
        ('[act]\nmode = "always"', "act.mode: must be one of observe, approve, enforce"),
        (
            '[act]\nmode = "enforce"\n[act.slurm]\nenabled = true\nconf = "/nowhere"',
            "act.slurm.conf: /nowhere: no such",
        ),
        ('[act.slurm]\nenabled = true\n[act.command]\nprogram = ["/x"]', "act.slurm.pools: say which pools it has"),
        (
            '[act.slurm]\nenabled = true\npools = ["a"]\n[act.command]\nprogram = ["/x"]\npools = ["a"]',
            "'a' is slurm's already",
        ),
        ('[act]\nmode = "enforce"\n[act.kubernetes]\nenabled = true', "act.kubernetes.server: this is no pod"),
        (
            '[act]\nmode = "enforce"\n[act.kubernetes]\nenabled = true\nserver = "http://k8s:6443"',
            "act.kubernetes.server: http://k8s:6443: must begin with https://",
        ),
        (
            '[act]\nmode = "enforce"\n[act.kubernetes]\nenabled = true\nserver = "https://k"\ntoken_file = "/nowhere"',
            "act.kubernetes.token_file: /nowhere: no such file",
        ),
    ],
)
def test_acting_that_cannot_be(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(SettingsError) as error:
        load_config(write(tmp_path, text))
    assert says in str(error.value)
