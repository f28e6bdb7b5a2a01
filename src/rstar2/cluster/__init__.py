"""The same recipe on several machines, by Ray.

Ray places parts on nodes, supervises them and tells when one is gone; data goes as on one machine:
tokens over HTTP, weights as files in the run directory, gradients over torch.distributed, tool
calls to one code environment per node.

    driver (rstar2 train): controller, scheduler, agent loops, record
      ├── EngineHost  x engine.count     an engine behind HTTP           engine_http.py, hosts.py
      ├── RankHost    x learner.ranks    one FSDP2 rank                  learner.py, hosts.py
      └── CodeEnvHost x nodes            a code environment              codeenv.py, hosts.py
    placement.py (pure) decides where, site.py holds it together, nodes.py talks to Ray

What each failure comes to is drawn in `site.py`. Nothing here is imported without a `cluster:`
section in the recipe.
"""
