"""Metrics for Prometheus, made of the supervisor's answers to ``status`` and ``metrics``.

The gateway serves them under /metrics, and ``modelctl metrics`` without a gateway. The supervisor itself only keeps
counters. This package is imported by both, and imports neither.
"""
