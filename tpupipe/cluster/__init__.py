"""What a run stands on: a Ray cluster, real or faked, and the slice held in it."""
