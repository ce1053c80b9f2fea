"""Saving training states and restoring them."""

from eqx_ppo.training._checkpoint._checkpointer import (
    Checkpointer as Checkpointer,
    restore_network as restore_network,
)
from eqx_ppo.training._checkpoint._errors import (
    CheckpointError as CheckpointError,
    DamagedCheckpointError as DamagedCheckpointError,
    StructureMismatchError as StructureMismatchError,
)
from eqx_ppo.training._checkpoint._metadata import (
    CheckpointMetadata as CheckpointMetadata,
    RunRecord as RunRecord,
    describe_environment as describe_environment,
)
from eqx_ppo.training._checkpoint._store import unfinished_saves as unfinished_saves
from eqx_ppo.training._checkpoint._template import (
    NetworkTemplate as NetworkTemplate,
    StateTemplate as StateTemplate,
    state_paths as state_paths,
)
