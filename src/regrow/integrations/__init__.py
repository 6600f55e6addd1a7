"""Bridges to the launchers and trainers that people already use."""
