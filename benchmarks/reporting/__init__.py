"""What records say, for people: tables, plots, a page, change points over commits, and one step as a timeline."""
