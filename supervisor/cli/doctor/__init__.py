"""What ``modelctl doctor`` looks at. Modules read facts, each within a deadline, and pure functions judge them."""
