"""Call functions that a person wrote from the event loop, without blocking it.

An async function runs on the event loop. A plain function runs in a daemon thread of its own: the
caller can stop waiting for it at a deadline, and a thread that hangs does not delay the exit of the
process.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable
from typing import Any


async def call_function(
    function: Callable[..., Any],
    *args: Any,
    on_abandoned: Callable[[threading.Thread], None] = lambda thread: None,
    **kwargs: Any,
) -> Any:
    """The result of a plain or async function; raises what it raises.

    If this call is cancelled, the thread of a plain function runs on, and `on_abandoned` gets it.
    """
    if inspect.iscoroutinefunction(function):
        return await function(*args, **kwargs)
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def finish(value: Any, error: BaseException | None) -> None:
        if future.done():
            return
        if error is None:
            future.set_result(value)
        else:
            future.set_exception(error)

    def work() -> None:
        value: Any = None
        raised: BaseException | None = None
        try:
            value = function(*args, **kwargs)
        except StopIteration as error:  # a future refuses it
            raised = RuntimeError(f"StopIteration: {error}").with_traceback(error.__traceback__)
        except BaseException as error:  # noqa: BLE001 - raised where it is awaited
            raised = error
        if not loop.is_closed():
            loop.call_soon_threadsafe(finish, value, raised)

    thread = threading.Thread(target=work, name=f"call of {function!r}", daemon=True)
    thread.start()
    try:
        value = await future
    except asyncio.CancelledError:
        on_abandoned(thread)
        raise
    return await value if inspect.isawaitable(value) else value
