"""Adapters for models of other libraries. Importing one of them needs no other library."""
