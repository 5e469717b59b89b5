"""The directory of the node's GPUs that sources share."""

from __future__ import annotations

from drover_agent.sources.base import Entity
from drover_agent.sources.gpus import Gpus
from drover_core.metrics.catalog import Scope

WHOLE = Entity(Scope.GPU, "S1", 1, uuid="GPU-1", serial="S1", pci="0000:3b:00.0")
SLICE = Entity(Scope.GPU, "S1", 1, uuid="MIG-1", pci="0000:3b:00.0", mig="MIG-1")


def test_gpus_are_found_by_address_and_uuid_and_instances_by_their_own() -> None:
    gpus = Gpus()
    gpus.set_entity(SLICE)
    gpus.set_entity(WHOLE)
    assert gpus.find(pci="00000000:3B:00.0") == WHOLE
    assert gpus.find(uuid="GPU-1") == WHOLE
    assert gpus.find(uuid="MIG-1") == SLICE
    assert gpus.find(pci="0000:af:00.0") is None
    assert gpus.find() is None
    assert gpus.all() == (WHOLE,)


def test_a_gpu_that_became_another_replaces_the_one_of_its_slot() -> None:
    gpus = Gpus()
    gpus.set_entity(WHOLE)
    other = Entity(Scope.GPU, "S2", 1, uuid="GPU-2")
    gpus.set_entity(other)
    assert gpus.all() == (other,)
    assert gpus.find(uuid="GPU-1") is None


def test_processes_that_could_not_be_read_are_unknown_not_none() -> None:
    gpus = Gpus()
    gpus.set_pids(0, (5, 6))
    gpus.set_pids(1, ())
    assert gpus.pids() == {0: (5, 6), 1: ()}
    gpus.set_pids(0, None)
    assert gpus.pids() == {1: ()}
    gpus.set_entity(WHOLE)
    gpus.forget(1)
    assert (gpus.pids(), gpus.all()) == ({}, ())


def test_an_instance_is_known_by_its_number_while_it_is_there() -> None:
    gpus = Gpus()
    gpus.set_entity(WHOLE)
    gpus.set_instances(1, (SLICE,), {3: SLICE})
    gpus.set_instances(0, (), {})
    assert gpus.instance(1, 3) == SLICE
    assert gpus.instance(0, 3) is None
    assert gpus.instance(None, 3) is None
    gpus.set_instances(1, (SLICE,))
    assert gpus.instance(1, 3) is None, "several share it now"
    gpus.set_instances(1, (SLICE,), {3: SLICE})
    gpus.forget(1)
    assert gpus.instance(1, 3) is None


def test_the_instances_of_a_gpu_are_reported_as_a_whole() -> None:
    gpus = Gpus()
    gpus.set_entity(WHOLE)
    gpus.set_instances(1, (SLICE,))
    other = Entity(Scope.GPU, "MIG-2", 1, uuid="MIG-2", pci="0000:3b:00.0", mig="MIG-2")
    gpus.set_instances(1, (other,))
    assert (gpus.find(uuid="MIG-1"), gpus.find(uuid="MIG-2")) == (None, other)
    gpus.set_instances(1, ())
    assert gpus.find(uuid="MIG-2") is None
    assert gpus.all() == (WHOLE,)
