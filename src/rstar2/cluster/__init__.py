"""The same recipe on several machines, by Ray.

Ray places parts on nodes, supervises them and reports lost ones; data moves as on one machine:
tokens over HTTP, weights as files in the run directory, gradients over torch.distributed, tool
calls to one code environment per node.

    driver (rstar2 train): controller, scheduler, agent loops, record
      ├── EngineActor  x engine.count     an engine behind HTTP           engine_http.py, actors.py
      ├── RankActor    x learner.ranks    one FSDP2 rank                  learner.py, actors.py
      └── CodeEnvActor x nodes            a code environment              codeenv.py, actors.py
    placement.py (pure) decides where, ray_cluster.py holds it together, nodes.py talks to Ray

`ray_cluster.py` lists each failure and what follows. Nothing here is imported without a `cluster:`
section in the recipe.
"""
