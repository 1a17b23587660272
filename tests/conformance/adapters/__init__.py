"""How each library is called. A module of another library imports torch and that library alone: it is pasted into scripts."""
