"""The contract and the layers that are built on it."""

from eqx_ppo.networks._adapter import PPOAdapter as PPOAdapter, PPONetworkOutput as PPONetworkOutput
from eqx_ppo.networks._by_key import Concat as Concat, Map as Map, Merge as Merge
from eqx_ppo.networks._conformance import check_module as check_module
from eqx_ppo.networks._container import Call as Call, Container as Container
from eqx_ppo.networks._delay import Delay as Delay, DelayState as DelayState
from eqx_ppo.networks._dense import Dense as Dense
from eqx_ppo.networks._errors import at_path as at_path, check_lead as check_lead
from eqx_ppo.networks._factories import (
    make_mlp as make_mlp,
    make_mlp_actor_critic as make_mlp_actor_critic,
    make_mlp_layers as make_mlp_layers,
    make_recurrent_actor_critic as make_recurrent_actor_critic,
)
from eqx_ppo.networks._frozen import (
    Constant as Constant,
    Frozen as Frozen,
    Statistics as Statistics,
    trainable as trainable,
)
from eqx_ppo.networks._graph import (
    GraphBuilder as GraphBuilder,
    PopulationGraph as PopulationGraph,
)
from eqx_ppo.networks._lift import Lift as Lift
from eqx_ppo.networks._module import (
    RandomModule as RandomModule,
    RandomState as RandomState,
    StatefulModule as StatefulModule,
    StatefulModuleOutput as StatefulModuleOutput,
    StatelessModule as StatelessModule,
    advance as advance,
    draw_keys as draw_keys,
)
from eqx_ppo.networks._normalizer import (
    Normalizer as Normalizer,
    NormalizerStatistics as NormalizerStatistics,
)
from eqx_ppo.networks._parallel import Parallel as Parallel
from eqx_ppo.networks._populations import Connection as Connection, Population as Population
from eqx_ppo.networks._rearrange import (
    Filter as Filter,
    Flattener as Flattener,
    Selector as Selector,
    Splitter as Splitter,
)
from eqx_ppo.networks._recurrent import (
    GRU as GRU,
    LSTM as LSTM,
    LSTMState as LSTMState,
    RecurrentLayer as RecurrentLayer,
)
from eqx_ppo.networks._samplers import (
    ActionDistribution as ActionDistribution,
    ActionSampler as ActionSampler,
    AffineSampler as AffineSampler,
    BetaSampler as BetaSampler,
    CategoricalSampler as CategoricalSampler,
    MaskedLogits as MaskedLogits,
    MultiCategoricalSampler as MultiCategoricalSampler,
    NormalSampler as NormalSampler,
    NormalTanhSampler as NormalTanhSampler,
    Sample as Sample,
)
from eqx_ppo.networks._scale import Scale as Scale
from eqx_ppo.networks._sequential import Sequential as Sequential
from eqx_ppo.networks._summary import (
    ModuleSummary as ModuleSummary,
    Summary as Summary,
    summarize as summarize,
)
from eqx_ppo.networks._variational import (
    AR1State as AR1State,
    AR1VariationalBottleneck as AR1VariationalBottleneck,
    VariationalBottleneck as VariationalBottleneck,
)
