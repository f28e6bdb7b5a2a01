"""Training: packs without padding, the GRPO and SFT steps, checkpoints, weights for engines."""
