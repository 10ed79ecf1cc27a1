"""`python -m processor`"""

from processor.cli.main import main

main()
