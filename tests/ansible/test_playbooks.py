"""What the playbooks promise, out of their own text and expressions; `make test-rollout` plays them on machines."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from jinja2.nativetypes import NativeEnvironment

ANSIBLE = Path(__file__).resolve().parents[2] / "ansible"
SYSTEMD = sorted(ANSIBLE.parent.glob("*/systemd/drover-*.*"))
ENVIRONMENT = NativeEnvironment()
ENVIRONMENT.filters |= {
    "bool": bool,
    "difference": lambda some, others: [each for each in some if each not in others],
    "extract": lambda name, of, key: of[name][key],
    "from_json": json.loads,
}


def load(name: str) -> Any:
    return yaml.safe_load((ANSIBLE / name).read_text())


def tasks(where: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """With those of blocks, in the order in which they stand."""
    for task in where:
        yield task
        for part in ("tasks", "block", "rescue", "always"):
            yield from tasks(task.get(part, []))


def named(name: str, book: str) -> dict[str, Any]:
    (task,) = (task for task in tasks(load(book)) if task.get("name") == name)
    return task


# ---- the gate


def missing(batch: list[str], reached: list[str], rows: list[dict[str, Any]], clock: str = "1000") -> list[str]:
    """Nodes of a batch that the gate waits for; only the hosts in `reached` can still be reached."""
    found: dict[str, Any] = {
        "drover_batch": batch,
        "ansible_play_batch": reached,
        "hostvars": {host: {"drover_gate_node": f"node-{host}"} for host in batch},
        "drover_gate_lost_percent": load("roles/defaults/defaults/main.yml")["drover_gate_lost_percent"],
        "drover_clock": {"stdout": clock},
        "drover_expected": "2.0.0",
        "drover_reports": {"stdout_lines": [json.dumps(row) for row in rows]},
    }
    for name, text in named("Wait until this batch reports to the collector", "tasks/gate.yml")["vars"].items():
        found[name] = ENVIRONMENT.from_string(text).render(found)
    return list(found["drover_missing"])


def row(host: str, seen_ms: int = 1_005_000, version: str = "2.0.0") -> dict[str, Any]:
    return {"name": f"node-{host}", "agent_version": version, "last_seen_ms": seen_ms}


def test_the_gate_waits_for_who_does_not_report_with_this_version() -> None:
    assert missing(["a", "b"], ["a", "b"], [row("a"), row("b"), row("c")]) == []
    assert missing(["a", "b"], ["a", "b"], [row("a"), row("b", version="1.0.0")]) == ["node-b"]
    assert missing(["a", "b"], ["a", "b"], []) == ["node-a", "node-b"]


def test_a_report_from_before_the_restart_opens_no_gate() -> None:
    """An agent of the same version, with new settings that make it deaf, reported a second ago."""
    assert missing(["a"], ["a"], [row("a", seen_ms=999_999)]) == ["node-a"]
    assert missing(["a"], ["a"], [row("a", seen_ms=1_000_900)]) == ["node-a"]
    assert missing(["a"], ["a"], [row("a", seen_ms=1_001_100)]) == []


def test_hosts_that_are_lost_under_way_hold_up_the_batch_unless_they_are_few() -> None:
    """A release that takes nodes off the network must not go on to the next batch."""
    assert missing(["a", "b"], ["a"], [row("a")]) == ["node-b"]
    many = [f"n{i}" for i in range(200)]
    rows = [row(host) for host in many]
    assert missing(many, many[2:], rows[2:]) == []
    assert missing(many, many[3:], rows[3:]) == ["node-n0", "node-n1", "node-n2"]


@pytest.mark.parametrize("book", ["install.yml", "rollback.yml"])
def test_a_batch_is_noted_before_anything_is_changed(book: str) -> None:
    (play,) = (play for play in load(book) if play.get("serial") and play["hosts"] == "drover_agents")
    first = next(task for task in play["tasks"] if "ansible.builtin.set_fact" in task)
    assert set(first["ansible.builtin.set_fact"]) == {"drover_gate_node", "drover_batch"}
    before = play["tasks"][: play["tasks"].index(first)]
    assert all(task["ansible.builtin.meta"] == "end_host" for task in before)


# ---- the others


def test_an_upgrade_leaves_out_hosts_without_drover() -> None:
    """`end_host` ends one play alone: the plays of install.yml have to know for themselves."""
    look, install = load("upgrade.yml")
    assert [task.get("ansible.builtin.meta") for task in look["tasks"]] == [None, None]
    assert install["ansible.builtin.import_playbook"] == "install.yml"
    (noted,) = (task["ansible.builtin.set_fact"] for task in look["tasks"] if "ansible.builtin.set_fact" in task)
    (play,) = (play for play in load("install.yml") if play["hosts"] == "drover_agents")
    first = play["tasks"][0]
    assert first["ansible.builtin.meta"] == "end_host"
    leave = ENVIRONMENT.compile_expression(first["when"])
    for there in (True, False):
        facts = {name: ENVIRONMENT.from_string(text).render(drover_old={"stat": {"exists": there}})
                 for name, text in noted.items()}  # fmt: skip
        assert leave(**facts) is not there
    assert leave() is False  # install.yml alone


def test_denied_certificates_reach_the_collectors_before_thousands_of_hosts_are_visited() -> None:
    hosts = [play["hosts"] for play in load("rotate_certificates.yml")]
    assert hosts == ["drover_collectors[0]", "drover_collectors", "drover_dashboards", "drover_agents"]


def test_a_node_whose_certificate_has_ended_enrols_again_and_no_other_does() -> None:
    enrol = named("Enrol", "roles/certificates/tasks/enrol.yml")
    due = ENVIRONMENT.compile_expression(enrol["when"])

    def asked(exists: bool, code: int | None, check: bool = False) -> bool:
        good = {} if code is None else {"rc": code}
        return bool(due(drover_enrolled={"stat": {"exists": exists}}, drover_good=good, ansible_check_mode=check))

    assert asked(exists=False, code=None)
    assert asked(exists=True, code=1)
    assert not asked(exists=True, code=0)
    assert not asked(exists=True, code=1, check=True)


def test_the_console_may_act_no_longer_than_anybody_who_may() -> None:
    """docs/how-to/tls.md: 30 days for who can act."""
    issue = named("Issue for the console", "roles/certificates/tasks/main.yml")
    assert "--days" not in issue["ansible.builtin.command"]["cmd"]


def test_removal_knows_every_unit_and_what_people_add_to_it() -> None:
    gone = set(named("Remove units and settings", "remove.yml")["loop"])
    stopped = set(named("Stop services", "remove.yml")["loop"])
    for path in SYSTEMD:
        assert path.name in stopped
        assert f"/etc/systemd/system/{path.name}" in gone
        if path.suffix == ".service":  # `systemctl edit`, as docs/runbooks/DroverOpenFilesNearLimit.md has it
            assert f"/etc/systemd/system/{path.name}.d" in gone


def test_root_runs_nothing_out_of_a_folder_that_another_user_may_have_made() -> None:
    """/tmp and /var/tmp are everybody's: what is unpacked there goes to a new folder of an unknown name."""
    made = named("Make a folder for the bundle", "roles/release/tasks/main.yml")
    folder = "{{ " + made["register"] + ".path }}"
    assert made["ansible.builtin.tempfile"]["state"] == "directory"
    assert named("Unpack the bundle", "roles/release/tasks/main.yml")["ansible.builtin.unarchive"]["dest"] == folder
    for book in sorted(ANSIBLE.rglob("*.yml")):
        assert not re.search(r"(?<!\w)/(var/)?tmp/", book.read_text()), book


@pytest.mark.parametrize(
    ("book", "variable"),
    [
        ("roles/collector/tasks/main.yml", "drover_collector_listen"),
        ("tasks/go_back_collector.yml", "drover_collector_listen"),
        ("roles/dashboard/tasks/main.yml", "drover_dashboard_address"),
    ],
)
def test_a_service_is_waited_for_where_it_is_set_to_listen(book: str, variable: str) -> None:
    (wait,) = (task["ansible.builtin.wait_for"] for task in tasks(load(book)) if "ansible.builtin.wait_for" in task)
    assert wait["host"].startswith("{{ " + variable) and wait["host"].rstrip(" }").endswith("reach")
