"""What several benchmarks share: rigs, loads, figures, goals, provenance."""
