"""The harness: times a step of several ranks under pytest-benchmark, and writes one record for each case and number of ranks."""
