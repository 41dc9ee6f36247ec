"""`retrofox report`: everything that is measured of a model, on one page."""
