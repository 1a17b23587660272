"""Adapt models of other libraries, which are needed only when an adapter is used."""
