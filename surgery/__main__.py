"""`python -m surgery` is `surgery`."""

from surgery.cli import main

main()
