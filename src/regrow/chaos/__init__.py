"""Faults on purpose, with ground truth and a score card: `regrow chaos`."""
