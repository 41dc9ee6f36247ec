"""A few queries against a long cache: planning, kernels, the search for a horizon, appending to the cache."""
