"""AllGather between ranks that share a GPU, over every transport: `python -m benchmarks.gpu_table`."""
