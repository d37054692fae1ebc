"""What can be known before a slice is paid for."""
