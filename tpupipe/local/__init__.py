"""Things that run on this machine only: the embedded object server and the process that minds it."""
