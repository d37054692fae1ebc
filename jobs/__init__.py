"""Jobs that come with tpupipe: each is a module with a ``build``; they use public names only."""
