"""Command-line tools for data and models; installed as `pretrain.tools` (see setup.py)."""
