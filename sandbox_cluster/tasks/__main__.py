"""`python -m sandbox_cluster.tasks`: see cli."""

import sys

from sandbox_cluster.tasks.cli import main

sys.exit(main())
