"""Data: inputs to work units, a sample of them, committed chunks, and the order they are trained on.

``sources`` and ``buckets`` are declarations and import the standard library only, because a
job module imports them; the other files load numpy and pyarrow.
"""
