"""Whose a job is: what is sent of it, what of a hostile message is left, and what several reports say together."""

from __future__ import annotations

import json

import pytest

from drover_core.jobs.owner import (
    KUBERNETES,
    MAX_CHARS,
    JobOwner,
    OwnerError,
    clean,
    from_message,
    merged,
    sentence,
    to_message,
)
from drover_core.model.reports import event_text

OWNER = JobOwner("7", user="alice", uid=1000, account="vision", project="llama", array="5_2", ray_job="01000000")


def test_a_message_says_what_is_known_and_nothing_else() -> None:
    text = to_message(OWNER)
    assert from_message(text) == OWNER
    assert json.loads(text).keys() == {
        "v",
        "job",
        "by",
        "user",
        "uid",
        "account",
        "project",
        "array",
        "ray_job",
        "text",
    }
    assert event_text("rank", text) == sentence(OWNER)
    assert sentence(OWNER) == (
        "owner of job 7: user alice, account vision, project llama, array task 5_2, Ray job 01000000"
    )


def test_values_of_users_are_cut_and_printable() -> None:
    assert clean("a\x1b[2J\nb\u202e" + "x" * 1_000_000) == "a[2Jb" + "x" * (MAX_CHARS - 5)
    assert clean("\x00 \t") == ""
    hostile = json.dumps({"v": 1, "job": "7", "by": "environment", "account": "v\n\x1b]0;x" + "y" * 5000})
    assert from_message(hostile).account == "v]0;x" + "y" * (MAX_CHARS - 5)


@pytest.mark.parametrize(
    "message",
    [
        "", "[]", "{", "[" * 5000, "{" + " " * 20_000 + "}", '{"v":2,"job":"7","by":"environment"}',
        '{"v":1,"job":"a b","by":"environment"}', '{"v":1,"job":"","by":"environment"}', '{"v":1,"job":"7","by":"me"}',
        '{"v":1,"job":"7","by":"environment","uid":true}', '{"v":1,"job":"7","by":"environment","uid":-1}',
        '{"v":1,"job":"7","by":"environment","account":["x"]}',
    ],
)  # fmt: skip
def test_what_is_no_owner_is_refused(message: str) -> None:
    with pytest.raises(OwnerError):
        from_message(message)


def test_reports_of_one_job_together() -> None:
    """A node that may not read environments takes nothing from what another one knows; Kubernetes knows better."""
    poor = JobOwner("7", user="alice", uid=1000)
    pod = JobOwner("team/a", ray_job="02000000", account="said")
    kube = JobOwner("team/a", KUBERNETES, account="team", controller="JobSet/llama")
    found = merged([OWNER, kube, poor, pod])
    assert found["7"] == OWNER
    assert found["team/a"] == JobOwner(
        "team/a", KUBERNETES, account="team", controller="JobSet/llama", ray_job="02000000"
    )
    moved = JobOwner("7", account="speech")
    assert merged([OWNER, moved])["7"].account == "speech"
