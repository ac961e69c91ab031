"""Engines: step time, profiles and the bundled catalogue of measured engines."""
