"""The rollout simulator: the real scheduler over modelled engines, by discrete events."""
