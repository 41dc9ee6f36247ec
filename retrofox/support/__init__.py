"""Reports, plots, files that appear whole, processes and signals."""
