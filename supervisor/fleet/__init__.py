"""The models that are served: their replicas, life on demand, reload. Puts requests, workers and placement together."""
