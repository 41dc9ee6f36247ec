"""The forward and the backward in plain Triton, for every GPU from Ampere on."""
