"""The verbs of the command line, one file each; `cli.py` imports the one that is asked for."""
