"""Measurements of the project, each held against its goal where it has one: `python -m benchmarks` lists them."""
