"""The Ray calls that rstar2 uses: join or start a cluster, list nodes, create and kill actors.

Calls that may block run in threads, so the driver's event loop never waits for Ray; every wait has
a deadline and a name. Ray is imported only inside the functions that need it.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

from rstar2.cluster.placement import Node, Place
from rstar2.engine.make import device_names
from rstar2.errors import DeadlineError, InfrastructureError, UserError

T = TypeVar("T")


class NodeError(InfrastructureError):
    """A node or an actor on it was lost."""


def connect(address: str | None, *, cpus: float) -> None:
    """Join a running cluster, or start one on this machine that ends with this process."""
    try:
        import ray
    except ImportError as error:
        raise UserError(
            "a recipe with a cluster: section needs Ray: pip install 'rstar2[ray]'"
        ) from error
    if ray.is_initialized():
        return
    options: dict[str, Any] = {
        "log_to_driver": False,
        "logging_level": logging.ERROR,
        "include_dashboard": False,
    }
    if address is None:
        os.environ.setdefault("RAY_worker_niceness", "0")  # actors are no background jobs
        # Parts share the cores of one machine: Ray must admit them even if there are too few.
        options["num_cpus"] = max(os.cpu_count() or 1, int(-(-cpus // 1)))
    else:
        options = {"address": address, "log_to_driver": False, "logging_level": logging.ERROR}
    try:
        ray.init(**options)
    except (ConnectionError, RuntimeError, ValueError) as error:
        where = address or "this machine"
        raise UserError(f"could not join or start a Ray cluster at {where}: {error}") from error


def disconnect() -> None:
    """Disconnect from the cluster; Ray ends the actors of this driver."""
    import ray

    ray.shutdown()


def list_nodes() -> tuple[Node, ...]:
    """Alive nodes, sorted by id; NodeError if Ray cannot list them."""
    import ray
    from ray.exceptions import RayError

    try:
        entries = ray.nodes()
    except (RayError, RuntimeError, OSError) as error:
        raise NodeError(f"Ray cannot list its nodes: {_first_line(error)}") from error
    alive = []
    for entry in entries:
        if entry["Alive"]:
            resources = entry["Resources"]
            alive.append(
                Node(
                    id=entry["NodeID"],
                    address=entry["NodeManagerAddress"],
                    cpus=float(resources.get("CPU", 0.0)),
                    gpus=int(resources.get("GPU", 0)),
                )
            )
    return tuple(sorted(alive, key=lambda node: node.id))


def make_actor(
    kind: type, place: Place, cpus: float, *args: Any, groups: Mapping[str, int] | None = None
) -> Any:
    """Create an actor on a given node and no other; returns before the actor is alive.

    The ledger assigns GPUs (`Place.gpus`), so only CPUs are requested from Ray. `groups` are
    threads by name, for calls that must not wait for others.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    options: dict[str, Any] = {
        "num_cpus": cpus,
        "max_restarts": 0,
        "max_task_retries": 0,
        "scheduling_strategy": NodeAffinitySchedulingStrategy(place.node.id, soft=False),
    }
    remote = ray.remote(concurrency_groups=dict(groups)) if groups else ray.remote
    return remote(kind).options(**options).remote(*args)


async def answer(reference: Awaitable[T], what: str, deadline_s: float) -> T:
    """Await an actor's result; NodeError if it died. Errors of rstar2 are raised unchanged."""
    from ray.exceptions import RayError, RayTaskError

    try:
        async with asyncio.timeout(deadline_s):
            return await reference
    except TimeoutError as error:
        raise DeadlineError(f"{what}: no answer within {deadline_s:g} s") from error
    except RayTaskError as error:
        cause = error.cause
        if isinstance(cause, InfrastructureError | UserError):
            raise cause from None
        raise NodeError(f"{what}: {error}") from error
    except RayError as error:
        raise NodeError(f"{what}: {type(error).__name__}: {_first_line(error)}") from error


def kill(actor: Any) -> None:
    """Kill an actor's process; a no-op if it has ended."""
    import ray
    from ray.exceptions import RayError

    try:
        ray.kill(actor, no_restart=True)
    except (RayError, ValueError) as error:
        logging.getLogger(__name__).info("the actor had already ended: %s", error)


def on_every_node(function: Callable[..., T], *args: Any, deadline_s: float) -> dict[str, T | str]:
    """Run a function on every alive node; returns its result or error text by node address."""
    import ray
    from ray.exceptions import RayError
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    references = {}
    for node in list_nodes():
        strategy = NodeAffinitySchedulingStrategy(node.id, soft=False)
        task = ray.remote(function).options(num_cpus=0, scheduling_strategy=strategy)
        references[f"{node.address} ({node.id[:6]})"] = task.remote(*args)
    answers: dict[str, T | str] = {}
    for name, reference in references.items():
        try:
            answers[name] = ray.get(reference, timeout=deadline_s)
        except RayError as error:
            answers[name] = f"{type(error).__name__}: {_first_line(error)}"
    return answers


def visible(
    gpus: tuple[int, ...], environment: Mapping[str, str] = os.environ
) -> Mapping[str, str]:
    """Environment variables that limit a process to the given GPUs of those that its node has.

    A node that was started with CUDA_VISIBLE_DEVICES has only the GPUs listed there.
    """
    if not gpus:
        return {}
    names = device_names(max(gpus) + 1, environment.get("CUDA_VISIBLE_DEVICES"))
    if max(gpus) >= len(names):
        raise NodeError(f"GPU {max(gpus)} was assigned, but CUDA_VISIBLE_DEVICES lists {names}")
    listed = ",".join(names[number] for number in gpus)
    return {"CUDA_VISIBLE_DEVICES": listed, "HIP_VISIBLE_DEVICES": listed}


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]
