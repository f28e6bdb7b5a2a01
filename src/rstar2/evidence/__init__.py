"""Claims that experiments settle: a file written in advance, runs, and a page with the verdict.

experiments/NAME.yaml ──> cells (arm x seed) ──> experiments/results/NAME/*.json
                                                      │
          docs/evidence/NAME.md <── verdict <── statistics by seed
"""
