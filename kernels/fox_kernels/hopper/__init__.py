"""The forward and the backward in Gluon, for Hopper."""
