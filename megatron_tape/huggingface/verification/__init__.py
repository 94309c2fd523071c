"""Verification that a model computes the same positions in training and in an inference engine."""
