"""What a job has compiled: its meshes, placements, shapes and jitted functions.

Shared by the stages, which run the programs, and by ``preflight``, which only compiles them: what is checked is what
runs. No Ray here; JAX is imported inside functions.
"""
