"""Single heads of a model: their attention, watched while it runs, and where their gates start."""
