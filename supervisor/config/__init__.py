"""models.yaml and what it becomes: reading, checking, and the folders whose models it takes in."""
