"""Rollouts: who runs where (pure), the fleet that does it, groups of one step."""
