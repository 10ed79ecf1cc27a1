"""`python -m processor`"""

from processor.cli import main

main()
