"""GPUs and their memory: what a model needs, where it goes, who has to make room, when memory has come back."""
