"""Every timer of the code environment, in one place, with the order in which they expire.

Rule: an outer timer outlasts the inner ones. The innermost layer that notices a failure therefore
names it, and the layers around it only step in when that layer is itself stuck.
`tests/codeenv/test_deadlines.py` checks the order for the default configuration and for its caps.

    One call, after its caller's deadline (the caller itself is answered at the deadline):
      program's wall limit          cut to the deadline; the worker kills the program
      < worker                      answers at most TEARDOWN_S later, even if the kernel has not
                                    yet ended every process of the program
      < executor                    WORKER_GRACE_S later (session: SESSION_GRACE_S) kills a silent
                                    worker, then waits EXIT_REPORT_S to learn whether it ran out of
                                    memory
      < call table                  CALL_TABLE_GRACE_S later cancels the call
      < client, reading a batch     CLIENT_READ_GRACE_S later closes the connection
      < server, writing a batch     SERVER_WRITE_GRACE_S later drops a caller that does not read

    Start of a server that a client owns:
      worker is spawned             SPAWN_S, twice: forked, then confined and greeting
      < zygote is warm              ZYGOTE_WARM_UP_S
      < one self-check program      SELF_CHECK_WALL_S, repeated once
      < all self-checks             SELF_CHECK_S
      < owner                       OWNED_START_S, enough for two isolation levels
      < another node of a cluster   REMOTE_START_S

    Opening a session:  SESSION_ORDER_S < SESSION_REQUEST_S
    Call of a session:  SESSION_COPY_S (before its limits count), then as one call, and after a
                        success SESSION_STOP_S
    Health of a server: HTTP_CONNECT_S < HEALTH_REPLY_S < CONNECT_S < OWNED_CONNECT_S
    Stop of a server:   ZYGOTE_STOP_S + 2 HTTP_STOP_S < OWNED_STOP_S < REMOTE_STOP_S

Start-up timers only detect a hang: a process that dies is noticed at once through its socket, so
these bounds are generous enough for a machine with many more busy processes than cores.

This module imports nothing, so that all three packages can use it.
"""

# --------------------------------------------------------------------------- one call

DEFAULT_DEADLINE_S = 600.0
"""Deadline of a call whose caller set none: no wait is without a deadline."""
TEARDOWN_S = 1.0
"""The kernel may need long to end processes with many mappings. A worker waits this long for them,
then answers and asks to be replaced."""
WORKER_GRACE_S = 10.0
"""A worker that has not answered this long after a call's wall limit hangs and is killed. On a busy
machine one that ends many processes is late by seconds, and its call would run twice."""
EXIT_REPORT_S = 5.0
"""How long the executor waits for the zygote to report why a worker ended."""
SESSION_COPY_S = 10.0
"""The process of a session must have copied itself by then; only then its program starts."""
SESSION_STOP_S = 3.0
"""Every thread of a session's process must have stopped this long after the program's end."""
SESSION_GRACE_S = SESSION_COPY_S + SESSION_STOP_S + WORKER_GRACE_S
"""WORKER_GRACE_S of a session's worker, which copies before the program and stops after it."""
CALL_TABLE_GRACE_S = SESSION_GRACE_S + EXIT_REPORT_S + 1.0
"""Enough for a call of a session, whose timers are the longest."""
CLIENT_READ_GRACE_S = CALL_TABLE_GRACE_S + 1.0
SERVER_WRITE_GRACE_S = 60.0
COMMAND_QUEUE_S = 60.0
"""`rstar2 codeenv run` allows this for the queue, in addition to the program's own limit."""
BODY_READ_S = 60.0
"""A caller must have sent the whole body of a request by then."""

# --------------------------------------------------------------------------- connections

HEADER_READ_S = 20.0
"""A caller must have sent the whole head of a request this long after its first byte."""
KEEP_ALIVE_S = 75.0
"""A connection without a request is closed after this time."""
IDLE_CONNECTION_S = KEEP_ALIVE_S / 2
"""A client does not send another request over a connection that was idle for longer."""
UNREAD_S = 60.0
"""A caller that has not read on for this long is disconnected, also while a call of it runs."""
UNREAD_AT_BOUND_S = 10.0
"""The same if another caller needs the connection."""
ACCEPT_RETRY_S = 0.5
ACCEPT_WARNING_S = 60.0
"""How often the server tries, and how often it logs, while it cannot accept connections."""

# --------------------------------------------------------------------------- start

SPAWN_S = 30.0
ZYGOTE_WARM_UP_S = 180.0
SELF_CHECK_WALL_S = 60.0
SELF_CHECK_S = 240.0
OWNED_START_S = 2 * (ZYGOTE_WARM_UP_S + SELF_CHECK_S) + 60.0
REMOTE_START_S = OWNED_START_S + 60.0

# --------------------------------------------------------------------------- sessions

SESSION_ORDER_S = 20.0
"""A session worker must have opened, branched or closed an interpreter by then."""
SESSION_REQUEST_S = 2 * SPAWN_S + SESSION_ORDER_S + SESSION_GRACE_S + 7.0

# --------------------------------------------------------------------------- health

HTTP_CONNECT_S = 5.0
HEALTH_EVERY_S = 2.0
HEALTH_REPLY_S = 10.0
CONNECT_S = 15.0
"""A client that was given URLs gives up when no server has answered by then."""
OWNED_CONNECT_S = 60.0
"""The same for servers that the client has just started: they are known to be up."""
REVIVE_FIRST_S, REVIVE_MOST_S = 0.05, 2.0
"""Pause between two attempts to revive a server or a zygote: doubled after each failure."""
ZYGOTE_STABLE_S = 30.0
"""A zygote that ran for this long, its warm-up included, is restarted without a pause."""

# --------------------------------------------------------------------------- stop

DRAIN_S = 10.0
"""Running calls may finish for this long after the first signal."""
ZYGOTE_STOP_S = 10.0
HTTP_STOP_S = 2.0
OWNER_POLL_S = 1.0
"""How often an owned server checks that its parent is still the same process."""
OWNED_STOP_S = 20.0
REMOTE_STOP_S = 30.0
