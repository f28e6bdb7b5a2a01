"""Training: the controller, its stages, checkpoints and progress views."""
