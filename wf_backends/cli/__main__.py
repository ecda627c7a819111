"""`python -m wf_backends.cli`: the console script without installing it."""

from wf_backends.cli import main

main()
