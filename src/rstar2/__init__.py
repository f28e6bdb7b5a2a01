"""rstar2: train language models to reason with a Python tool, by agentic reinforcement learning."""

__version__ = "0.2.0"
