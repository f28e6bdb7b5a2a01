"""The timers of the code environment expire from the inside out."""

from __future__ import annotations

import pytest

from rstar2.codeenv import deadlines
from rstar2.codeenv.jail import worker
from rstar2.codeenv.server import compat, selfcheck
from rstar2.config import CodeEnvConfig
from rstar2.types import Limits

DEFAULTS = CodeEnvConfig()


def assert_ordered(timers: dict[str, float]) -> None:
    """Each timer must be strictly longer than the one before it."""
    for (inner, inner_s), (outer, outer_s) in zip(
        list(timers.items())[:-1], list(timers.items())[1:], strict=True
    ):
        assert inner_s < outer_s, f"{outer} ({outer_s} s) expires before {inner} ({inner_s} s)"


@pytest.mark.parametrize("limits", [DEFAULTS.default, DEFAULTS.cap], ids=["default", "cap"])
def test_a_call_is_given_up_from_the_inside_out(limits: Limits) -> None:
    wall_s = limits.wall_s or 0.0
    executor_s = wall_s + deadlines.WORKER_GRACE_S + deadlines.EXIT_REPORT_S
    # A caller's deadline that cuts the program short: deadline == the program's wall limit.
    assert_ordered(
        {
            "program's wall limit": wall_s,
            "worker checks the limit": wall_s + worker._SCRATCH_CHECK_S,
            "executor kills the worker": wall_s + deadlines.WORKER_GRACE_S,
            "executor gives up the attempt": executor_s,
            "call table": wall_s + deadlines.CALL_TABLE_GRACE_S,
            "client reads the batch": wall_s + deadlines.CLIENT_READ_GRACE_S,
            "server writes the batch": wall_s + deadlines.SERVER_WRITE_GRACE_S,
        }
    )


@pytest.mark.parametrize("limits", [DEFAULTS.default, DEFAULTS.cap], ids=["default", "cap"])
def test_a_call_of_a_session_is_given_up_from_the_inside_out(limits: Limits) -> None:
    """A call may reach its worker just before its deadline, and only then copies the session."""
    worker_s = (limits.wall_s or 0.0) + deadlines.SESSION_COPY_S
    assert_ordered(
        {
            "program's wall limit": limits.wall_s or 0.0,
            "after the copy": worker_s,
            "threads have stopped": worker_s + deadlines.SESSION_STOP_S,
            "processes have ended": worker_s + deadlines.SESSION_STOP_S + 2 * deadlines.TEARDOWN_S,
            "executor kills the worker": (limits.wall_s or 0.0) + deadlines.SESSION_GRACE_S,
            "executor knows why it ended": (limits.wall_s or 0.0)
            + deadlines.SESSION_GRACE_S
            + deadlines.EXIT_REPORT_S,
            "call table": (limits.wall_s or 0.0) + deadlines.CALL_TABLE_GRACE_S,
            "client reads the batch": (limits.wall_s or 0.0) + deadlines.CLIENT_READ_GRACE_S,
            "server writes the batch": (limits.wall_s or 0.0) + deadlines.SERVER_WRITE_GRACE_S,
        }
    )


@pytest.mark.parametrize("limits", [DEFAULTS.default, DEFAULTS.cap], ids=["default", "cap"])
def test_a_program_may_use_its_whole_wall_limit_within_every_default_deadline(
    limits: Limits,
) -> None:
    both_attempts_s = 2 * ((limits.wall_s or 0.0) + deadlines.WORKER_GRACE_S)
    assert both_attempts_s < deadlines.DEFAULT_DEADLINE_S
    assert (limits.wall_s or 0.0) < deadlines.COMMAND_QUEUE_S + (DEFAULTS.cap.wall_s or 0.0)
    assert 0 < compat.RUN_CODE_QUEUE_S < deadlines.DEFAULT_DEADLINE_S


def test_a_server_starts_from_the_inside_out() -> None:
    assert_ordered(
        {
            "spawn": deadlines.SPAWN_S,
            "one self-check": selfcheck.SMALL.wall_s or 0.0,
            "zygote": deadlines.ZYGOTE_WARM_UP_S,
            "all self-checks": deadlines.SELF_CHECK_S,
            "two levels": 2 * (deadlines.ZYGOTE_WARM_UP_S + deadlines.SELF_CHECK_S),
            "owner": deadlines.OWNED_START_S,
            "owner on another node": deadlines.REMOTE_START_S,
        }
    )
    repeated_s = 2 * (2 * deadlines.SPAWN_S + deadlines.SELF_CHECK_WALL_S)
    assert repeated_s <= deadlines.SELF_CHECK_S


def test_a_session_opens_from_the_inside_out() -> None:
    assert_ordered(
        {
            "order": deadlines.SESSION_ORDER_S,
            "worker hangs": deadlines.SESSION_ORDER_S + deadlines.SESSION_GRACE_S,
            "after the spawn": 2 * deadlines.SPAWN_S
            + deadlines.SESSION_ORDER_S
            + deadlines.SESSION_GRACE_S,
            "client": deadlines.SESSION_REQUEST_S,
        }
    )


def test_health_is_judged_from_the_inside_out() -> None:
    assert_ordered(
        {
            "connection": deadlines.HTTP_CONNECT_S,
            "health": deadlines.HEALTH_REPLY_S,
            "connect to given servers": deadlines.CONNECT_S,
            "connect to owned servers": deadlines.OWNED_CONNECT_S,
        }
    )
    assert deadlines.REVIVE_FIRST_S < deadlines.REVIVE_MOST_S <= deadlines.HEALTH_EVERY_S


def test_a_server_stops_from_the_inside_out() -> None:
    assert_ordered(
        {
            "HTTP, twice": 2 * deadlines.HTTP_STOP_S,
            "and the zygotes": 2 * deadlines.HTTP_STOP_S + deadlines.ZYGOTE_STOP_S,
            "owner": deadlines.OWNED_STOP_S,
            "owner on another node": deadlines.REMOTE_STOP_S,
        }
    )
