"""The faults of a node that `rstar2 doctor --cluster` reports."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from rstar2.cli.doctor_cluster import examine_node, faults_of


@pytest.fixture(scope="module")
def own() -> dict[str, Any]:
    return examine_node("", None)


def test_a_machine_agrees_with_itself(own: dict[str, Any]) -> None:
    assert own["port"] > 0
    assert faults_of(own, own) == []


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda n: n["python"]["packages"].update(torch="1.0"), "torch 1.0, here"),
        (lambda n: n["python"]["packages"].update(rstar2=None), "rstar2 missing, here"),
        (lambda n: n["python"].update(version="2.7.1"), "Python 2.7.1"),
        (lambda n: n["isolation"].update(level=None, reason="no seccomp"), "no seccomp"),
        (lambda n: n.update(shm_free_gb=0.1), "shared memory"),
        (lambda n: n.update(shared=False), "the run directory is not visible"),
        (lambda n: n.update(clock=0.0), "clock"),
    ],
)
def test_each_difference_is_named(own: dict[str, Any], change: Any, named: str) -> None:
    node = copy.deepcopy(own)
    change(node)
    (fault,) = faults_of(node, own)
    assert named in fault


def test_a_node_that_does_not_answer_is_a_fault(own: dict[str, Any]) -> None:
    assert faults_of("GetTimeoutError: 120 s", own) == [
        "the node could not be examined: GetTimeoutError: 120 s"
    ]
