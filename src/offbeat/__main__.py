"""`python -m offbeat`."""

from offbeat.cli import main

if __name__ == "__main__":  # the launcher's new processes import this module again
    main()
