"""`python -m tandem` is the `tandem` command."""

from cli.main import main

main()
