"""Decide whether a commit made a case slower, by random pairs of launches of base and head.

`rule` decides about plain numbers; `pairs` gets those out of records; `sides` makes the records.
"""
