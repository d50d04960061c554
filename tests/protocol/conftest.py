from hypothesis import HealthCheck, settings

# how long an example takes says something about the machine, not about the code
settings.register_profile("protocol", deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=100)
settings.load_profile("protocol")
