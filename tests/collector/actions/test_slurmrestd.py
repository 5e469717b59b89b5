"""Slurm through slurmrestd: on real ones (24.11 of Debian trixie, which can, and 22.05, which cannot), and on a server
that answers as none should."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import hmac
import json
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from drover_cli.doctor import schedulers
from drover_cli.doctor.finding import FindingState
from drover_collector.actions.base import ActError, AwayError, CheckLease, ForeignError, LaterError, Service
from drover_collector.actions.settings import ActConfig, SlurmConfig, validate_act
from drover_collector.actions.slurm.actuator import SlurmActuator
from drover_collector.actions.slurm.slurmrestd import Slurmrestd, in_hostlist
from drover_collector.config import CollectorConfig
from drover_collector.engine.node_state import Survey
from drover_core.model.events import Act, Action
from drover_core.model.fleet import load_toml
from drover_core.model.saving import JobSave
from drover_core.settings import SettingsError
from testbed.desks import action_of
from testbed.slurm import Slurm
from testbed.slurm import running as running_slurm
from testbed.system_processes import free_port

MARK = "cf930c65f7571e88"
NODES = ("gpu01", "gpu02", "gpu03")


def request(act: Act, node: str, mark: str = MARK, before: str = "") -> tuple[Action, CheckLease]:
    return action_of(act, node, mark, before=before), lambda: None


# ---- real ones


@dataclass
class Scene:
    slurm: Slurm
    local: str  # where the one is that knows who asks by the socket
    jwt: str  # and the one that wants a token

    def actuator(self, **settings: Any) -> SlurmActuator:
        config = SlurmConfig(**{"slurmrestd": self.local, "timeout_s": 20.0} | settings)
        return SlurmActuator(Slurmrestd(config), 10_000)

    def shown(self, node: str) -> str:
        return self.slurm.command("scontrol", "show", "node", node, "-o")

    def kept(self, node: str) -> list[str]:
        """What an act could change of it; load and memory, and whether it answered lately, change by themselves."""
        words = self.shown(node).replace("+NOT_RESPONDING", "").replace("*", "").split()
        found = [word for word in words if word.startswith(("State=", "Weight=", "Partitions=", "Reason="))]
        assert {"State", "Weight"} <= {word.partition("=")[0] for word in found}
        return found


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    folder = tmp_path_factory.mktemp("rest")
    port = free_port()
    with running_slurm(folder, NODES, newer=True) as slurm:
        slurm.start_rest("local", f"unix:{folder}/rest.sock")
        slurm.start_rest("jwt", f"127.0.0.1:{port}")
        yield Scene(slurm, f"unix:{folder}/rest.sock", f"http://127.0.0.1:{port}")


@pytest.mark.system
def test_drain_and_resume_with_the_incident_in_the_reason(scene: Scene) -> None:
    actuator = scene.actuator()
    job = scene.slurm.submit("sleep 600", "-w", "gpu01")
    scene.slurm.wait_for(job, "RUNNING")
    assert actuator.observe("gpu01").service is Service.IN
    assert actuator.do(*request(Act.DRAIN, "gpu01")).detail == "no new jobs; those that run may end"
    assert f"Reason=drover:{MARK}: xid/xid_79: GPU has fallen off the bus [" in scene.shown("gpu01")
    state = actuator.observe("gpu01")
    assert (state.service, state.mark, state.jobs) == (Service.DRAINING, MARK, (job,))
    assert "drained already" in actuator.do(*request(Act.DRAIN, "gpu01")).detail
    assert "another incident" in actuator.do(*request(Act.DRAIN, "gpu01", "other")).detail
    assert actuator.survey([*NODES, "unknown"]) == Survey({"gpu01"}, dict.fromkeys(NODES, True))
    with pytest.raises(ForeignError, match=MARK):
        actuator.do(*request(Act.RESUME, "gpu01", "other"))
    scene.slurm.command("scancel", job)
    scene.slurm.wait(lambda: actuator.observe("gpu01").service is Service.DRAINED, "it is empty")
    assert actuator.do(*request(Act.RESUME, "gpu01")).detail == "gets jobs again"
    assert "DRAIN" not in scene.shown("gpu01").partition("Reason=")[0]
    assert actuator.do(*request(Act.RESUME, "gpu01")).detail == "in service already"


@pytest.mark.system
def test_doctor_asks_a_real_slurm_and_changes_nothing(scene: Scene, tmp_path: Path) -> None:
    settings = SlurmConfig(enabled=True, slurmrestd=scene.local, timeout_s=20.0)
    (tmp_path / "fleet.toml").write_text('[[nodes]]\nnames = "gpu[01-03]"\n[[nodes]]\nnames = "gpu09"\n')
    spec = load_toml(tmp_path / "fleet.toml")
    before = [scene.kept(node) for node in NODES]
    found = schedulers.slurm(CollectorConfig(act=ActConfig(slurm=settings)), spec)
    assert [(each.state, each.text) for each in found[:2]] == [
        (FindingState.OK, "answers, and knows 3 of 4 nodes of the fleet file"),
        (FindingState.WARN, "does not know gpu09: they cannot be drained"),
    ]
    assert found[2].state is FindingState.UNKNOWN  # Slurm announces it to nobody
    assert [scene.kept(node) for node in NODES] == before


@pytest.mark.system
def test_advice_by_weight_and_its_end(scene: Scene) -> None:
    actuator = scene.actuator()
    assert actuator.before("gpu02") == "1"
    assert actuator.do(*request(Act.ADVISE, "gpu02")).detail == "weight 10000 instead of 1: jobs get other nodes first"
    assert " Weight=10000 " in scene.shown("gpu02")
    assert actuator.before("gpu02") == ""
    assert actuator.do(*request(Act.UNADVISE, "gpu02", before="1")).detail == "weight 1 again"
    assert " Weight=1 " in scene.shown("gpu02")


@pytest.mark.system
def test_isolate_closes_and_says_that_nothing_is_requeued(scene: Scene) -> None:
    actuator = scene.actuator()
    job = scene.slurm.submit("sleep 600", "-w", "gpu02")
    scene.slurm.wait_for(job, "RUNNING")
    with pytest.raises(ActError, match=rf"closed; its jobs run on .*by hand: scontrol requeue {job}$") as raised:
        actuator.do(*request(Act.ISOLATE, "gpu02"))
    assert not isinstance(raised.value, LaterError), "to try again would not help"
    assert scene.slurm.states()[job] == "RUNNING"
    assert actuator.observe("gpu02").mark == MARK
    scene.slurm.command("scancel", job)
    scene.slurm.wait(lambda: not actuator.observe("gpu02").jobs, "it is gone")
    assert actuator.do(*request(Act.ISOLATE, "gpu02")).detail == "closed; requeued: no job"
    actuator.do(*request(Act.RESUME, "gpu02"))


@pytest.mark.system
def test_a_job_is_asked_to_save_itself_by_the_signal_in_its_comment(scene: Scene) -> None:
    """The steps get it and the batch script does not, or the other way round; none is ended."""
    actuator, folder = scene.actuator(), scene.slurm.folder / "got"
    folder.mkdir()

    def traps(name: str) -> str:
        return f"trap 'echo got > {folder}/{name}' USR1; echo set > {folder}/set-{name}"

    waits = "while :; do sleep 0.1; done"

    def begin(name: str, comment: str) -> str:
        (folder / f"{name}.sh").write_text(f"{traps(f'{name}-step')}; {waits}")
        script = f"{traps(f'{name}-script')}; srun /bin/sh {folder}/{name}.sh & {waits}"
        return scene.slurm.submit(script, "-w", "gpu03", *(["--comment", comment] if comment else []))

    jobs = [begin("a", "drover:signal=USR1"), begin("b", "train drover:signal=B:USR1"), begin("c", "")]
    try:
        scene.slurm.wait(lambda: len(list(folder.glob("set-*"))) == 6, "the traps are set")
        saves = {save.job: save for save in actuator.find_saves("gpu03")}
        assert [saves[job].how for job in jobs] == ["signal USR1", "signal USR1 to its batch script", ""]
        assert "its comment names no signal" in saves[jobs[2]].why_not
        for job, name in zip(jobs, ("a-step", "b-script"), strict=False):
            actuator.ask_to_save(saves[job])
            scene.slurm.wait((folder / name).exists, f"{name} got it")
        time.sleep(0.3)  # time for one that must not get it
        assert {path.name for path in folder.glob("[abc]-*")} == {"a-step", "b-script"}
        assert set(jobs) <= set(actuator.observe("gpu03").jobs or ())
    finally:
        scene.slurm.command("scancel", *jobs)


@pytest.mark.system
def test_a_drain_of_somebody_else_stays_and_an_unknown_node_is_reported(scene: Scene) -> None:
    actuator = scene.actuator()
    scene.slurm.command("scontrol", "update", "nodename=gpu03", "state=drain", "reason=new cables")
    for act in (Act.DRAIN, Act.RESUME):
        with pytest.raises(ForeignError, match=r"drained by root \(new cables\): left unchanged"):
            actuator.do(*request(act, "gpu03"))
    scene.slurm.command("scontrol", "update", "nodename=gpu03", "state=resume")
    with pytest.raises(ActError, match="Slurm knows no node nobody"):
        actuator.do(*request(Act.DRAIN, "nobody"))
    assert set(actuator.observe_all(["gpu01", "nobody"])) == {"gpu01"}
    many = [*NODES, *(f"not{number}" for number in range(20))]
    assert set(actuator.observe_all(many)) == set(NODES), "by one list of all"


def token(scene: Scene, seconds: float) -> str:
    """As `scontrol token` makes it, for root."""
    now = int(time.time())
    parts: list[dict[str, Any]] = [
        {"alg": "HS256", "typ": "JWT"}, {"iat": now - 7200, "exp": now + int(seconds), "sun": "root"},
    ]  # fmt: skip
    text = b".".join(base64.urlsafe_b64encode(json.dumps(part).encode()).rstrip(b"=") for part in parts)
    key = (scene.slurm.folder / "jwt.key").read_bytes()
    signed = base64.urlsafe_b64encode(hmac.digest(key, text, hashlib.sha256)).rstrip(b"=")
    return b".".join((text, signed)).decode()


@pytest.mark.system
def test_a_token_that_has_expired_waits_until_its_file_is_renewed(scene: Scene, tmp_path: Path) -> None:
    file = tmp_path / "token"
    actuator = scene.actuator(slurmrestd=scene.jwt, token_file=str(file))
    with pytest.raises(AwayError, match="cannot be read"):
        actuator.do(*request(Act.DRAIN, "gpu03"))
    for wrong in (token(scene, -60), token(scene, 3600)[:-4] + "AAAA"):
        file.write_text(wrong)
        with pytest.raises(AwayError, match="refuses the token in") as refused:
            actuator.do(*request(Act.DRAIN, "gpu03"))
        assert wrong not in str(refused.value)
    file.write_text(f"SLURM_JWT={token(scene, 3600)}\n")  # the whole line that scontrol prints
    actuator.do(*request(Act.DRAIN, "gpu03"))
    file.write_text(scene.slurm.command("scontrol", "token", "lifespan=60"))
    assert actuator.observe("gpu03").mark == MARK
    actuator.do(*request(Act.RESUME, "gpu03"))


@pytest.mark.system
def test_slurmctld_away_and_slurmrestd_away(scene: Scene) -> None:
    actuator = scene.actuator()
    actuator.observe("gpu01")
    scene.slurm.stop("slurmctld")
    hasty = scene.actuator(timeout_s=1.0)  # slurmrestd itself says so after 10 s
    try:
        with pytest.raises(AwayError, match=r"slurmrestd does not answer at unix:.*timed out"):
            hasty.do(*request(Act.DRAIN, "gpu01"))
    finally:
        scene.slurm.start_controller()
    scene.slurm.wait(lambda: "IDLE" in scene.shown("gpu01"), "slurmctld is back")
    actuator.do(*request(Act.DRAIN, "gpu01"))
    actuator.do(*request(Act.RESUME, "gpu01"))
    with pytest.raises(AwayError, match="slurmrestd does not answer at unix:/nowhere"):
        scene.actuator(slurmrestd="unix:/nowhere").observe("gpu01")


@pytest.mark.system
def test_one_that_cannot_change_nodes_is_refused_with_what_to_do(tmp_path: Path) -> None:
    with running_slurm(tmp_path, ("gpu01",)) as slurm:
        slurm.start_rest("local", f"unix:{tmp_path}/rest.sock")
        old = SlurmActuator(Slurmrestd(SlurmConfig(slurmrestd=f"unix:{tmp_path}/rest.sock")), 10_000)
        with pytest.raises(ActError, match=r"serves v0\.0\.38 at the newest .* it takes Slurm 23\.02"):
            old.do(*request(Act.DRAIN, "gpu01"))


# ---- one that answers as none should


@pytest.fixture
def answers(tmp_path: Path) -> Iterator[tuple[list[tuple[int, bytes]], SlurmActuator]]:
    """What it answers about nodes, in order; the last again and again."""
    replies: list[tuple[int, bytes]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            first = "ping" in self.path or "update_time" in self.path
            status, text = (200, b"{}") if first else replies.pop(0) if len(replies) > 1 else replies[0]
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    (tmp_path / "token").write_text("secret")
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield replies, SlurmActuator(Slurmrestd(SlurmConfig(slurmrestd=url, token_file=str(tmp_path / "token"))), 1)
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.parametrize(
    ("status", "text", "error", "says"),
    [
        (200, b"<html>please log in", AwayError, "no JSON"),
        (401, b"{}", AwayError, "refuses the token"),
        (502, b"<html>no upstream", LaterError, "no upstream"),
        (200, b"{}", ActError, "has no nodes"),
        (200, b'{"nodes": [{"name": "gpu01"}]}', ActError, "something else than a node"),
        (200, b'{"nodes": [{"name": "gpu01", "state": ["IDLE"], "weight": null}]}', ActError, "something else"),
        (500, b'{"errors": [{"error": "Access/permission denied", "error_number": 2002}]}', LaterError, "denied"),
        (500, b'{"errors": [{"description": "Unable to contact slurm controller"}]}', AwayError, "contact"),
        (302, b"", LaterError, "answered 302"),
    ],
)
def test_other_answers(
    answers: tuple[list[tuple[int, bytes]], SlurmActuator], status: int, text: bytes, error: type[ActError], says: str
) -> None:
    replies, actuator = answers
    replies.append((status, text))
    with pytest.raises(ActError, match=says) as raised:
        actuator.do(*request(Act.DRAIN, "gpu01"))
    assert type(raised.value) is error
    assert "secret" not in str(raised.value)


def test_a_server_without_the_flag_sends_no_signal(
    answers: tuple[list[tuple[int, bytes]], SlurmActuator],
) -> None:
    replies, actuator = answers
    replies.append((200, b'{"paths": {}}'))  # and it answers no DELETE
    with pytest.raises(ActError, match="no flag FULL_STEPS_ONLY: the signal could end the job"):
        actuator.ask_to_save(JobSave("7", "signal USR1", "USR1"))
    replies[:] = [(200, json.dumps({"jobs": [{"job_id": 7, "comment": comment}]}).encode()) for comment in ("x", None)]
    for _ in range(2):
        with pytest.raises(ActError, match="its comment names no signal"):
            actuator._client.save_signal("7")


def test_nodes_as_older_and_newer_versions_show_them(
    answers: tuple[list[tuple[int, bytes]], SlurmActuator],
) -> None:
    replies, actuator = answers
    older = {"name": "gpu01", "state": "mixed", "state_flags": ["DRAIN"], "weight": 3, "reason": f"drover:{MARK}: x"}
    newer = {"name": "gpu01", "state": ["MIXED", "DRAIN"], "weight": {"set": True, "number": 3}, "reason": "cables"}
    replies += [(200, json.dumps({"nodes": [node]}).encode()) for node in (older, newer)]
    states = [actuator.observe_all(["gpu01"])["gpu01"] for _ in range(2)]
    assert [(state.service, state.mark, state.text) for state in states] == [
        (Service.DRAINING, MARK, "DRAIN+MIXED"), (Service.DRAINING, None, "DRAIN+MIXED"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("node", "hostlist", "there"),
    [
        ("gpu01", "gpu01", True),
        ("gpu01", "gpu[01-04]", True),
        ("gpu05", "gpu[01-04]", False),
        ("gpu7", "gpu[8-11]", False),
        ("gpu10", "gpu[8-11]", True),
        ("gpu010", "gpu[8-11]", False),
        ("gpu07", "cpu3,gpu[01-04,07],login", True),
        ("login", "cpu3,gpu[01-04,07],login", True),
        ("r2n3", "r[1-2]n[01-04]", False),
        ("r2n03", "r[1-2]n[01-04]", True),
        ("gpu1.site", "gpu[1-2].site", True),
        ("gpu1xsite", "gpu[1-2].site", False),
        ("gpu1", "", False),
    ],
)
def test_hostlists(node: str, hostlist: str, there: bool) -> None:
    assert in_hostlist(node, hostlist) is there


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"slurmrestd": "http://slurm:6820"}, "must be unix:/PATH, https://HOST:PORT"),
        ({"slurmrestd": "slurm:6820"}, "must be unix:/PATH"),
        ({"slurmrestd": "https://slurm:6820"}, "say where the token is"),
        ({"slurmrestd": "unix:/run/rest.sock", "token_file": "/nowhere"}, "/nowhere: no such file"),
        ({"slurmrestd": "https://ann:secret@slurm:6820"}, "no user and no password in the address"),
    ],
)
def test_settings(settings: dict[str, str], says: str) -> None:
    with pytest.raises(SettingsError, match=says) as caught:
        validate_act(ActConfig(mode="enforce", slurm=SlurmConfig(enabled=True, **settings)))  # type: ignore[arg-type]  # strings
    assert "secret" not in str(caught.value)


def test_plain_http_to_another_machine_is_asked_for(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("t")
    url = "http://slurm-restapi.slurm:6820"
    asked = SlurmConfig(enabled=True, slurmrestd=url, plain_http=True, token_file=str(token))
    validate_act(ActConfig(mode="enforce", slurm=asked))
    with pytest.raises(SettingsError, match=r"with act\.slurm\.plain_http = true also http://HOST:PORT"):
        validate_act(ActConfig(mode="enforce", slurm=dataclasses.replace(asked, plain_http=False)))


def test_certificates_that_cannot_be_read_are_said_and_waited_for(tmp_path: Path) -> None:
    """They may be renewed just now."""
    authority = tmp_path / "ca.pem"
    authority.write_text("half of it")
    client = Slurmrestd(SlurmConfig(slurmrestd="https://127.0.0.1:1", ca_file=str(authority)))
    for _ in range(2):
        with pytest.raises(AwayError, match=f"the certificates in {authority} cannot be read"):
            client.nodes(["gpu01"])
        authority.unlink(missing_ok=True)
