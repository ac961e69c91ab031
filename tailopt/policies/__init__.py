"""Policies: one file each; ``POLICIES`` maps names to them."""
