"""`python -m miles_tito` is the console script."""

from .cli import main

raise SystemExit(main())
