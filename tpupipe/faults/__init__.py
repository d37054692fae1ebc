"""Named places where a run can be made to fail, inert unless a fault is asked for."""
