"""What a trainer's rank imports. The server of warm_ranks.py imports this module and forks ranks from there."""

import os
from pathlib import Path

os.environ["JE_ARROW_MALLOC_CONF"] = "background_thread:false"  # pyarrow's allocator would start a thread

from slime_cua.core.startup import heavy_imports

with (
    heavy_imports()
):  # a rank that collected garbage would also write to every object of the server, and so copy its memory
    import megatron_patches
    import slime_cua.trainer.group
    import slime_cua.trainer.rank  # noqa: F401

    megatron_patches.apply()
assert len(list(Path("/proc/self/task").iterdir())) == 1, "a thread does not survive a fork, its locks do"
