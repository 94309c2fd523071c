"""Runs of the project's own training on GPUs and with ranks that do not exist. A process of its own for each layout."""
