"""Tests that need Chromium: `nox -s pages` runs them."""
