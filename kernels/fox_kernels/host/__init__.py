"""The host's side of a launch: facts about devices, strides that kernels can read, launching."""
