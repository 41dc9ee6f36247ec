"""Shared by several kernels: blocks of scores, sums of gates, edges of documents, horizons, first weights."""
