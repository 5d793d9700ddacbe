#!/usr/bin/env python3
"""The door for a checkout: `python cli.py ...` is `surgery ...`. Not installed."""

from surgery.cli import main

if __name__ == "__main__":
    main()
