"""Kernels refuse counts of units by row that do not fit the rows or the block."""

import numpy as np
import pytest

from tests.kernels.refusing import refuse
from tests.kernels.switching import needs_native
from tests.kernels.test_refusals import BLOCK, I32, LIVE, NEURONS, X, formats, outwards

# X has four rows, the block 20 units.
BY_ROW = {
    "more than of any row": [[1, 9, 0], [1, 9, 0], [1, 10, 0], [1, 9, 0], [1, 9, 0]],
    "fewer than none": [[1, 9, 0], [1, 9, 0], [1, 9, 0], [1, 9, 0], [1, -1, 0]],
    "of three rows": [[1, 9, 0]] * 4,
    "of five rows": [[1, 9, 0]] * 6,
    "of no neurons": [[1]] * 5,
}


@needs_native
@pytest.mark.parametrize("counts", BY_ROW.values(), ids=BY_ROW)
def test_counts_of_each_row(counts):
    operands, at = outwards(*BLOCK), {"units_at": np.int64(1)}
    for each in (np.array(counts, I32), np.array([[[1, 9, 0]] * 5], I32)):
        operands[1] = each
        refuse("a count is", "feed_forward", X, [X, LIVE], operands, **formats(), **(NEURONS | at))
