"""Runs a recipe on several machines with Ray.

Ray starts the parts of a run on nodes and reports lost ones. Data moves as on one machine: tokens
over HTTP, weights as files in the memory of each node, gradients over torch.distributed, tool calls
to one code environment per node.

    driver (rstar2 train): controller, scheduler, agent loops, record
      ├── EngineActor  x engine.count     an engine behind HTTP           engine_http.py, actors.py
      ├── RankActor    x learner.ranks    one FSDP2 rank                  learner.py, actors.py
      └── CodeEnvActor x nodes            a code environment              codeenv.py, actors.py
    placement.py (pure) assigns nodes, ray_cluster.py supervises the parts, nodes.py calls Ray

`ray_cluster.py` lists each fault with its detection and recovery. This package is imported only if
the recipe has a `cluster:` section.
"""
