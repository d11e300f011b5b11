"""`python -m miles_weightsync`."""

import sys

from .cli import main

sys.exit(main())
