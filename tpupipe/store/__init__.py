"""One door to storage: names, atomic creation, checksums, retries, time-outs, ownership."""
