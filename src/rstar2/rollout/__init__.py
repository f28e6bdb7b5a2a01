"""Rollouts: the scheduler (pure), the fleet of engines that it drives, groups and steps."""
