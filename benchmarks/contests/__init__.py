"""Contests: contestants share processes and take turns, and ratios of their times are judged."""
