"""The cases: collectives, schemes, layers and a small LLaMA, timed under pytest-benchmark."""
