"""Decide whether a commit made a case slower, by random pairs of launches of base and head.

`rule` decides from plain numbers, `pairs` takes these from records, and `command` measures.
"""
