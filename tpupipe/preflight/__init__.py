"""What is looked at before anything is reserved: pure judgements, and the little that they need to know."""
