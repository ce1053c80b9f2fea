"""Test settings for `tests/` and for the examples in the docstrings of `src/`.

Every test runs under strict dtype promotion and with rank promotion forbidden, and every
warning is an error (pyproject.toml). MuJoCo Playground passes none of the three, so tests
marked `playground` run without them, and are skipped where it is not installed. So do tests
marked `adapters`, which run environments of other libraries. Tests marked `exact` compare bit by
bit what two programs compute; they run in a process that compiles with more care.
"""

import importlib.metadata
import importlib.util
import itertools
import os
import tempfile
from collections.abc import Callable, Iterator

# JAX reads these when it is first imported.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault(
    "JAX_COMPILATION_CACHE_DIR", os.path.join(tempfile.gettempdir(), "eqx-ppo-jax-cache")
)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
# Most of the time of this suite is compilation; code that is compiled with less care is as right.
# The last flag halves it; other versions of XLA do not know it.
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    + " --xla_cpu_use_fusion_emitters=false"
    * importlib.metadata.version("jaxlib").startswith("0.10."),
)

import jax
import pytest
from jaxtyping import PRNGKeyArray

pytest.register_assert_rewrite("tests.helpers")

_IS_ROUGH = "--xla_cpu_use_fusion_emitters=false" in os.environ["XLA_FLAGS"]


def _is_lenient(node: pytest.Item) -> bool:
    markers = (node.get_closest_marker(name) for name in ("playground", "adapters"))
    return any(marker is not None for marker in markers)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    installed = importlib.util.find_spec("mujoco_playground") is not None
    for item in items:
        if _is_lenient(item):
            item.add_marker(pytest.mark.filterwarnings("default"))
        if item.get_closest_marker("playground") is not None and not installed:
            item.add_marker(pytest.mark.skip(reason="needs the extra `playground`"))
        if _IS_ROUGH and item.get_closest_marker("exact") is not None:
            item.add_marker(pytest.mark.skip(reason="runs by way of tests/test_exact.py"))


@pytest.fixture(autouse=True)
def strict_promotion(request: pytest.FixtureRequest) -> Iterator[None]:
    if _is_lenient(request.node):
        yield
        return
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        yield


@pytest.fixture(scope="module", autouse=True)
def bounded_memory() -> Iterator[None]:
    """Drops what a module has compiled; a whole session would hold several GB of it."""
    yield
    jax.clear_caches()


@pytest.fixture
def getkey() -> Callable[[], PRNGKeyArray]:
    """A function that returns a new PRNG key at every call, the same ones in every run."""
    count = itertools.count()
    return lambda: jax.random.fold_in(jax.random.key(2024), next(count))
