"""Requests, from acceptance to their one terminal event: queues, choice of a worker, resumes. No I/O, no clock."""
