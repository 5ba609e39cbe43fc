"""Run a script as every rank of a job would, all on the first card: ``torchrun one_card.py script.py arguments``."""

import os
import runpy
import sys

os.environ["LOCAL_RANK"] = "0"
sys.argv = sys.argv[1:]
sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
runpy.run_path(sys.argv[0], run_name="__main__")
