"""From a source to a converted checkpoint on disk, proven and reported; merging adapters."""
