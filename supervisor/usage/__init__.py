"""Count tokens by key, model and day, and keep the counts on disk."""
