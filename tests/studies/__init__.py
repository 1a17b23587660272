"""Share between studies one way to run a command, to keep lines, and to write a report."""
