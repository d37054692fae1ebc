"""Drills: a job is run undisturbed and once per forced failure, and the results must be the same."""
