"""How evenly sequences of unequal length keep ranks busy, by policy; and how long the stages of a pipeline do nothing."""
