"""A LLaMA trained on every mesh must learn what it learns on one rank: `nox -s train`."""
