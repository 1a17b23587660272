"""Tests that need transformers: `nox -s hf` runs them."""
