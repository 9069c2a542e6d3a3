"""Turn a Hugging Face folder into a Megatron checkpoint: the same as `slime-cua convert to-megatron`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from slime_cua.cli import main

if __name__ == "__main__":
    sys.exit(main(["convert", "to-megatron", *sys.argv[1:]]))
