import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))  # tests import `processes` from here, in this process and its children


@pytest.fixture(autouse=True)
def _same_numbers_every_time():
    """Random inputs are those of one seed, whatever ran before; sums are those of one thread."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
