"""Keys of clients that connect over TCP: their rights and their limits."""
