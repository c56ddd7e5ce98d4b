"""Entry point of `python -m offbeat`."""

from offbeat.cli import main

if __name__ == "__main__":  # worker processes import this module again
    main()
