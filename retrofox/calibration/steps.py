"""How long a calibration fits. Imports nothing: the command line shows it in its help."""

STEPS = 200
"""Adam steps per layer where none are asked for, in Python, in recipes and on the command line."""
