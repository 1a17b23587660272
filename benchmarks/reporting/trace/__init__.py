"""One step of a transformer block as a timeline with all ranks side by side: `nox -s trace`, then open trace.json in Perfetto."""
