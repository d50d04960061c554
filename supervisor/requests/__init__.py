"""Requests, from acceptance to their one end: who waits, who is served where, what is resumed. No I/O, no clock."""
