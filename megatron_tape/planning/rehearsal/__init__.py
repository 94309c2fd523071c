"""Rehearsals: the project's own training on fake GPUs, as one of many fake ranks. A process rehearses one layout."""
