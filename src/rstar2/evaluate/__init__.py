"""Evaluation: rollouts on held-out problems, scores with confidence intervals, comparisons."""
