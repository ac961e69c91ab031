"""Certified optima: lower bounds, plans that attain upper bounds, and an independent checker."""
