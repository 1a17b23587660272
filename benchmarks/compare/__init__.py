"""Whether a commit made a case slower: randomised pairs of launches of base and head, and a rule that anyone can recompute.

`rule` decides about plain numbers; `pairs` gets those out of records; `sides`, `running` make the
records; `recompute` checks.
"""
