"""Turns one TPInference into RayClusters and Services; never imports torch or ray."""
