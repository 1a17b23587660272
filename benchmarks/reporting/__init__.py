"""Show records to people: tables, plots, a page, changes over commits, and a timeline."""
