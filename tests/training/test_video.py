"""Videos: what they show, how fast, and what happens when drawing fails."""

import dataclasses
import os
import subprocess
import sys
import types

import jax
import numpy as np
import pytest

from eqx_ppo.envs import ActionRepeatWrapper, EpisodeWrapper, Pendulum, Recall
from eqx_ppo.training import VideoConfig, VideoRecorder, _video, record_video
from tests.algorithms.test_recording import CountedActions

Image = pytest.importorskip("PIL.Image")
imageio_ffmpeg = pytest.importorskip("imageio_ffmpeg")

ENV = EpisodeWrapper(Pendulum(), 4)
SMALL = VideoConfig(n_episodes=2, width=64, height=48)


def decoded(path):
    """The pictures of an MP4 file."""
    command = [imageio_ffmpeg.get_ffmpeg_exe(), "-loglevel", "error", "-i", str(path)]
    command += ["-f", "rawvideo", "-pix_fmt", "rgb24", "-"]
    raw = subprocess.run(command, check=True, capture_output=True, stdin=subprocess.DEVNULL).stdout
    return np.frombuffer(raw, np.uint8).reshape(-1, SMALL.height, SMALL.width, 3)


@pytest.fixture(scope="module")
def expected():
    """What the video has to show, drawn from a recording of its own."""
    recording = _video._record(
        ENV,
        CountedActions(),
        SMALL.max_steps,
        jax.random.key(SMALL.seed),
        n_episodes=2,
        deterministic=True,
    )
    theta = np.asarray(recording.env_states.data.theta)
    state = Pendulum().reset(jax.random.key(0))
    states = [state.replace(data=state.data._replace(theta=angle)) for angle in theta[:8]]
    return recording, np.stack(Pendulum().render(states, SMALL.height, SMALL.width))


def test_an_mp4_shows_both_episodes(tmp_path, expected):
    recording, drawn = expected
    made = record_video(ENV, CountedActions(), tmp_path / "new" / "a.mp4", SMALL)
    assert made.path == tmp_path / "new" / "a.mp4"
    assert made.fps == pytest.approx(20.0)
    assert made.n_frames == 8
    assert made.lengths == [4, 4]
    rewards = np.asarray(recording.rewards)[:8]
    np.testing.assert_allclose(made.returns, [rewards[:4].sum(), rewards[4:].sum()], rtol=1e-5)
    shown = decoded(made.path).astype(float)
    assert shown.shape == (8, 48, 64, 3)
    differences = np.abs(shown[:, None] - drawn[None].astype(float)).mean(axis=(2, 3, 4))
    assert np.diag(differences).max() < 6.0  # the loss of the compression
    assert list(differences.argmin(axis=1)) == list(range(8))
    assert [path.name for path in made.path.parent.iterdir()] == ["a.mp4"]


def test_a_gif_shows_the_same(tmp_path, expected):
    _, drawn = expected
    made = record_video(ENV, CountedActions(), str(tmp_path / "a.gif"), SMALL)
    with Image.open(made.path) as image:
        assert image.n_frames == 8
        assert image.info["duration"] == 50  # ms
        assert image.info["loop"] == 0
        for time in (0, 5):
            image.seek(time)
            shown = np.asarray(image.convert("RGB")).astype(float)
            assert np.abs(shown - drawn[time].astype(float)).mean() < 4.0


@pytest.mark.parametrize(
    ("repeats", "max_fps", "n_frames", "fps"),
    [(1, 20, 8, 20.0), (1, 19, 4, 10.0), (1, 7, 3, 20 / 3), (2, 50, 8, 10.0)],
)
def test_time_runs_as_in_the_environment(tmp_path, repeats, max_fps, n_frames, fps):
    """Every step takes 0.05 s, and what is shown per second of the video is one of the world."""
    env = EpisodeWrapper(ActionRepeatWrapper(Pendulum(), repeats), 4)
    config = dataclasses.replace(SMALL, max_fps=max_fps)
    made = record_video(env, CountedActions(), tmp_path / "a.gif", config)
    assert made.n_frames == n_frames
    assert made.fps == pytest.approx(fps)


def test_rewards_of_several_kinds_are_added_up():
    done, rewards = np.array([0, 1, 0, 0]), {"a": np.arange(4.0), "b": np.ones(4)}
    recording = types.SimpleNamespace(length=3, rewards=rewards, done=done)
    assert _video._episodes(recording) == ([3.0, 3.0], [2, 1])


# --- What goes wrong ------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class Undrawable:
    """A pendulum whose later pictures fail."""

    error: Exception
    dt = 0.05

    def reset(self, key):
        return Pendulum().reset(key)

    def step(self, state, action):
        return Pendulum().step(state, action)

    def render(self, trajectory, height=240, width=320, camera=None):
        print("a bar of progress", file=sys.stderr)
        if len(trajectory) < _video._CHUNK:
            raise self.error
        return [np.zeros((height, width, 3), np.uint8)] * len(trajectory)


@pytest.mark.parametrize("name", ["a.mp4", "a.gif"])
def test_a_video_that_fails_leaves_nothing(tmp_path, name, capsys):
    env = EpisodeWrapper(Undrawable(OSError("no context")), _video._CHUNK + 3)
    with pytest.raises(RuntimeError, match=r"`Undrawable` could not be drawn: no context\."):
        record_video(env, CountedActions(), tmp_path / name, dataclasses.replace(SMALL))
    assert list(tmp_path.iterdir()) == []
    assert capsys.readouterr().err == ""


def test_what_mujoco_needs_is_said(monkeypatch):
    monkeypatch.setitem(sys.modules, "mujoco", types.ModuleType("mujoco"))
    monkeypatch.delenv("MUJOCO_GL", raising=False)
    message = _video._drawing_failed(Pendulum(), OSError("no context"))
    assert "`MUJOCO_GL` before it is first imported (now: not set)" in message
    assert "`libegl1`" in message


def test_environments_and_files_that_are_refused(tmp_path):
    with pytest.raises(TypeError, match="`Recall` cannot be drawn"):
        record_video(EpisodeWrapper(Recall(), 3), CountedActions(), tmp_path / "a.mp4")
    with pytest.raises(
        ValueError, match=r"must end with one of \['.mp4', '.gif'\], but got `a.avi`"
    ):
        record_video(ENV, CountedActions(), "a.avi")


@pytest.mark.parametrize(("package", "name"), [("PIL", "a.gif"), ("imageio_ffmpeg", "a.mp4")])
def test_without_the_extra(tmp_path, monkeypatch, package, name):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=r'pip install "eqx-ppo\[video\]"'):
        record_video(ENV, CountedActions(), tmp_path / name, SMALL)


def test_a_failed_encoding_is_told(tmp_path):
    frames = iter([np.zeros((5, 5, 3), np.uint8)] * 3)  # odd, which the format has not
    with pytest.raises(RuntimeError, match=r"Encoding .* failed: .*not divisible by 2"):
        _video._write_mp4(tmp_path / "a.mp4", frames, 10.0)


@pytest.mark.parametrize(
    "wrong",
    [
        {"n_episodes": 0},
        {"max_steps": 1.5},
        {"width": 65},
        {"height": 0},
        {"height": 8194},
        {"max_fps": 0},
        {"every_steps": 0},
        {"seed": -1},
        {"seed": 2**32},
        {"format": "avi"},
    ],
)
def test_settings_are_checked(wrong):
    with pytest.raises(ValueError, match=f"`VideoConfig.{next(iter(wrong))}` must be"):
        VideoConfig(**wrong)


# --- In training ----------------------------------------------------------------------------


@pytest.fixture
def recorded(monkeypatch):
    """The paths that videos would be written to."""
    paths = []
    monkeypatch.setattr(
        _video, "record_video", lambda env, network, path, config: paths.append(path)
    )
    return paths


STATE = types.SimpleNamespace(network=CountedActions())


def test_videos_are_made_when_another_multiple_has_passed(tmp_path, recorded):
    recorder = VideoRecorder(ENV, tmp_path, VideoConfig(every_steps=100, format="gif"))
    for steps in (60, 120, 180, 240, 400):
        recorder(STATE, steps)
    assert recorded == [tmp_path / f"{steps}.gif" for steps in (120, 240, 400)]


def test_a_continued_run_makes_the_videos_that_are_due(tmp_path, recorded):
    recorder = VideoRecorder(ENV, tmp_path, VideoConfig(every_steps=100), latest=240)
    for steps in (260, 320):
        recorder(STATE, steps)
    assert recorded == [tmp_path / "320.mp4"]


def test_large_pictures_are_drawn_a_few_at_a_time():
    calls = []

    class Renderer:
        def render(self, trajectory, height, width, camera):
            calls.append(len(trajectory))
            return [np.zeros((1, 1, 3), np.uint8)] * len(trajectory)

    config = VideoConfig(width=8192, height=8192)
    assert len(list(_video._frames(Renderer(), [None] * 5, config))) == 5
    assert calls == [2, 2, 1]


def test_no_videos_are_made_where_none_are_asked_for(tmp_path, recorded):
    VideoRecorder(ENV, tmp_path, VideoConfig())(STATE, 10**9)
    assert recorded == []


def test_a_video_that_fails_does_not_end_training(tmp_path):
    recorder = VideoRecorder(EpisodeWrapper(Recall(), 3), tmp_path, VideoConfig(every_steps=1))
    with pytest.warns(UserWarning, match="No video after 1,000 steps: `Recall` cannot be drawn"):
        recorder(STATE, 1000)


# --- Without a screen -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("found", "variables", "expected_backend"),
    [
        (("EGL", "OSMesa"), {}, "egl"),
        (("OSMesa",), {}, "osmesa"),
        ((), {}, None),
        (("EGL",), {"DISPLAY": ":0"}, None),
        (("EGL",), {"MUJOCO_GL": "glfw"}, "glfw"),
    ],
)
def test_how_mujoco_draws_without_a_screen(monkeypatch, found, variables, expected_backend):
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "MUJOCO_GL"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "platform", "linux")
    find = lambda name: f"lib{name}.so" if name in found else None  # noqa: E731
    monkeypatch.setattr(_video.ctypes.util, "find_library", find)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    _video.use_headless_rendering()
    assert os.environ.get("MUJOCO_GL") == expected_backend


PLAYGROUND = """
import sys
import jax
import numpy as np
from eqx_ppo import EpisodeWrapper, load_playground
from eqx_ppo.envs import find_renderer
from eqx_ppo.training import VideoConfig
from eqx_ppo.training._video import _frames

renderer, dt = find_renderer(EpisodeWrapper(load_playground("CartpoleBalance"), 20))
state = jax.device_get(jax.jit(renderer.reset)(jax.random.key(0)))
angles = np.linspace(0.0, 3.0, 4)
states = [state.replace(data=state.data.replace(qpos=np.array([0.0, a]))) for a in angles]
frames = list(_frames(renderer, states, VideoConfig(width=160, height=120)))
np.save(sys.argv[1], np.stack(frames))
print(dt)
"""


@pytest.mark.slow
@pytest.mark.playground
@pytest.mark.skipif(_video.ctypes.util.find_library("EGL") is None, reason="needs libEGL")
def test_mujoco_playground(tmp_path):
    """In a process of its own: MuJoCo reads `MUJOCO_GL` when it is first imported."""
    done = subprocess.run(
        [sys.executable, "-c", PLAYGROUND, str(tmp_path / "frames.npy")],
        env=os.environ | {"MUJOCO_GL": "egl"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-1] == "0.01"
    frames = np.load(tmp_path / "frames.npy")
    assert frames.shape == (4, 120, 160, 3)
    assert frames.dtype == np.uint8
    assert len(np.unique(frames[0].reshape(-1, 3), axis=0)) > 50  # a lit scene
    # The pole is what is brown. It swings down: its tip is above the cart, then below it.
    brown = (frames[..., 0] > 120) & (frames[..., 2] < 110) & (frames[..., 0] > frames[..., 2] + 60)
    heights = [np.argwhere(shown)[:, 0].mean() for shown in brown]
    assert heights == sorted(heights)
    assert heights[-1] > heights[0] + 5
