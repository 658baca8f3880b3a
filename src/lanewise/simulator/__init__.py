"""A run as events: a pipeline's order and timeline, and days of failures, checkpoints and stragglers. No torch."""
