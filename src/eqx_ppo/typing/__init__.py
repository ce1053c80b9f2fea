"""Shape contracts for code of your own: aliases to annotate with, and what checks them."""

from eqx_ppo._checks import set_shape_checks as set_shape_checks, shape_checked as shape_checked
from eqx_ppo._typing import (
    Batch as Batch,
    BatchTree as BatchTree,
    Extras as Extras,
    Metrics as Metrics,
    State as State,
    TimeBatch as TimeBatch,
    TimeBatchTree as TimeBatchTree,
    Tree as Tree,
)
