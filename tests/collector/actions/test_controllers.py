"""What made a pod, by chains of owner references as the controllers of Kubernetes leave them."""

from __future__ import annotations

from typing import Any

import pytest

from drover_collector.actions.base import ActError, AwayError
from drover_collector.actions.kubernetes.controllers import MAX_HOPS, Controllers


def reference(version: str, kind: str, name: str, controller: object = True) -> dict[str, Any]:
    return {"apiVersion": version, "kind": kind, "name": name, "controller": controller}


def made(*references: dict[str, Any], name: str = "p", namespace: str = "team") -> dict[str, Any]:
    return {"metadata": {"name": name, "namespace": namespace, "ownerReferences": list(references)}}


class Objects(dict[str, dict[str, Any]]):
    """Path -> object. `refused`: paths that must not be read."""

    asked: list[str]
    refused: tuple[str, ...] = ()
    away = False

    def read(self, path: str) -> dict[str, Any] | None:
        self.asked = [*getattr(self, "asked", []), path]
        if self.away:
            raise AwayError("no answer")
        if path in self.refused:
            raise ActError("cannot read (403)")
        return self.get(path)


JOBS = "/apis/batch/v1/namespaces/team/jobs/llama-w-0"
JOBSETS = "/apis/jobset.x-k8s.io/v1alpha2/namespaces/team/jobsets/llama"


def jobset() -> Objects:
    return Objects({
        JOBS: made(reference("jobset.x-k8s.io/v1alpha2", "JobSet", "llama")),
        JOBSETS: made(reference("trainer.kubeflow.org/v1alpha1", "TrainJob", "tj", controller=False)),
    })  # fmt: skip


def lws() -> Objects:
    sets = "/apis/apps/v1/namespaces/team/statefulsets/"
    return Objects({
        f"{sets}vllm-0": made(reference("v1", "Pod", "vllm-0")),
        "/api/v1/namespaces/team/pods/vllm-0": made(reference("apps/v1", "StatefulSet", "vllm")),
        f"{sets}vllm": made(reference("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet", "vllm")),
    })  # fmt: skip


@pytest.mark.parametrize(
    ("pod", "objects", "found"),
    [
        (made(), Objects(), ""),
        (made(reference("kubeflow.org/v1", "PyTorchJob", "bert")), Objects(), "PyTorchJob/bert"),
        (made(reference("batch/v1", "Job", "llama-w-0")), jobset(), "JobSet/llama"),
        (made(reference("apps/v1", "StatefulSet", "vllm-0")), lws(), "LeaderWorkerSet/vllm"),
        (made(reference("apps/v1", "StatefulSet", "vllm")), lws(), "LeaderWorkerSet/vllm"),
        (made(reference("batch/v1", "Job", "gone")), Objects(), "Job/gone"),
        (made(reference("batch/v1", "Job", "a", controller="true")), Objects(), ""),
        (made(reference("batch/v1", "Job", "../../secrets/x")), Objects(), ""),
        (made(reference("batch/v1/../..", "Job", "a")), Objects(), ""),
        (made(reference("batch/v1", "Job", "a"), namespace="a/b"), Objects(), ""),
        (made(reference("batch/v1", "job\n", "a")), Objects(), ""),
        ({"metadata": {"ownerReferences": ["x", None]}}, Objects(), ""),
        ({}, Objects(), ""),
    ],
)
def test_a_chain_ends_at_what_a_person_wrote(pod: dict[str, Any], objects: Objects, found: str) -> None:
    assert Controllers(objects).of(pod) == found


def test_without_the_right_to_read_a_kind_the_answer_ends_below_it() -> None:
    objects = jobset()
    objects.refused = (JOBS,)
    controllers = Controllers(objects)
    pod = made(reference("batch/v1", "Job", "llama-w-0"))
    assert [controllers.of(pod), controllers.of(pod)] == ["Job/llama-w-0"] * 2
    assert objects.asked == [JOBS]  # once
    assert "403" in controllers.trouble


def test_a_circle_ends_and_a_server_that_is_away_is_no_answer() -> None:
    path = "/apis/batch/v1/namespaces/team/jobs/a"
    circle = Objects({path: made(reference("batch/v1", "Job", "a"))})
    assert Controllers(circle).of(made(reference("batch/v1", "Job", "a"))) == "Job/a"
    assert len(circle.asked) <= MAX_HOPS
    circle.away = True
    with pytest.raises(AwayError):
        Controllers(circle).of(made(reference("batch/v1", "Job", "a")))
