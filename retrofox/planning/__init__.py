"""What a run needs before it runs: memory, time, disk, refusals."""
