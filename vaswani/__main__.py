"""`python -m vaswani` is the command `vaswani`."""

from .commands.main import main

if __name__ == "__main__":
    main()
