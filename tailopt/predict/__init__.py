"""Predictors of output length: one file each; ``PREDICTORS`` maps names to them."""
