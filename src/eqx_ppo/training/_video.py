"""Videos of a policy, for environments that can draw themselves."""

import contextlib
import ctypes.util
import dataclasses
import io
import itertools
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias, final

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import UInt8

from eqx_ppo._checks import typed
from eqx_ppo._typing import EnvState
from eqx_ppo.algorithms import Recording, TrainingState, record_rollout
from eqx_ppo.envs import Env, SupportsRender, find_renderer
from eqx_ppo.networks import StatefulModule

_CHUNK = 200  # pictures in memory at a time, or fewer where they are large
_CHUNK_PIXELS = _CHUNK * 1280 * 720
_MAX_SIZE = 8192
_MAX_SEED = 2**32 - 1
_FORMATS = ("mp4", "gif")

_Frame: TypeAlias = UInt8[np.ndarray, "height width 3"]


@final
@dataclasses.dataclass(frozen=True, kw_only=True)
class VideoConfig:
    """Parameters of a video.

    **Arguments:**

    - `every_steps`: make a video in training when it has passed another multiple of this many
        environment steps, together with the next checkpoint; `None` for no videos.
    - `n_episodes`: one after another.
    - `max_steps`: steps of the environment in all; the video ends with them.
    - `deterministic`: act by the mode of the policy instead of sampling.
    - `seed`: of the episodes, at least 0 and below 2**32; the same seed gives the same video.
    - `width`, `height`: of the pictures in pixels, even numbers from 16 to 8192.
    - `camera`: the name of a view of the environment; its own choice by default.
    - `max_fps`: most pictures per second. Time runs as in the environment; states are left out
        where it has more of them.
    - `format`: `"mp4"` or `"gif"`.

    **Raises:** `ValueError` for numbers out of range, `TypeError` for another camera than a
    name.
    """

    every_steps: int | None = None
    n_episodes: int = 1
    max_steps: int = 1000
    deterministic: bool = True
    seed: int = 0
    width: int = 640
    height: int = 480
    camera: str | None = None
    max_fps: int = 50
    format: Literal["mp4", "gif"] = "mp4"

    def __post_init__(self) -> None:
        at_least = {"every_steps": 1, "n_episodes": 1, "max_steps": 1, "seed": 0, "max_fps": 1}
        at_most = {"seed": _MAX_SEED, "width": _MAX_SIZE, "height": _MAX_SIZE}
        for name, least in {**at_least, "width": 16, "height": 16}.items():
            value = vars(self)[name]
            if value is None and name == "every_steps":
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(
                    f"`VideoConfig.{name}` must be an int of at least {least}, but got {value!r}."
                )
            if value > at_most.get(name, value):
                raise ValueError(
                    f"`VideoConfig.{name}` must be at most {at_most[name]}, but got {value}."
                )
        for name in ("width", "height"):
            if vars(self)[name] % 2:
                raise ValueError(
                    f"`VideoConfig.{name}` must be even, as videos need it, but got "
                    f"{vars(self)[name]}."
                )
        if not isinstance(self.camera, str | None):
            raise TypeError(
                f"`VideoConfig.camera` must be a name or `None`, but got {self.camera!r}."
            )
        if self.format not in _FORMATS:
            raise ValueError(
                f"`VideoConfig.format` must be one of {_FORMATS}, but got {self.format!r}."
            )


class Video(NamedTuple):
    """What `record_video` made.

    - `path`: of the file.
    - `n_frames`, `fps`: pictures, and how many of them are shown per second.
    - `returns`, `lengths`: of the episodes that it shows, the last of which may not have
        ended. Rewards of several kinds are added up.
    """

    path: Path
    n_frames: int
    fps: float
    returns: list[float]
    lengths: list[int]


@typed
def record_video(
    env: Env, network: StatefulModule, path: str | Path, config: VideoConfig | None = None
) -> Video:
    """Makes a video of a policy.

    Each picture shows a state that the network acted in. The environment's own `render` draws
    them (see `SupportsRender`), below all wrappers.

    MuJoCo draws without a screen by EGL or OSMesa: set the environment variable `MUJOCO_GL` to
    `egl` or `osmesa` before it is first imported.

    **Arguments:**

    - `env`: to act in; the one to evaluate in, with its own rewards.
    - `network`: outputs a `PPONetworkOutput`.
    - `path`: the file to write, `.mp4` or `.gif`. It appears when it is complete.
    - `config`: `VideoConfig()` by default.

    **Raises:** `TypeError` if the environment cannot be drawn, `ValueError` for another kind of
    file, `ImportError` without the extra `video`, `RuntimeError` if drawing fails.
    """
    config = VideoConfig() if config is None else config
    path = Path(path)
    if path.suffix[1:] not in _FORMATS:
        raise ValueError(
            f"`path` must end with one of {[f'.{name}' for name in _FORMATS]}, but got `{path}`."
        )
    renderer, dt = find_renderer(env)
    recording = _record(
        env,
        network,
        config.max_steps,
        jax.random.key(config.seed),
        n_episodes=config.n_episodes,
        deterministic=config.deterministic,
    )
    states = _host_states(recording)
    stride = max(1, int(np.ceil(1 / (dt * config.max_fps) - 1e-6)))
    fps = 1 / (dt * stride)
    frames = _frames(renderer, states[::stride], config)
    write = _write_mp4 if path.suffix == ".mp4" else _write_gif
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.stem}.partial{path.suffix}")
    try:
        write(partial, frames, fps)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return Video(path, len(states[::stride]), fps, *_episodes(recording))


@final
class VideoRecorder:
    """Makes videos in training, as its `checkpoint_fn`.

    A video that fails does not end the run: it is told by a warning.

    **Arguments:**

    - `env`: to act in.
    - `directory`: where the videos go, named by the count of environment steps.
    - `config`: of the videos.
    - `latest`: the count of environment steps that the run begins with, if it is continued:
        a video is due when it has passed the next multiple.
    """

    def __init__(self, env: Env, directory: str | Path, config: VideoConfig, *, latest: int = 0):
        self._env = env
        self._directory = Path(directory)
        self._config = config
        self._latest = latest

    def __call__(self, training_state: TrainingState, steps: int) -> None:
        """Makes a video if one is due."""
        every = self._config.every_steps
        if every is None or steps // every == self._latest // every:
            return
        self._latest = steps
        try:
            record_video(
                self._env,
                training_state.network,
                self._directory / f"{steps}.{self._config.format}",
                self._config,
            )
        except Exception as error:
            warnings.warn(f"No video after {steps:,} steps: {error}", stacklevel=2)


def use_headless_rendering() -> None:
    """Has MuJoCo draw without a screen, where there is none and nothing else was asked for.

    To be called before MuJoCo is first imported.
    """
    has_screen = "DISPLAY" in os.environ or "WAYLAND_DISPLAY" in os.environ
    if sys.platform != "linux" or has_screen or "MUJOCO_GL" in os.environ:
        return
    for name, library in (("egl", "EGL"), ("osmesa", "OSMesa")):
        if ctypes.util.find_library(library) is not None:
            os.environ["MUJOCO_GL"] = name
            return


_record = eqx.filter_jit(record_rollout)


def _host_states(recording: Recording) -> list[EnvState]:
    """The recorded states one by one, with NumPy arrays."""
    leaves, treedef = jax.tree.flatten(recording.env_states)
    rows = [
        leaf if jnp.issubdtype(leaf.dtype, jax.dtypes.extended) else np.asarray(leaf)
        for leaf in leaves
    ]
    return [
        jax.tree.unflatten(treedef, [row[time] for row in rows])
        for time in range(int(recording.length))
    ]


def _episodes(recording: Recording) -> tuple[list[float], list[int]]:
    """The return and the length of each episode."""
    length = int(recording.length)
    kinds = [np.asarray(leaf)[:length] for leaf in jax.tree.leaves(recording.rewards)]
    rewards = np.sum(kinds, axis=0)
    ends = 1 + np.flatnonzero(np.asarray(recording.done)[:length])
    bounds = np.unique(np.concatenate([[0], ends, [length]]))
    spans = list(itertools.pairwise(bounds.tolist()))
    return [float(np.sum(rewards[a:b])) for a, b in spans], [b - a for a, b in spans]


def _frames(
    renderer: SupportsRender, states: Sequence[EnvState], config: VideoConfig
) -> Iterator[_Frame]:
    chunk = max(1, min(_CHUNK, _CHUNK_PIXELS // (config.height * config.width)))
    for start in range(0, len(states), chunk):
        try:
            with contextlib.redirect_stderr(io.StringIO()):  # Playground shows a progress bar
                pictures = renderer.render(
                    list(states[start : start + chunk]),
                    config.height,
                    config.width,
                    config.camera,
                )
        except (ImportError, ValueError):
            raise
        except Exception as error:
            raise RuntimeError(_drawing_failed(renderer, error)) from error
        yield from map(np.asarray, pictures)


def _drawing_failed(renderer: SupportsRender, error: Exception) -> str:
    message = f"`{type(renderer).__name__}` could not be drawn: {error}."
    if "mujoco" not in sys.modules:
        return message
    backend = os.environ.get("MUJOCO_GL", "not set")
    return (
        f"{message} MuJoCo draws without a screen by EGL or OSMesa, which is chosen by the "
        f"environment variable `MUJOCO_GL` before it is first imported (now: {backend}). Set it "
        "to `egl` or `osmesa`; on Debian the libraries are `libegl1` and `libosmesa6`."
    )


def _write_mp4(path: Path, frames: Iterator[_Frame], fps: float) -> None:
    try:
        import imageio_ffmpeg
    except ImportError as error:
        raise ImportError(
            'MP4 files need imageio-ffmpeg. Install it with `pip install "eqx-ppo[video]"`, or '
            "write a `.gif`."
        ) from error
    first = next(frames)
    height, width, _ = first.shape
    source = f"-f rawvideo -pix_fmt rgb24 -s {width}x{height} -r {fps:.6f} -i -"
    target = "-an -c:v libx264 -pix_fmt yuv420p -crf 20 -movflags +faststart"
    command = [imageio_ffmpeg.get_ffmpeg_exe(), "-y", "-loglevel", "error", *source.split()]
    # Its own writer forks by a way that JAX warns of. Ctrl-C is for us alone.
    with (
        tempfile.TemporaryFile() as log,
        subprocess.Popen(
            [*command, *target.split(), str(path)],
            stdin=subprocess.PIPE,
            stderr=log,
            process_group=0,
        ) as encoder,
    ):
        assert encoder.stdin is not None
        with contextlib.suppress(BrokenPipeError), encoder.stdin:
            for frame in itertools.chain([first], frames):
                encoder.stdin.write(np.ascontiguousarray(frame).tobytes())
        if encoder.wait() != 0:
            log.seek(0)
            raise RuntimeError(f"Encoding `{path}` failed: {log.read().decode().strip()}")


def _write_gif(path: Path, frames: Iterator[_Frame], fps: float) -> None:
    try:
        from PIL import Image
    except ImportError as error:
        raise ImportError(
            'GIF files need Pillow. Install it with `pip install "eqx-ppo[video]"`.'
        ) from error
    images = map(Image.fromarray, frames)
    next(images).save(path, save_all=True, append_images=images, duration=round(1000 / fps), loop=0)
