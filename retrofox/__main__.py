"""`python -m retrofox` and `accelerate launch -m retrofox`."""

from retrofox.cli import main

if __name__ == "__main__":
    main()
