"""When to save, how to save so that a commit is a fact, and what to restore."""
