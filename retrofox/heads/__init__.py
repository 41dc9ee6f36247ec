"""Single heads of a model: their attention, measured while it runs, and the half-lives that their gates start with."""
