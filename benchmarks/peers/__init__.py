"""What tpupipe is measured against."""
