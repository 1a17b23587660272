"""What every study shares: one way to run a command, to keep lines, and to write a report."""
