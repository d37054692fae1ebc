"""What happened and how long it took: events from every process, and what they add up to."""
