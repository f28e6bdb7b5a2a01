"""`rstar2 gpu-check`: does everything that a run on GPUs needs work on this machine?

    machine (what is measured) -> facts -> checks (what is right, why not, the way out) -> report

`checks.py` judges facts and touches no hardware; `real.py` and `probes.py` measure them.
"""
