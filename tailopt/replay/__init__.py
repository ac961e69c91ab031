"""Replay: carry out plans on real engines, record what happens, and say why it was not what was predicted."""
