"""Provide what tests compare with: a float64 reference, drawn problems, an imitated device."""
