"""The host's side of a launch: device facts, readable tensors, launching, and tapes of repeated calls."""
