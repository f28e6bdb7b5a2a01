"""A Ray cluster of two nodes on this machine, in a separate process.

    python two_nodes.py        prints its address, then runs commands from stdin: remove, add, quit

Every command is answered by one line. The nodes end with this process.
"""

from __future__ import annotations

import os
import sys
from typing import Any

os.environ.setdefault("RAY_worker_niceness", "0")  # read by the nodes that start here

from ray.cluster_utils import Cluster

TRIES = 4
CPUS = 4


def with_retries(start: Any) -> Any:
    """Start nodes with retries: Ray allows 30 s per node, too little on a busy machine."""
    for attempt in range(1, TRIES + 1):
        try:
            return start()
        except Exception as error:  # noqa: BLE001 - Ray raises Exception itself
            print(f"try {attempt}: {error}", file=sys.stderr)
    raise SystemExit("the nodes could not be started")


def main() -> None:
    head = {"num_cpus": CPUS, "include_dashboard": False}
    cluster = with_retries(lambda: Cluster(initialize_head=True, head_node_args=head))
    second = with_retries(lambda: cluster.add_node(num_cpus=CPUS))
    print(cluster.address, flush=True)
    for line in sys.stdin:
        if line.strip() == "remove":
            cluster.remove_node(second, allow_graceful=False)
        elif line.strip() == "add":
            second = with_retries(lambda: cluster.add_node(num_cpus=CPUS))
        else:
            break
        print("done", flush=True)
    cluster.shutdown()


if __name__ == "__main__":
    main()
