"""`python -m sglang.launch_server --model-path ...`: Ebbtide's server, with Ebbtide's arguments."""

import sys

from ebbtide.launch_server import main

if __name__ == "__main__":
    sys.exit(main(prog="python -m sglang.launch_server"))
