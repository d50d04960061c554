"""Who may connect over TCP, and what they may do there: keys, their rights and their limits."""
