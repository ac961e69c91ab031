"""Hypothesis profiles: "ci" (the default) repeats its examples, "nightly" draws ten times as many."""

import os

from hypothesis import HealthCheck, settings

COMMON = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large]}
settings.register_profile("ci", max_examples=200, derandomize=True, **COMMON)
settings.register_profile("nightly", max_examples=2000, **COMMON)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))
