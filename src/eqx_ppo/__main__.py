"""`python -m eqx_ppo`: the command line."""

import sys

from eqx_ppo.training._cli import main

if __name__ == "__main__":
    sys.exit(main())
