"""Measurements against plain Ray and against a loop with nothing around it. See README.md."""
