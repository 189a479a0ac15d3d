"""``python -m rabbitdlq``."""

from rabbitdlq.cli import main

main()
