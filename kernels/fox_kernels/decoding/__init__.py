"""A few queries against a long cache: planning, kernels, the search for pruned keys, appending to the cache."""
