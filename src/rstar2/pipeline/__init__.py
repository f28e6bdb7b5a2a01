"""Training: the controller, its stages, checkpoints, progress views and ablations."""
