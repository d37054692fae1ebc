"""Each stage kind turns one declaration into Ray calls."""
